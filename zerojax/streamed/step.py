"""The streamed step: a LayeredModel whose layers come to the device one after the other, in explicit loops inside one jit.

    forward    for t:  p = take(l[t]); start fetching l[t+d];  x[l+1] = block(all_gather(p), x[l]);  keep x[l]
    head       loss, dx = value_and_grad(head)
    backward   for t:  p, x = take(l[t]); ...;  g, dx = vjp(block)(dx);  g = reduce_scatter(g)
               update layer l here, its optimizer state fetched along with it (in_backward), or store g
    update     for t:  g, w, s = take(l[t]);  scale by the global norm;  update;  write back

Nothing is differentiated through a transfer: backward is a loop of its own, which takes the derivative of one layer at a time
(`residuals`). Order, prefetches and buffer slots are arrays of `host_offload.schedule`. Every tier runs the same loops
(ZeRO-Infinity, arXiv:2104.07857, section 5), and where the bytes rest does not change a number.

Microbatches run inside a tick: a layer is fetched and gathered once in forward and once in backward for all of them, its
gradient is complete at the end of its tick, and its optimizer state crosses the link once a step. The price is that the
layers' inputs are kept for all microbatches at once; `activations="pinned_host"` moves them off the device.

Of a block with stacks of tiles a layer's record is what else it has, and each tile is a record of its own: it is fetched,
gathered, used and released inside the layer's tick, where the block loops over tiles (`tiled_block`), and its gradient
is taken there, so that no device ever holds a whole layer (memory-centric tiling, ZeRO-Infinity, section 5.1.3).

With `gather_ahead` a tick gathers the layer of the next one while it computes its own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from host_offload.engine import DiskRecords
from zerojax.config import ZeroConfig
from zerojax.gather import gather_on_use
from zerojax.models import BLOCKS, LayeredModel, checked
from zerojax.resident import build_rule
from zerojax.sharding import (
    FSDP,
    STAGES,
    Spec,
    batch_spec,
    constrain_batch,
    named,
    num_batch_shards,
    split_microbatches,
    stored_spec,
    without_axis,
)
from zerojax.state import Layout, Plan, TrainState, is_stored, pick, read_layer, wait_for, write_layer
from zerojax.streamed.activations import Keeper, ResidualPlan, Scratch
from zerojax.streamed.ending import BackwardResult, Ending, RecordGrads, loss_scale
from zerojax.streamed.endings import ByLayers, InBackward, WholeTree
from zerojax.streamed.host_endings import Delayed, HostInBackward, OnHost
from zerojax.streamed.microbatches import key_of
from zerojax.streamed.phases import Tick, beside, run_phase
from zerojax.streamed.plan import StreamedPlan
from zerojax.streamed.tile_runner import TileRunner

Array = jax.Array
Plans = Mapping[str, Plan]


class StreamedStep:
    """The equations of one streamed step over a model, an optimizer and a layout."""

    def __init__(
        self, model: LayeredModel, tx: optax.GradientTransformation, layout: Layout, report: Callable[[str], None]
    ) -> None:
        self.model, self.layout = model, layout
        self.config, self.mesh, self.stage = layout.config, layout.mesh, STAGES[layout.config.stage]
        self.count, self.ahead = self.config.num_microbatches, self.config.gather_ahead
        self.records = StreamedPlan(model, tx, layout)
        self.parts, self.host, self.schedule = self.records.parts, self.records.host, self.records.schedule
        self.ending: Ending = ending_of(self.records, tx)
        self.keeper = Keeper(model, layout, self.records)
        self.rule = build_rule(model, layout, self.stage.params, report)

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
        records = self.records
        shapes = [records.abstract[i].shape[records.lead[i] :] for i in indices]
        return records.on_shards([jnp.zeros(shape, jnp.float32) for shape in shapes], indices)

    def split(self, batch: Any, key: Any) -> tuple[Any, Any]:
        """Return the microbatches and their keys."""
        if self.count == 1:
            return batch, key
        keys = None if key is None else jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(self.count))
        return split_microbatches(batch, self.count), keys

    def constrain(self, x: Any) -> Any:
        return constrain_batch(self.mesh, x)

    def load_ends(self, params: Any) -> Any:
        """Return the parameters that are no stack of layers, sharded, on the device."""
        ends = {name: tree for name, tree in params.items() if name != BLOCKS}
        leaves, tree = jax.tree.flatten(ends, is_leaf=is_stored)
        return jax.tree.unflatten(
            tree, [self.records.params[i].load(a) for i, a in zip(self.records.ends, leaves, strict=True)]
        )

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

    def gather(self, shards: Sequence[Array], part: Sequence[int] | None = None) -> list[Array]:
        """All_gather one layer, or the record of other leaves: W[D_fsdp, F] -> W[D, F]."""
        part = self.records.blocks if part is None else part
        return [self._gather(shard, self.records.params[i].spec) for i, shard in zip(part, shards, strict=True)]

    def _gather(self, shard: Array, stored: Spec) -> Array:
        whole = without_axis(stored, FSDP)
        if whole == stored:
            return shard
        shard = jax.lax.with_sharding_constraint(shard, named(self.mesh, stored))
        return jax.lax.with_sharding_constraint(shard, named(self.mesh, whole))

    def abstract_kept(self, abstract_params: Any, abstract_batch: Any) -> ResidualPlan:
        """Return what forward keeps of a batch, from shapes alone."""

        def first(params: Any, batch: Any) -> Any:
            batch, keys = self.split(batch, jax.random.key(0) if self.model.stochastic else None)
            ends = {name: tree for name, tree in params.items() if name != BLOCKS}
            return self.each(lambda b, k: self.embed(ends, b, k), batch, keys), keys

        on_device = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), abstract_params)
        x, keys = jax.eval_shape(first, on_device, abstract_batch)
        return self.keeper.plan(x, keys, self.count)

    def abstract_scratch(self, abstract_params: Any, abstract_batch: Any) -> Scratch:
        """Return shapes and shardings of the stacks in host memory that live inside a step."""
        kept, records = self.abstract_kept(abstract_params, abstract_batch), self.records
        return {
            "kept": [records.abstract_stack(kept.records[i], kept.shapes[i]) for i in kept.in_memory],
            "grads": records.abstract_grads() if records.grads_in_memory else [],
        }

    def on_disk(self, abstract_params: Any, abstract_batch: Any) -> list[DiskRecords]:
        """Return the records that a step writes before it reads them."""
        shelves = [r.shelf for r in self.abstract_kept(abstract_params, abstract_batch).records]
        shelves += [r.shelf for r in self.records.grads]
        return list(dict.fromkeys(s for s in shelves if s is not None))

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
        token = self.host.first_token(state) if self.host is not None else jnp.int32(0)
        if self.host is not None and state.pending is not None:
            token = self.host.start(self.host.parts.flat(state), state.pending, token)
        ends = self.load_ends(state.params)
        x = self.each(lambda b, k: self.embed(ends, b, k), batch, keys)
        kept = self.keeper.plan(x, keys, self.count)
        y, stacks = self.forward(state.params[BLOCKS], x, keys, plans, one, kept, self.keeper.stacks(kept, scratch))
        # What backward fetches first may overlap the head, and not the layers.
        plans, y = wait_for(plans, y, self.mesh)
        loss, dy, g_ends = self.head_and_grads(ends, y, batch, keys, loss_scale(state))
        carried = self.ending.begin(state, loss, scratch["grads"], token)
        dx, carried = self.backward(state, keys, plans, one, kept, stacks, dy, carried)
        g_ends = self.embed_grads(ends, batch, keys, dx, g_ends)
        after, metrics = self.ending.end(BackwardResult(state, loss, carried, g_ends, plans, one))
        grads = carried["grads"] if self.records.grads_in_memory else []
        return (after, {"kept": [stacks[i] for i in kept.in_memory], "grads": grads}), metrics

    def forward(
        self, blocks: Any, x: Any, keys: Any, plans: Plans, one: Array, kept: ResidualPlan | None, stacks: list[Array]
    ) -> tuple[Any, list[Array]]:
        """Run the layers; returns the last output, and the stacks of what is kept."""
        leaves, plan = jax.tree.leaves(blocks, is_leaf=is_stored), plans["forward"]
        tiled = self.keeper.without_keys(x) if kept is None else kept.tiled

        def read(layer: Array) -> list[Array]:
            return self.records.read_params(leaves, self.records.blocks, layer)

        def fetch(carry: Any, layer: Array) -> list[Array]:
            del carry
            return read(layer)

        def tick(carry: Any, now: Tick) -> Any:
            x, full, stacks = carry
            full, after = self.turn(full, now, lambda: now.taken if self.records.params_away else read(now.consume))
            if tiled is not None:
                tiles = TileRunner(self, plans, one, now, "forward", lambda carried: leaves)
                x_in, key = self.constrain_each(x), self.keys_of(keys, now.layer)
                y, values = tiled.forward(self.without_tiles(full), x_in, key, tiles.run)
                y = self.constrain_each(y)
                if kept is not None:
                    stacks = write_layer(kept.records, stacks, now.write, [*jax.tree.leaves(x_in), *values])
                return (y, after, stacks), now.landing
            params = self.keeper.block_tree(full)

            block = self.plain_block if kept is None else kept.layer.forward
            work = (after if now.takes else None, now.landing) if self.count == 1 else None

            def run(x: Any, key: Any) -> tuple[Any, list[Array], Any]:
                (y, values), done = beside(block, (params, x, key_of(key, now.layer)), work)
                return self.constrain(y), values, done

            y, values, done = self.each(run, x, keys)
            after, landing = self.after(work, done, after, now)
            if kept is not None:
                values = [*jax.tree.leaves(x), *values]
                stacks = write_layer(kept.records, stacks, now.write, values)
            return (y, after, stacks), landing

        phase = self.schedule.phase("forward")
        first = self.gather(read(plan["first"][0])) if self.ahead else None
        y, _, stacks = run_phase(phase, plan, (x, first, stacks), tick, one, fetch=fetch)
        return y, stacks

    def without_tiles(self, full: Sequence[Array]) -> list[Any]:
        """Return the block's leaves, gathered; stacks of tiles are None."""
        given = dict(zip(self.records.blocks, full, strict=True))
        return [given.get(i) for i in self.records.stacked]

    def keys_of(self, keys: Any, layer: Array) -> Any:
        """Return the key of one layer for each microbatch."""
        return key_of(keys, layer) if self.count == 1 or keys is None else jax.vmap(lambda key: key_of(key, layer))(keys)

    def constrain_each(self, x: Any) -> Any:
        """Keep activations split as the batch is; microbatches, where there are several, are dim 0."""
        if self.count == 1:
            return self.constrain(x)

        def constrain(a: Array) -> Array:
            if a.ndim < 2 or a.shape[1] % num_batch_shards(self.mesh):
                return a
            spec = (None, *batch_spec(a.ndim - 1, PartitionSpec.UNCONSTRAINED))
            return jax.lax.with_sharding_constraint(a, named(self.mesh, spec))

        return jax.tree.map(constrain, x)

    def plain_block(self, params: Any, x: Any, key: Any) -> tuple[Any, list[Array]]:
        return self.model.block(params, x, key), []

    def turn(self, full: Any, now: Tick, take: Callable[[], Any]) -> tuple[list[Array], Any]:
        """Return this tick's gathered layer, and what the next tick is handed: its own, gathered meanwhile, or None."""
        if not self.ahead:
            return self.gather(take()), None
        return full, (self.gather(take()) if now.takes else full)

    def after(self, work: Any, done: Any, full: Any, now: Tick) -> tuple[Any, Any]:
        """Return the next gathered layer and the record on its way, from what ran beside a tick's products."""
        if work is None:
            return full, now.landing
        return (done[0] if work[0] is not None else full), done[1]

    def head_and_grads(self, ends: Any, y: Any, batch: Any, keys: Any, scale: Array) -> tuple[Array, Any, list[Array]]:
        """Return the mean loss, dloss/dy, and the summed gradients of `ends`; the derivative is that of scale * loss."""

        def one(y: Any, batch: Any, key: Any) -> tuple[list[Array], tuple[Array, Any]]:
            batch = self.constrain(batch)

            def scaled(ends: Any, y: Any) -> tuple[Array, Array]:
                value = self.head(ends, y, batch, key)
                return value * scale, value

            (g, dy), value = jax.grad(scaled, argnums=(0, 1), has_aux=True)(ends, y)
            return self.reduced(g), (value, self.constrain(dy))

        g, (value, dy) = self.fold(one, self.zeros(self.records.ends), y, batch, keys)
        return (value if self.count == 1 else jnp.sum(value) / self.count), dy, g

    def reduced(self, ends: Any) -> list[Array]:
        """Return gradients of the unstacked leaves, on their shards."""
        return self.records.on_shards(jax.tree.leaves(ends), self.records.ends)

    def embed_grads(self, ends: Any, batch: Any, keys: Any, dx: Any, g_ends: list[Array]) -> list[Array]:
        """Add the embedding's gradients to those of the head."""

        def one(dx: Any, batch: Any, key: Any) -> tuple[list[Array], None]:
            (g,) = jax.vjp(lambda p: self.embed(p, batch, key), ends)[1](dx)
            return self.reduced(g), None

        if self.count > 1:
            return self.fold(one, g_ends, dx, batch, keys)[0]
        return [a + b for a, b in zip(g_ends, one(dx, batch, keys)[0], strict=True)]

    def backward(
        self,
        state: TrainState,
        keys: Any,
        plans: Plans,
        one: Array,
        kept: ResidualPlan,
        stacks: list[Array],
        dy: Any,
        carried: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Run the layers' derivatives, last layer first.

        Args:
          state: before the step.
          keys: of the microbatches.
          plans: the schedule's arrays.
          one: i32[] holding 1.
          kept: what forward kept, and how.
          stacks: of it.
          dy: cotangent of the last output.
          carried: by the ending.

        Returns:
          The cotangent of the first layer's input, and `carried`.
        """
        records, ending, plan, tiled = self.records, self.ending, plans["backward"], kept.tiled
        num = len(records.blocks) if records.params_away else 0

        def read(carried: dict[str, Any], layer: Array) -> list[Array]:
            return records.read_params(ending.params(state, carried), records.blocks, layer)

        def fetch(carry: Any, layer: Array) -> list[Array]:
            shards = read(carry[3], layer) if records.params_away else []
            return shards + read_layer(pick(kept.records, kept.away), pick(stacks, kept.away), layer)

        def tick(carry: Any, now: Tick) -> Any:
            dx, full, acts, carried = carry
            taken = now.taken or []
            full, full_after = self.turn(full, now, lambda: taken[:num] if records.params_away else read(carried, now.consume))
            acts, acts_after = (acts, taken[num:] if now.takes else acts) if self.ahead else (taken[num:], None)
            away = dict(zip(kept.away, acts, strict=True))
            values = [away[i] if i in away else r.read(stacks[i], now.layer) for i, r in enumerate(kept.records)]
            if tiled is not None:
                x, own = kept.parts(values)
                tiles = TileRunner(self, plans, one, now, "backward", lambda carried: ending.params(state, carried), carried)
                grads, dx = tiled.backward(
                    self.without_tiles(full), self.constrain_each(x), self.keys_of(keys, now.layer), own, dx,
                    partial(tiles.run, use=partial(ending.use, state)),
                    self.zeros(records.blocks) if self.count > 1 else [],
                )  # fmt: skip
                grads, dx = records.on_shards(grads, records.blocks), self.constrain_each(dx)
                grads, dx = jax.lax.optimization_barrier((grads, dx))
                made = RecordGrads(now, records.blocks, grads, full, now.landing)
                carried, landing = ending.use(state, tiles.carried, made)
                return (dx, full_after, acts_after, carried), landing
            params = self.keeper.block_tree(full)

            def derive(dx: Any, values: list[Array], key: Any, work: Any) -> tuple[list[Array], Any]:
                x, own = kept.parts(values)
                args = (params, self.constrain(x), key_of(key, now.layer), own, dx)
                (g, dx), work = beside(kept.layer.backward, args, work)
                return records.on_shards(jax.tree.leaves(g), records.blocks), (self.constrain(dx), work)

            total = self.zeros(records.blocks) if self.count > 1 else []
            work = (full_after if now.takes else None, now.landing) if self.count == 1 else None
            grads, (dx, done) = self.fold(lambda dx, v, k: derive(dx, v, k, work), total, dx, values, keys)
            full_after, landing = self.after(work, done, full_after, now)
            # What uses the gradients waits for dx, so that they are reduced beside the products that are left.
            grads, dx = jax.lax.optimization_barrier((grads, dx))
            if self.count > 1:  # else what runs beside the microbatches' loop would start after it
                grads, full_after, landing = jax.lax.optimization_barrier((grads, full_after, landing))
            carried, landing = ending.use(state, carried, RecordGrads(now, records.blocks, grads, full, landing))
            return (dx, full_after, acts_after, carried), landing

        first = acts = None
        if self.ahead:
            record = fetch((None, None, None, carried), plan["first"][0])
            shards = record[:num] if records.params_away else read(carried, plan["first"][0])
            first, acts = self.gather(shards), record[num:]
        carry = (dy, first, acts, carried)
        layers = self.layout.device_layers if self.config.update == "in_backward" else 0
        dx, _, _, carried = run_phase(
            self.schedule.phase("backward"), plan, carry, tick, one, fetch=fetch, device_layers=layers
        )
        return dx, carried

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def eval(self, params: Any, batch: Any, plans: Plans, one: Array) -> Array:
        """Return the loss of a batch, without keys."""
        step = dataclasses.replace(self.config, num_microbatches=1)
        single = self if self.count == 1 else self.with_config(step)
        ends = single.load_ends(params)
        x = single.embed(ends, batch, None)
        y, _ = single.forward(params[BLOCKS], x, None, plans, one, None, [])
        return single.head(ends, y, batch, None)

    def with_config(self, config: ZeroConfig) -> "StreamedStep":
        """Return this step under another config of the same layout."""
        other = object.__new__(StreamedStep)
        other.__dict__.update(self.__dict__)
        other.config, other.count = config, config.num_microbatches
        return other


def ending_of(layout: StreamedPlan, tx: optax.GradientTransformation) -> Ending:
    """Return the ending that a config asks for."""
    in_backward = layout.config.update == "in_backward"
    if layout.parts is None:
        return WholeTree(layout, tx)
    if layout.host is None:
        return InBackward(layout, layout.parts) if in_backward else ByLayers(layout, layout.parts)
    if layout.config.delayed_update:
        return Delayed(layout, layout.parts, layout.host)
    return HostInBackward(layout, layout.parts, layout.host) if in_backward else OnHost(layout, layout.parts, layout.host)
