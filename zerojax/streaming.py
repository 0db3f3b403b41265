"""The streamed step: a LayeredModel whose layers come to the device one after the other, in explicit loops inside one jit.

    forward    for t:  p = take(l[t]); start fetching l[t+d];  x[l+1] = block(all_gather(p), x[l]);  keep x[l]
    head       loss, dx = value_and_grad(head)
    backward   for t:  p, x = take(l[t]); ...;  g, dx = vjp(block)(dx);  g = reduce_scatter(g)
               update layer l here, its optimizer state fetched along with it (in_backward), or store g
    update     for t:  g, w, s = take(l[t]);  scale by the global norm;  update;  write back

Nothing is differentiated through a transfer: backward is a loop of its own, which takes the derivative of one layer at a time
(`zerojax.saved`). Order, prefetches and buffer slots are arrays of `host_offload.schedule`. Every tier runs the same loops
(ZeRO-Infinity, arXiv:2104.07857, section 5), and where the bytes rest does not change a number.

Microbatches run inside a tick: a layer is fetched and gathered once in forward and once in backward for all of them, its
gradient is complete at the end of its tick, and its optimizer state crosses the link once a step. The price is that the
layers' inputs are kept for all microbatches at once; `activations="pinned_host"` moves them off the device.

With `gather_ahead` a tick gathers the layer of the next one while it computes its own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from host_offload.schedule import Schedule, build_schedule
from zerojax.config import ZeroConfig, updates_by_parts
from zerojax.gather import Spec, without_axis
from zerojax.host_update import HostUpdate
from zerojax.layout import Layout, named
from zerojax.mesh import FSDP, num_batch_shards
from zerojax.model import BLOCKS, LayeredModel, check_block
from zerojax.on_use import gather_on_use
from zerojax.optim import stored_spec
from zerojax.partition import LeafSpec, local_elements
from zerojax.parts import Parts, States, batch_spec, reason
from zerojax.precision import PRECISIONS
from zerojax.records import Now, Plan, Record, run_phase
from zerojax.resident import build_rule, build_update, checked, constrain_batch, finish, split_microbatches
from zerojax.saved import MODES, Layer, beside, plan_layer
from zerojax.stages import STAGES
from zerojax.state import Pending, TrainState

Array = jax.Array
Plans = Mapping[str, Plan]
Scratch = dict[str, list[Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """What forward keeps of each layer for backward.

    Attributes:
      layer: the traced block.
      records: how each array rests: the leaves of the layer's input, then what the block keeps. Microbatches, where there are
        several, are dim 0 of each.
      shapes: ShapeDtypeStruct of each.
      x_tree: structure of the layer's input.
    """

    layer: Layer
    records: tuple[Record, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    x_tree: Any

    @property
    def away(self) -> tuple[int, ...]:
        """Indices of the arrays that rest off the device."""
        return tuple(i for i, r in enumerate(self.records) if r.is_away)

    def parts(self, values: Sequence[Array]) -> tuple[Any, list[Array]]:
        """Return the layer's input, and what the block kept."""
        count = self.x_tree.num_leaves
        return jax.tree.unflatten(self.x_tree, values[:count]), list(values[count:])


class StreamedStep:
    """The equations of one streamed step over a model, an optimizer and a layout."""

    def __init__(
        self,
        model: LayeredModel,
        tx: optax.GradientTransformation,
        layout: Layout,
        report: Callable[[str], None],
    ) -> None:
        self.model, self.layout = model, layout
        self.config, self.mesh, self.stage = layout.config, layout.mesh, STAGES[layout.config.stage]
        self.count = self.config.num_microbatches
        self.ahead = self.config.gather_ahead
        self.parts = Parts(tx, layout, reason(self.config)) if updates_by_parts(self.config) else None
        stashes = self.config.grads != "device" or self.config.delayed_update
        stashes = stashes and self.config.update != "in_backward"
        on_host = self.parts is not None and self.config.update_on == "host"
        self.host = HostUpdate(self.parts, stashes=stashes, summed=self.count) if self.parts is not None and on_host else None
        self.schedule = plan_schedule(model.num_layers, layout, self.parts)
        self.whole_update = build_update(tx, layout)
        self.rule = build_rule(model, layout, self.stage.params, report)
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]]
        stacked = [path[0] == jax.tree_util.DictKey(BLOCKS) for path in paths]
        self.blocks = tuple(i for i, s in enumerate(stacked) if s)
        self.ends = tuple(i for i, s in enumerate(stacked) if not s)
        specs = [layout.specs[jax.tree_util.keystr(path)] for path in paths]

        def records(sharded: bool, tiers: tuple[str, str]) -> list[Record]:
            each = [stored_spec(s, sharded) for s in specs]
            return [Record(self.mesh, e[1:] if s else e, tiers[not s]) for e, s in zip(each, stacked, strict=True)]

        self.params = records(self.stage.params, (self.config.params, self.config.params))
        grads_tier = self.config.grads if self.host is None else "device"
        self.grads = records(self.stage.opt_state, (grads_tier, "device"))
        self.params_away = self.config.params != "device"
        self.grads_away = grads_tier != "device" and self.config.update != "in_backward"
        self.abstract = jax.tree.leaves(layout.abstract_state.params)

    # --- pieces ------------------------------------------------------------------------------------------------------------

    def each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Apply `function` to every microbatch: dim 0 of the trees where there are several."""
        return function(*trees) if self.count == 1 else jax.lax.map(lambda one: function(*one), trees)

    def fold(
        self, function: Callable[..., tuple[list[Array], Any]], total: list[Array], *trees: Any
    ) -> tuple[list[Array], Any]:
        """Sum over microbatches the first result of `function`, in float32 where there are several; return the second."""
        if self.count == 1:
            return function(*trees)

        def body(total: list[Array], one: Any) -> tuple[list[Array], Any]:
            values, out = function(*one)
            return [t + v.astype(jnp.float32) for t, v in zip(total, values, strict=True)], out

        return jax.lax.scan(body, total, trees)

    def zeros(self, indices: Sequence[int]) -> list[Array]:
        """Return where the gradients of one layer's leaves, or of unstacked leaves, are summed."""
        shapes = [self.abstract[i].shape[1:] if i in self.blocks else self.abstract[i].shape for i in indices]
        return [
            jax.lax.with_sharding_constraint(jnp.zeros(shape, jnp.float32), self.grads[i].sharding)
            for i, shape in zip(indices, shapes, strict=True)
        ]

    def split(self, batch: Any, key: Any) -> tuple[Any, Any]:
        """Return the microbatches and their keys."""
        if self.count == 1:
            return batch, key
        keys = None if key is None else jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(self.count))
        return split_microbatches(batch, self.count), keys

    def constrain(self, x: Any) -> Any:
        return constrain_batch(self.layout, x)

    def load_ends(self, params: Any) -> Any:
        """Return the parameters that are no stack of layers, sharded, on the device."""
        ends = {name: tree for name, tree in params.items() if name != BLOCKS}
        leaves, tree = jax.tree.flatten(ends)
        return jax.tree.unflatten(tree, [self.params[i].load(a) for i, a in zip(self.ends, leaves, strict=True)])

    def on_shards(self, function: Callable[..., Any], ends: Any, *args: Any) -> Any:
        """Evaluate `function(ends, *args)`, its parameters gathered on use and their gradients reduced to their shards."""
        specs = self.layout.specs
        if not self.stage.opt_state or all(s.sharded == s.base for s in specs.values()):
            return function(ends, *args)
        return gather_on_use(
            function, ends, *args,
            stored={path: stored_spec(s, self.stage.params) for path, s in specs.items()},
            cotangents={path: s.sharded for path, s in specs.items()},
            rule=self.rule,
        )  # fmt: skip

    def embed(self, ends: Any, batch: Any, key: Any) -> Any:
        last = key_of(key, self.model.num_layers)
        batch = self.constrain(batch)
        return self.constrain(self.on_shards(lambda p, b, k: self.model.embed(p["embed"], b, k), ends, batch, last))

    def head(self, ends: Any, x: Any, batch: Any, key: Any) -> Array:
        last = key_of(key, self.model.num_layers + 1)

        def loss(p: Any, x: Any, b: Any, k: Any) -> Array:
            return self.model.head(p["head"], p["embed"], x, b, k)

        value = self.on_shards(lambda p, x, b, k: checked(lambda p, b, k: loss(p, x, b, k))(p, b, k), ends, x, batch, last)
        return value.astype(jnp.float32)

    def gather(self, shards: Sequence[Array]) -> list[Array]:
        """All_gather one layer: W[D_fsdp, F] -> W[D, F]."""
        return [self._gather(shard, self.params[i].spec) for i, shard in zip(self.blocks, shards, strict=True)]

    def _gather(self, shard: Array, stored: Spec) -> Array:
        whole = without_axis(stored, FSDP)
        if whole == stored:
            return shard
        shard = jax.lax.with_sharding_constraint(shard, named(self.mesh, stored))
        return jax.lax.with_sharding_constraint(shard, named(self.mesh, whole))

    def block_tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.layout.abstract_params[BLOCKS]), leaves)

    # --- what is kept ------------------------------------------------------------------------------------------------------

    def plan(self, x: Any, keys: Any) -> Kept:
        """Choose what forward keeps, from the shapes of the first layer's input."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:] if self.count > 1 else a.shape, a.dtype), (x, keys))
        params = self.block_tree(
            [jax.ShapeDtypeStruct(self.abstract[i].shape[1:], self.abstract[i].dtype) for i in self.blocks]
        )
        x_one, key_one = one
        wrong = [
            f"{jax.tree_util.keystr(path) or 'x'} is {a.dtype}"
            for path, a in jax.tree_util.tree_flatten_with_path(x_one)[0]
            if not jnp.issubdtype(a.dtype, jnp.floating)
        ]
        if wrong:
            raise ValueError(
                f"a streamed step hands floating activations from layer to layer, but {', '.join(wrong)}: cast them in embed, "
                "or read them from the batch in head"
            )
        check_block(self.model, params, x_one, key_one)
        config = self.config
        mode = config.activations if config.activations in MODES else "remat"
        layer = plan_layer(self.model.block, params, x_one, key_one, mode, config.saved_names, config.offloaded_names)
        leaves, x_tree = jax.tree.flatten(x_one)
        tier = config.activations if config.activations not in MODES else "device"
        records = [self._activation(a, tier, leaves[0].shape[:1]) for a in leaves]
        away = ["pinned_host" if off else "device" for off in layer.offloaded]
        records += [self._activation(a, t, leaves[0].shape[:1]) for a, t in zip(layer.shapes, away, strict=True)]
        lead = (self.count,) if self.count > 1 else ()
        shapes = tuple(jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype) for a in (*leaves, *layer.shapes))
        return Kept(layer, tuple(records), shapes, x_tree)

    def _activation(self, a: Any, tier: str, batch: tuple[int, ...]) -> Record:
        """Return how an activation rests: split as the batch is, if its dim 0 is the batch."""
        lead = (None,) if self.count > 1 else ()
        is_batch = a.shape[:1] == batch and batch and batch[0] % num_batch_shards(self.mesh) == 0
        free = PartitionSpec.UNCONSTRAINED if tier == "device" else None
        spec = batch_spec(len(a.shape), free) if is_batch else (free,) * len(a.shape)
        return Record(self.mesh, (*lead, *spec), tier)  # pyright: ignore[reportArgumentType]

    def stacks(self, kept: Kept, scratch: Scratch) -> list[Array]:
        """Return the empty stacks that forward fills."""
        given = dict(zip(kept.away, scratch["kept"], strict=True))
        return [
            given[i] if i in given else self._empty(r, a)
            for i, (r, a) in enumerate(zip(kept.records, kept.shapes, strict=True))
        ]

    def _empty(self, record: Record, a: Any) -> Array:
        stack = jnp.zeros((self.model.num_layers, *a.shape), a.dtype)
        return jax.lax.with_sharding_constraint(stack, named(self.mesh, (None, *record.spec)))

    def grad_dtype(self, index: int) -> Any:
        return self.abstract[index].dtype if self.count == 1 else jnp.dtype(jnp.float32)

    def abstract_scratch(self, abstract_params: Any, abstract_batch: Any) -> Scratch:
        """Return shapes and shardings of the stacks in host memory that live inside a step."""

        def first(params: Any, batch: Any) -> Any:
            batch, keys = self.split(batch, jax.random.key(0) if self.model.stochastic else None)
            ends = {name: tree for name, tree in params.items() if name != BLOCKS}
            return self.each(lambda b, k: self.embed(ends, b, k), batch, keys), keys

        on_device = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_params)
        kept = self.plan(*jax.eval_shape(first, on_device, abstract_batch))

        def stack(record: Record, shape: tuple[int, ...], dtype: Any) -> Any:
            sharding = named(self.mesh, (None, *record.spec), record.tier)
            return jax.ShapeDtypeStruct((self.model.num_layers, *shape), dtype, sharding=sharding)

        grads = [stack(self.grads[i], self.abstract[i].shape[1:], self.grad_dtype(i)) for i in self.blocks if self.grads_away]
        return {"kept": [stack(kept.records[i], kept.shapes[i].shape, kept.shapes[i].dtype) for i in kept.away], "grads": grads}

    # --- the step ----------------------------------------------------------------------------------------------------------

    def step(
        self, state: TrainState, batch: Any, plans: Plans, one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Run one step.

        Args:
          state: donated.
          batch: global batch.
          plans: the schedule's arrays.
          one: i32[] holding 1.
          scratch: stacks in host memory that live from forward to update; donated and returned.
        """
        key = jax.random.fold_in(state.key, state.step) if self.model.stochastic else None
        batch, keys = self.split(batch, key)
        token = self.host.first_token() if self.host is not None else jnp.int32(0)
        if self.host is not None and state.pending is not None:
            token = self.host.start(self.host.parts.flat(state), state.pending, token)
        ends = self.load_ends(state.params)
        x = self.each(lambda b, k: self.embed(ends, b, k), batch, keys)
        kept = self.plan(x, keys)
        y, stacks = self.forward(state.params[BLOCKS], x, keys, plans["forward"], one, kept, self.stacks(kept, scratch))
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)
        # What backward fetches first may overlap the head, and not the layers.
        plan, y = jax.lax.optimization_barrier((plans["backward"], y))
        loss, dy, g_ends = self.head_and_grads(ends, y, batch, keys, scale)
        backward = self.backward if self.config.update != "in_backward" else self.backward_updating
        dx, carried = backward(state, loss, dy, keys, plan, one, kept, stacks, scratch, token)
        g_ends = self.embed_grads(ends, batch, keys, dx, g_ends)
        scratch = scratch | {"kept": [stacks[i] for i in kept.away]}
        if self.config.update == "in_backward":
            return self.close_updated(state, loss, carried, g_ends, one, scratch)
        if state.pending is not None:
            return self.delay(state, loss, carried, g_ends, plans["update"], one, scratch)
        if self.host is not None:
            return self.update_on_host(state, loss, carried, g_ends, plans["update"], one, scratch)
        if self.parts is not None:
            return self.update(state, loss, carried, g_ends, plans["update"], one, scratch)
        grads = dict(zip((*self.blocks, *self.ends), [*carried["grads"], *g_ends], strict=True))
        tree = jax.tree.structure(state.params)
        mean = [self.mean(grads[i]) for i in range(len(grads))]
        after, metrics = self.whole_update(state, loss, jax.tree.unflatten(tree, mean))
        return (after, scratch), metrics

    def mean(self, grad: Array) -> Array:
        """Return the float32 mean over microbatches of a summed gradient."""
        grad = grad.astype(jnp.float32)
        return grad if self.count == 1 else grad / self.count

    def unscaled(self, grad: Array, state: TrainState) -> Array:
        grad = self.mean(grad)
        return grad if state.loss_scale is None else grad / state.loss_scale.scale

    def forward(
        self, blocks: Any, x: Any, keys: Any, plan: Plan, one: Array, kept: Kept | None, stacks: list[Array]
    ) -> tuple[Any, list[Array]]:
        """Run the layers; returns the last output, and the stacks of what is kept."""
        leaves = jax.tree.leaves(blocks)

        def fetch(carry: Any, layer: Array) -> list[Array]:
            del carry
            return self.read_params(leaves, layer)

        def tick(carry: Any, now: Now) -> Any:
            x, full, stacks = carry
            full, after = self.turn(full, now, lambda: now.taken if self.params_away else self.read_params(leaves, now.consume))
            params = self.block_tree(full)

            block = self.plain_block if kept is None else kept.layer.forward
            work = (after if now.takes else None, now.landing) if self.count == 1 else None

            def run(x: Any, key: Any) -> tuple[Any, list[Array], Any]:
                (y, values), done = beside(block, (params, x, key_of(key, now.layer)), work)
                return self.constrain(y), values, done

            y, values, done = self.each(run, x, keys)
            after, landing = self.after(work, done, after, now)
            if kept is not None:
                values = [*jax.tree.leaves(x), *values]
                stacks = [r.write(s, now.write, v) for r, s, v in zip(kept.records, stacks, values, strict=True)]
            return (y, after, stacks), landing

        phase = self.schedule.phase("forward")
        first = self.gather(self.read_params(leaves, plan["first"][0])) if self.ahead else None
        y, _, stacks = run_phase(phase, plan, (x, first, stacks), tick, one, fetch=fetch)
        return y, stacks

    def plain_block(self, params: Any, x: Any, key: Any) -> tuple[Any, list[Array]]:
        return self.model.block(params, x, key), []

    def turn(self, full: Any, now: Now, take: Callable[[], Any]) -> tuple[list[Array], Any]:
        """Return this tick's gathered layer, and what the next tick is handed: its own, gathered meanwhile, or None."""
        if not self.ahead:
            return self.gather(take()), None
        return full, (self.gather(take()) if now.takes else full)

    def after(self, work: Any, done: Any, full: Any, now: Now) -> tuple[Any, Any]:
        """Return the next gathered layer and the record on its way, from what ran beside a tick's products."""
        if work is None:
            return full, now.landing
        return (done[0] if work[0] is not None else full), done[1]

    def read_params(self, stacks: Sequence[Array], layer: Array) -> list[Array]:
        """Return one layer's shards, on the device."""
        return [self.params[i].read(stack, layer) for i, stack in zip(self.blocks, stacks, strict=True)]

    def head_and_grads(self, ends: Any, y: Any, batch: Any, keys: Any, scale: Array) -> tuple[Array, Any, list[Array]]:
        """Return the mean loss, dloss/dy, and the summed gradients of `ends`; the derivative is that of scale * loss."""

        def one(y: Any, batch: Any, key: Any) -> tuple[list[Array], tuple[Array, Any]]:
            batch = self.constrain(batch)

            def scaled(ends: Any, y: Any) -> tuple[Array, Array]:
                value = self.head(ends, y, batch, key)
                return value * scale, value

            (g, dy), value = jax.grad(scaled, argnums=(0, 1), has_aux=True)(ends, y)
            return self.reduced(g), (value, self.constrain(dy))

        g, (value, dy) = self.fold(one, self.zeros(self.ends), y, batch, keys)
        return (value if self.count == 1 else jnp.sum(value) / self.count), dy, g

    def reduced(self, ends: Any) -> list[Array]:
        """Return gradients of the unstacked leaves, on their shards."""
        pairs = zip(self.ends, jax.tree.leaves(ends), strict=True)
        return [jax.lax.with_sharding_constraint(g, self.grads[i].sharding) for i, g in pairs]

    def embed_grads(self, ends: Any, batch: Any, keys: Any, dx: Any, g_ends: list[Array]) -> list[Array]:
        """Add the embedding's gradients to those of the head."""

        def one(dx: Any, batch: Any, key: Any) -> tuple[list[Array], None]:
            (g,) = jax.vjp(lambda p: self.embed(p, batch, key), ends)[1](dx)
            return self.reduced(g), None

        if self.count > 1:
            return self.fold(one, g_ends, dx, batch, keys)[0]
        return [a + b for a, b in zip(g_ends, one(dx, batch, keys)[0], strict=True)]

    # --- backward ----------------------------------------------------------------------------------------------------------

    def run_backward(
        self,
        plan: Plan,
        one: Array,
        keys: Any,
        kept: Kept,
        stacks: list[Array],
        dy: Any,
        carried: Any,
        blocks: Callable[[Any], list[Array]],
        use: Callable[[Any, Now, list[Array], list[Array], Any], tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """Run the layers' derivatives, last layer first.

        Args:
          plan: the phase's arrays.
          one: i32[] holding 1.
          keys: of the microbatches.
          kept: what forward kept, and how.
          stacks: of it.
          dy: cotangent of the last output.
          carried: whatever `use` passes on.
          blocks: `blocks(carried)` are the stacks of parameters.
          use: `use(carried, now, grads, params, landing) -> (carried, landing)`, given one layer's summed gradients, on their
            shards, its gathered parameters, and the record on its way.

        Returns:
          The cotangent of the first layer's input, and `carried`.
        """
        num = len(self.blocks) if self.params_away else 0

        def fetch(carry: Any, layer: Array) -> list[Array]:
            shards = self.read_params(blocks(carry[3]), layer) if self.params_away else []
            return shards + [kept.records[i].read(stacks[i], layer) for i in kept.away]

        def tick(carry: Any, now: Now) -> Any:
            dx, full, acts, carried = carry
            taken = now.taken or []
            full, full_after = self.turn(
                full, now, lambda: taken[:num] if self.params_away else self.read_params(blocks(carried), now.consume)
            )
            acts, acts_after = (acts, taken[num:] if now.takes else acts) if self.ahead else (taken[num:], None)
            away = dict(zip(kept.away, acts, strict=True))
            values = [away[i] if i in away else r.read(stacks[i], now.layer) for i, r in enumerate(kept.records)]
            params = self.block_tree(full)

            def derive(dx: Any, values: list[Array], key: Any, work: Any) -> tuple[list[Array], Any]:
                x, own = kept.parts(values)
                args = (params, self.constrain(x), key_of(key, now.layer), own, dx)
                (g, dx), work = beside(kept.layer.backward, args, work)
                leaves = zip(self.blocks, jax.tree.leaves(g), strict=True)
                g = [jax.lax.with_sharding_constraint(v, self.grads[i].sharding) for i, v in leaves]
                return g, (self.constrain(dx), work)

            total = self.zeros(self.blocks) if self.count > 1 else []
            work = (full_after if now.takes else None, now.landing) if self.count == 1 else None
            grads, (dx, done) = self.fold(lambda dx, v, k: derive(dx, v, k, work), total, dx, values, keys)
            full_after, landing = self.after(work, done, full_after, now)
            # What uses the gradients waits for dx, so that they are reduced beside the products that are left.
            grads, dx = jax.lax.optimization_barrier((grads, dx))
            if self.count > 1:  # else what runs beside the microbatches' loop would start after it
                grads, full_after, landing = jax.lax.optimization_barrier((grads, full_after, landing))
            carried, landing = use(carried, now, grads, full, landing)
            return (dx, full_after, acts_after, carried), landing

        first = acts = None
        if self.ahead:
            record = fetch((None, None, None, carried), plan["first"][0])
            shards = record[:num] if self.params_away else self.read_params(blocks(carried), plan["first"][0])
            first, acts = self.gather(shards), record[num:]
        carry = (dy, first, acts, carried)
        layers = self.layout.device_layers if self.config.update == "in_backward" else 0
        dx, _, _, carried = run_phase(
            self.schedule.phase("backward"), plan, carry, tick, one, fetch=fetch, device_layers=layers
        )
        return dx, carried

    def backward(
        self,
        state: TrainState,
        loss: Array,
        dy: Any,
        keys: Any,
        plan: Plan,
        one: Array,
        kept: Kept,
        stacks: list[Array],
        scratch: Scratch,
        token: Array,
    ) -> tuple[Any, dict[str, Any]]:
        """Run backward and store each layer's gradient; returns dx, the stacks of gradients and the sum of their squares."""
        del loss
        leaves = jax.tree.leaves(state.params[BLOCKS])
        host = self.host if self.host is not None and self.host.stashes else None
        empty = scratch["grads"]
        if not host and not self.grads_away:
            shapes = [jax.ShapeDtypeStruct(self.abstract[i].shape[1:], self.grad_dtype(i)) for i in self.blocks]
            empty = [self._empty(self.grads[i], shape) for i, shape in zip(self.blocks, shapes, strict=True)]

        def use(carried: Any, now: Now, grads: list[Array], params: list[Array], landing: Any) -> Any:
            del params
            squares = carried["squares"] + self.squares(grads, state)
            if host:
                return {"grads": [], "squares": squares, "token": host.stash(now.layer, grads, carried["token"])}, landing
            pairs = zip(self.blocks, carried["grads"], grads, strict=True)
            written = [self.grads[i].write(s, now.write, g) for i, s, g in pairs]
            return {"grads": written, "squares": squares, "token": carried["token"]}, landing

        carried = {"grads": empty, "squares": jnp.float32(0), "token": token}
        return self.run_backward(plan, one, keys, kept, stacks, dy, carried, lambda _: leaves, use)

    def squares(self, grads: Sequence[Array], state: TrainState) -> Array:
        """Return the sum of squares of finished gradients: f32[]."""
        return sum((jnp.sum(jnp.square(self.unscaled(g, state))) for g in grads), jnp.float32(0))

    def backward_updating(
        self,
        state: TrainState,
        loss: Array,
        dy: Any,
        keys: Any,
        plan: Plan,
        one: Array,
        kept: Kept,
        stacks: list[Array],
        scratch: Scratch,
        token: Array,
    ) -> tuple[Any, dict[str, Any]]:
        """Run backward and update each layer as soon as its gradient is there."""
        del scratch
        parts = self.parts
        assert parts is not None
        states, host = parts.flat(state), self.host
        shared = [states.opt[j] for j in parts.update.shared]
        scalars = host.scalars(shared, loss, jnp.float32(1), jnp.float32(1)) if host else None

        def use(carried: Any, now: Now, grads: list[Array], params: list[Array], landing: Any) -> Any:
            states, squares = carried["states"], carried["squares"]
            if host and scalars is not None:
                squares = squares + self.squares(grads, state)
                old = [] if host.has_master or self.params_away else params
                pairs = zip(old, self.blocks, strict=False)
                old = [jax.lax.with_sharding_constraint(p, self.grads[i].sharding) for p, i in pairs]
                ok = jnp.isfinite(squares)
                states, token = host.update_layer(states, now.write, grads, old, ok, scalars, carried["token"])
                return {"states": states, "squares": squares, "token": token}, landing
            read = parts.read_opt(states, now.layer, now.on_device)
            if states.master is None:
                own = zip(self.blocks, params, strict=True)
                read = [jax.lax.with_sharding_constraint(p, self.grads[i].sharding) for i, p in own] + read
            squares = squares + self.squares(grads, state)
            mean = [self.mean(g) for g in grads]
            ok = jnp.isfinite(squares)
            update = parts.update_layer(states, now.write, mean, read, shared, loss, ok, now.on_device, landing)
            return {"states": update[0], "squares": squares, "token": carried["token"]}, update[1]

        def stacked(carried: Any) -> list[Array]:
            return [carried["states"].params[i] for i in self.blocks]

        carried = {"states": states, "squares": jnp.float32(0), "token": token}
        return self.run_backward(plan, one, keys, kept, stacks, dy, carried, stacked, use)

    # --- update ------------------------------------------------------------------------------------------------------------

    def close_updated(
        self, state: TrainState, loss: Array, carried: Any, g_ends: list[Array], one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Update what is left after a backward that updated the layers."""
        squares = carried["squares"] + self.squares(g_ends, state)
        norm = jnp.sqrt(squares)
        if self.host is not None:
            return self.close_on_host(state, carried["states"], loss, norm, None, g_ends, carried["token"], scratch)
        return self.close(state, carried["states"], loss, norm, [self.mean(g) for g in g_ends], one, scratch)

    def close(
        self, state: TrainState, states: States, loss: Array, norm: Array, g_ends: list[Array], one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Update the unstacked leaves and the shared scalars, and finish the step."""
        parts = self.parts
        assert parts is not None
        ok = jnp.isfinite(norm)
        shared = [states.opt[j] for j in parts.update.shared]
        states = parts.update_ends(states, g_ends, shared, loss, ok, one)
        states = parts.close(states, parts.shared(states, loss, ok))
        after, metrics = finish(state, *parts.trees(state, states), loss, norm, ok, self.config.loss_scaling)
        return (after, scratch), metrics

    def close_on_host(
        self,
        state: TrainState,
        states: States,
        loss: Array,
        norm: Array,
        scalars: Array | None,
        g_ends: list[Array],
        token: Array,
        scratch: Scratch,
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """As `close`, the unstacked leaves on the host too."""
        parts, host = self.parts, self.host
        assert parts is not None
        assert host is not None
        ok = jnp.isfinite(norm)
        shared = [states.opt[j] for j in parts.update.shared]
        scalars = host.scalars(shared, loss, jnp.float32(1), jnp.float32(1)) if scalars is None else scalars
        states, _ = host.update_ends(states, g_ends, ok, scalars, token)
        states = parts.close(states, parts.shared(states, loss, ok))
        after, metrics = finish(state, *parts.trees(state, states), loss, norm, ok, self.config.loss_scaling)
        return (after, scratch), metrics

    def delay(
        self, state: TrainState, loss: Array, carried: Any, g_ends: list[Array], plan: Plan, one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Take over the parameters that the host made meanwhile, and leave this step's update to the next one."""
        parts, host, pending = self.parts, self.host, state.pending
        assert parts is not None
        assert host is not None
        assert pending is not None
        before: Pending = pending
        norm = jnp.sqrt(carried["squares"] + self.squares(g_ends, state))
        ok = jnp.isfinite(norm)
        clip = self.config.clip_norm
        factor = jnp.float32(1) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        token = host.stash_ends(g_ends, carried["token"])

        def tick(carry: Any, now: Now) -> Any:
            return host.install(carry[0], parts.blocks, now.write, before, carry[1]), now.landing

        phase = self.schedule.phase("update")
        carry = run_phase(phase, plan, (parts.flat(state), token), tick, one, fetch=lambda carry, layer: [])
        states, _ = host.install(carry[0], parts.ends, jnp.int32(0), pending, carry[1])
        shared = [states.opt[j] for j in parts.update.shared]
        pending = Pending(pending.grads, shared, jnp.stack([loss, factor, scale]), ok)
        states = parts.close(states, parts.shared(states, loss, ok))
        trees = parts.trees(state, states)
        after, metrics = finish(state, *trees, loss, norm, ok, self.config.loss_scaling, pending)
        return (after, scratch), metrics

    def update_on_host(
        self, state: TrainState, loss: Array, carried: Any, g_ends: list[Array], plan: Plan, one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Scale by the global norm and update layer by layer, on the host."""
        parts, host = self.parts, self.host
        assert parts is not None
        assert host is not None
        norm = jnp.sqrt(carried["squares"] + self.squares(g_ends, state))
        ok = jnp.isfinite(norm)
        clip = self.config.clip_norm
        factor = jnp.float32(1) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        states = parts.flat(state)
        shared = [states.opt[j] for j in parts.update.shared]
        scalars = host.scalars(shared, loss, factor, scale)
        needs_old = not host.has_master and not self.params_away

        def tick(carry: Any, now: Now) -> Any:
            states, token = carry
            grads = [self.grads[i].read(s, now.layer) for i, s in zip(self.blocks, carried["grads"], strict=False)]
            old = parts.read_params(states, now.layer) if needs_old else []
            return host.update_layer(states, now.write, grads, old, ok, scalars, token), now.landing

        token = carried["token"]
        phase = self.schedule.phase("update")
        states, token = run_phase(phase, plan, (states, token), tick, one, fetch=lambda carry, layer: [])
        return self.close_on_host(state, states, loss, norm, scalars, g_ends, token, scratch)

    def update(
        self, state: TrainState, loss: Array, carried: Any, g_ends: list[Array], plan: Plan, one: Array, scratch: Scratch
    ) -> tuple[tuple[TrainState, Scratch], dict[str, Array]]:
        """Scale by the global norm and update layer by layer."""
        parts = self.parts
        assert parts is not None
        # What the update fetches first comes after backward, not before it.
        plan, squares = jax.lax.optimization_barrier((plan, carried["squares"]))
        norm = jnp.sqrt(squares + self.squares(g_ends, state))
        ok = jnp.isfinite(norm)
        clip = self.config.clip_norm
        factor = None if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        stacks = carried["grads"]

        def ready(grad: Array) -> Array:
            grad = self.unscaled(grad, state)
            return grad if factor is None else grad * factor

        def read_grads(layer: Array) -> list[Array]:
            return [self.grads[i].read(s, layer) for i, s in zip(self.blocks, stacks, strict=True)]

        states = parts.flat(state)
        shared = [states.opt[j] for j in parts.update.shared]
        old_away = states.master is None and self.params_away
        opt_away = self.config.opt_state != "device"
        opt_ahead = opt_away and not (self.layout.device_layers and (old_away or self.grads_away))
        num = len(self.blocks)

        def fetch(states: States, layer: Array) -> list[Array]:
            record = read_grads(layer) if self.grads_away else []
            record += parts.read_params(states, layer) if old_away else []
            return record + (parts.read_opt(states, layer, False) if opt_ahead else [])

        def tick(states: States, now: Now) -> tuple[States, Any]:
            taken = list(now.taken or [])
            grads, taken = (taken[:num], taken[num:]) if self.grads_away else (read_grads(now.layer), taken)
            old: list[Array] = []
            if states.master is None:
                old, taken = (taken[:num], taken[num:]) if old_away else (parts.read_params(states, now.layer), taken)
            opt = taken if opt_ahead and not now.on_device else parts.read_opt(states, now.layer, now.on_device)
            mean = [ready(g) for g in grads]
            return parts.update_layer(states, now.write, mean, old + opt, shared, loss, ok, now.on_device, now.landing)

        layers = self.layout.device_layers
        states = run_phase(self.schedule.phase("update"), plan, states, tick, one, fetch=fetch, device_layers=layers)
        scratch = scratch | {"grads": stacks if self.grads_away else []}
        return self.close(state, states, loss, norm, [ready(g) for g in g_ends], one, scratch)

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def eval(self, params: Any, batch: Any, plan: Plan, one: Array) -> Array:
        """Return the loss of a batch, without keys."""
        step = dataclasses.replace(self.config, num_microbatches=1)
        single = self if self.count == 1 else self.with_config(step)
        ends = single.load_ends(params)
        x = single.embed(ends, batch, None)
        y, _ = single.forward(params[BLOCKS], x, None, plan, one, None, [])
        return single.head(ends, y, batch, None)

    def with_config(self, config: ZeroConfig) -> "StreamedStep":
        """Return this step under another config of the same layout."""
        other = object.__new__(StreamedStep)
        other.__dict__.update(self.__dict__)
        other.config, other.count = config, config.num_microbatches
        return other


def key_of(key: Any, layer: int | Array) -> Any:
    """Return the key of one layer, or None."""
    return None if key is None else jax.random.fold_in(key, layer)


def layer_bytes(layout: Layout, parts: Parts | None) -> dict[str, int]:
    """Return the bytes of one layer's records on each device, as `host_offload.build_schedule` takes them.

    "grads" is the layer's whole gradient, which is there before it is reduced to its shards. Activations are not counted: their
    shapes are known once there is a batch.
    """
    mesh, stage = layout.mesh, STAGES[layout.config.stage]
    itemsize = jnp.dtype(PRECISIONS[layout.config.precision].compute_dtype).itemsize
    paths = jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]
    blocks = [
        (leaf.shape[1:], layout.specs[jax.tree_util.keystr(path)])
        for path, leaf in paths
        if path[0] == jax.tree_util.DictKey(BLOCKS)
    ]

    def elements(spec_of: Callable[[LeafSpec], Spec]) -> int:
        return sum(local_elements(shape, spec_of(spec)[1:], mesh) for shape, spec in blocks)

    opt_state = elements(lambda s: stored_spec(s, stage.opt_state)) * 4 if layout.abstract_state.master is not None else 0
    if parts is not None:
        states = jax.tree.leaves(parts.update.opt_state)
        for j in parts.update.states_of(parts.blocks):
            shape = states[j].shape[1:]
            opt_state += local_elements(shape, parts.opt_record(j).spec, mesh) * states[j].dtype.itemsize
    whole = elements(lambda s: s.base) * itemsize
    params = elements(lambda s: stored_spec(s, stage.params)) * itemsize
    return {"params": params, "gathered": whole, "grads": whole, "opt_state": opt_state}


def plan_schedule(num_layers: int, layout: Layout, parts: Parts | None) -> Schedule:
    """Return the schedule of a streamed step.

    Raises:
      ValueError: it does not fit `device_budget_bytes`.
    """
    config = layout.config
    activations = "pinned_host" if config.offloaded_names else config.activations
    on_host = config.update_on == "host"  # then its callbacks read and write the state, and nothing of it is fetched
    return build_schedule(
        num_layers,
        config.prefetch_distance,
        tiers={
            "params": config.params,
            "grads": "device" if on_host else config.grads,
            "opt_state": "device" if on_host else config.opt_state,
            "activations": "device" if activations in MODES else activations,
        },
        update=config.update or "after_backward",
        gather_ahead=config.gather_ahead,
        master=layout.abstract_state.master is not None or on_host,
        device_layers=layout.device_layers,
        record_bytes=layer_bytes(layout, parts),
        budget_bytes=config.device_budget_bytes,
    )
