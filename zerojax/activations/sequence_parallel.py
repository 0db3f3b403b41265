"""Sequence parallelism of a model that knows nothing of it (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

With tensor parallelism alone every device of a tensor group holds the whole stream x[B, T, H], and repeats norms, dropout and
residual sums. Here the stream rests as x[B, T_tensor, H], and only products whose weights `tensor` splits see it whole:

    column     W[H, F_t], split in a free dim         gather   z[B, T_t, H] -> z[B, T, H], then h[B, T, F_t] = z W
    row        V[F_t, H], split in the summed dim     scatter  y[B, T, H]{U_t} = h V, then y -> y[B, T_t, H]

An all_reduce is a reduce_scatter and an all_gather. So two gathers and two scatters a layer, forward and backward, move what
two all_reduces did. Backward gathers z once more, for the gradients of W, since a gathered value is never kept.

Each function of the model is traced, and its trace run equation by equation. `zerojax.activations.flow` follows which values
are split in the sequence. Where that meets a split weight, one of the two operations of `zerojax.activations.sequence_ops` is
put in: one gather for all products that read a value, one scatter of each sum. All other equations run as they are, and where
the rules do not tell what is split, the partitioner decides: the values are right whatever is put in, since both operations
only say where a value is.

A rematerialised region is entered. A loop over tiles has its operand gathered before it and its result scattered after it: its
products are computed for [t_tensor, ...] entries, one of each device, so that nothing is reduced inside of the loop.

With `overlap` a gather and its products, or a product and its scatter, become one ring (`zerojax.activations.rings`), where all
of them are plain products of which it is known how they are split; else the operations stay, and `why` tells the reason.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.activations.flow import ANY, Split, outs_of
from zerojax.activations.rings import RingProduct, column_products, ring_product, row_product
from zerojax.activations.sequence_ops import constrain, gather_sequence, holds_gather, scatter_sequence
from zerojax.jaxprs import FlatJaxpr, Instruction, bind, flatten, read
from zerojax.models import LayeredModel, stacks_of
from zerojax.sharding import BATCH_AXES, FSDP, TENSOR, Spec, axes_of, num_batch_shards, param_specs, without_axis
from zerojax.tiling import TileLoop, is_wide_product, loop_over, parse, wide_product

Array = jax.Array
_REGIONS = ("checkpoint", "remat", "remat2")
_OTHER_PRODUCTS = ("conv_general_dilated", "ragged_dot", "ragged_dot_general")
_AROUND = {"column": "its operand comes around a ring beside it", "row": "its sum goes around a ring beside it"}


@dataclasses.dataclass(frozen=True)
class BlockProduct:
    """One product of a block, and what sequence parallelism makes of it.

    Attributes:
      stack: name of the block's stack, "" of the only one.
      weight: path of its weight in the block's parameters; "" of a product of data with data.
      shape: of its result, of one microbatch.
      kind: "column", "row", or "left alone".
      why: what is put in, or the reason why nothing is.
    """

    stack: str
    weight: str
    shape: tuple[int, ...]
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind:<10}  {self.stack}{self.weight or '(data)'} -> {list(self.shape)}: {self.why}"


class SequenceParallelism:
    """Collects the products of a model's blocks, as they were last traced."""

    def __init__(self) -> None:
        self._of_stacks: dict[str, tuple[BlockProduct, ...]] = {}

    @property
    def products(self) -> tuple[BlockProduct, ...]:
        """Of all stacks, in order."""
        return tuple(product for products in self._of_stacks.values() for product in products)

    def traced(self, stack: str, products: Sequence[BlockProduct]) -> None:
        """Take the products of one block."""
        self._of_stacks[stack] = tuple(products)


def sequence_parallel(
    model: LayeredModel, mesh: Mesh, seen: SequenceParallelism, overlap: bool = False, recomputed: bool = False
) -> LayeredModel:
    """Return a model whose stream is split over `tensor` in its sequence; its functions take and return what they did.

    Args:
      model: whose specs name `tensor`. Floating leaves of x of three dims or more are its stream: dim 0 is the batch, dim 1
        the sequence.
      mesh: the device mesh.
      seen: told the products of the blocks, as they are traced.
      overlap: whether gathers and scatters run beside the products, around rings.
      recomputed: whether backward computes all of a layer again.

    Raises:
      ValueError: no weight of a block names `tensor`, which has more than one device.
    """
    if mesh.shape[TENSOR] == 1:
        return model
    specs = model.specs or {}
    given = jax.tree.leaves(specs.get("block"), is_leaf=lambda s: isinstance(s, PartitionSpec))
    if not any(TENSOR in axes_of(entry) for spec in given for entry in spec):
        raise ValueError(
            "sequence_parallel=True gathers and scatters activations beside products whose weights "
            f"tensor={mesh.shape[TENSOR]} splits, and no weight of a block names 'tensor': give the blocks specs, by Flax's "
            "annotations, or as in zerojax.with_specs(model, {r'(qkv|fc)/kernel': P(None, 'tensor'), "
            "r'(proj|out)/kernel': P('tensor', None)}); or leave sequence_parallel=False"
        )
    # The derivative of a head begins where its forward ends: no more is kept for it than while it runs.
    ends, ends_rule = (specs.get("head"), specs.get("embed")), _Rule(mesh, overlap=overlap, recomputed=True)
    rule = dataclasses.replace(ends_rule, recomputed=recomputed)

    def of_blocks(name: str, of: Any, block_specs: Any) -> dict[str, Any]:
        """Return the functions of a stack, or of a model that has one."""

        def traced(products: Sequence[BlockProduct]) -> None:
            seen.traced(name, [dataclasses.replace(product, stack=name) for product in products])

        enter = None if of.enter is None else _leaving(of.enter, mesh, lambda out: out[0])
        return {"block": _entered(of.block, (block_specs,), rule, traced, returns_stream=True), "enter": enter}

    if model.stacks:
        by_stack = specs.get("block") or {}
        pairs = zip(model.stacks, stacks_of(model), strict=True)
        stacks = [dataclasses.replace(s, **of_blocks(s.name, s, one.of(by_stack))) for s, one in pairs]
        blocks: dict[str, Any] = {"stacks": stacks}
    else:
        blocks = of_blocks("", model, specs.get("block"))
    has_state = "embed" in (model.init_state or {})
    return dataclasses.replace(
        model,
        embed=_leaving(model.embed, mesh, lambda out: out[0] if has_state else out),
        head=_entered(model.head, ends, ends_rule),
        predict=None if model.predict is None else _entered(model.predict, ends, ends_rule),
        **blocks,
    )


def _leaving(function: Callable[..., Any], mesh: Mesh, stream_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return an embedding, or an `enter`, whose x leaves it as a stream: the sum over a split vocabulary is scattered."""

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(out := function(*args))
        # x comes first, whatever is returned beside it.
        is_stream = _is_stream(jax.tree.leaves(stream_of(out)))
        for n, (path, a) in enumerate(jax.tree_util.tree_flatten_with_path(stream_of(out))[0]):
            if is_stream[n]:
                spec = _stream_spec(a, mesh, jax.tree_util.keystr(path))
                # Else the partitioner splits tokens by the sequence too, and may gather the table for them.
                leaves[n] = scatter_sequence(constrain(a, without_axis(spec, TENSOR), mesh), spec, mesh)
        return jax.tree.unflatten(tree, leaves)

    return run


def _entered(
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    rule: "_Rule",
    traced: Callable[[Sequence[BlockProduct]], None] = lambda products: None,
    returns_stream: bool = False,
) -> Callable[..., Any]:
    """Return `function(*params, x, *rest)`, with what sequence parallelism puts in.

    Args:
      function: a block, or a head.
      specs: of each tree of params.
      rule: of the walk, without what follows from x.
      traced: told the products.
      returns_stream: whether it returns an x, alone or before other things.

    Raises:
      ValueError: when it is traced: it returns an x of which nothing is a stream, or of which dim 1 does not divide.
    """
    mesh = rule.mesh

    def run(*args: Any) -> Any:
        params, x, rest = args[: len(specs)], args[len(specs)], args[len(specs) + 1 :]
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        program = flatten(closed.jaxpr, closed.consts, lambda eqn: parse(eqn) is not None)
        values, splits = list[Any](jax.tree.leaves(params)), list[Split | None]()
        paths = dict[int, tuple[str, ...]]()
        for tree, of_tree in zip(params, specs, strict=True):
            for path, spec in param_specs(tree, of_tree, mesh, FSDP).items():
                paths[program.inputs[len(splits)]] = (path,)
                splits.append(tuple(map(axes_of, spec.base)))
        streams = dict[int, Spec]()
        is_stream = _is_stream(jax.tree.leaves(x))
        for n, (path, a) in enumerate(jax.tree_util.tree_flatten_with_path(x)[0]):
            if is_stream[n]:
                streams[n] = _stream_spec(a, mesh, jax.tree_util.keystr(path))
            values.append(constrain(a, streams[n], mesh) if n in streams else a)
            splits.append(tuple(map(axes_of, streams[n])) if n in streams else _split_as_batch(a, mesh))
        # Of what comes besides, dim 0 may be the batch. Other dims are as the partitioner has them.
        batch = {jnp.shape(a)[:1] for a in jax.tree.leaves(x)}
        for a in jax.tree.leaves(rest):
            values.append(a)
            splits.append(_split_as_batch(a, mesh) if jnp.shape(a)[:1] in batch else ((),) * jnp.ndim(a))
        if returns_stream and not streams:
            leaves = ", ".join(f"{jnp.result_type(a).name}{list(jnp.shape(a))}" for a in jax.tree.leaves(x))
            raise ValueError(
                "sequence_parallel=True splits dim 1 of x[B, T, ...] between layers, and no floating leaf of x has three dims: "
                f"x is {leaves}. Leave sequence_parallel=False"
            )
        shapes = {jnp.shape(a)[:2] for n, a in enumerate(jax.tree.leaves(x)) if n in streams}
        walk = _Walk(dataclasses.replace(rule, streams=shapes, products=[]), paths)
        outs, _ = walk.run(program, values, splits)
        traced(walk.rule.products)
        for n, spec in streams.items() if returns_stream else ():
            outs[n] = constrain(outs[n], spec, mesh)  # x comes first, whatever a block returns beside it
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _is_stream(leaves: Sequence[Any]) -> list[bool]:
    """Tell which leaves of x are its stream: floating, of three dims or more, and of the sequence of the largest of these."""
    could = [jnp.ndim(a) >= 3 and jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves]
    largest = max((jnp.shape(a) for a, is_it in zip(leaves, could, strict=True) if is_it), key=math.prod, default=(0, 0))
    return [is_it and jnp.shape(a)[1] == largest[1] for a, is_it in zip(leaves, could, strict=True)]


def _stream_spec(a: Any, mesh: Mesh, path: str) -> Spec:
    """Return P((data, fsdp), tensor, None) of a leaf of x.

    Raises:
      ValueError: its dim 1 does not divide.
    """
    shape, t = jnp.shape(a), mesh.shape[TENSOR]
    if shape[1] % t:
        raise ValueError(
            f"sequence_parallel=True splits dim 1 of x{path}, of shape {tuple(shape)}, over tensor={t}, and {shape[1]} does "
            f"not divide by {t}: pad the sequences to {-(-shape[1] // t) * t}, or leave sequence_parallel=False"
        )
    return (BATCH_AXES if shape[0] % num_batch_shards(mesh) == 0 else None, TENSOR, *(None,) * (len(shape) - 2))


def _split_as_batch(a: Any, mesh: Mesh) -> Split:
    shape = jnp.shape(a)
    is_batch = bool(shape) and shape[0] % num_batch_shards(mesh) == 0
    return tuple(BATCH_AXES if is_batch and d == 0 else () for d in range(len(shape)))


def _as_spec(split: Split) -> Spec:
    """Return a split as a spec; a dim that is split as what it meets is whole."""
    return tuple(None if entry is ANY or not entry else entry[0] if len(entry) == 1 else tuple(entry) for entry in split)


def _dims(split: Split) -> list[int]:
    """Return the dims that `tensor` splits."""
    return [d for d, entry in enumerate(split) if entry is not ANY and TENSOR in entry]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What a walk needs to know.

    Attributes:
      mesh: the device mesh.
      streams: the (B, T) of the leaves of x.
      products: that were met, in order.
      overlap: whether rings are put in.
      recomputed: whether the derivative of what is walked runs its forward too: it is rematerialised, or a head.
    """

    mesh: Mesh
    streams: Set[tuple[int, ...]] = frozenset()
    products: list[BlockProduct] = dataclasses.field(default_factory=list)
    overlap: bool = False
    recomputed: bool = False


class _Walk:
    """Runs a program, and puts the two operations in."""

    def __init__(self, rule: _Rule, params: Mapping[int, tuple[str, ...]]) -> None:
        """Run under `rule`; `params` are the paths of the input slots that are parameters."""
        self.rule, self.mesh, self.params = rule, rule.mesh, dict(params)
        self.slots: dict[int, Any] = {}
        self.splits: dict[int, Split | None] = {}
        self.same: dict[int, int] = {}  # a cast of a value -> the first such cast of it
        self.casts: dict[tuple[int, Any], int] = {}
        self.whole: dict[int, Array] = {}  # what was gathered, by slot
        self.kinds: dict[int, tuple[str, int]] = {}  # of the result of a product: its kind, and the position of its weight
        self.scattered: set[int] = set()  # results that were scattered
        self.after: Sequence[Instruction] = ()  # this equation, and those after it
        self.made: dict[int, Array] = {}  # results of products that a ring made, with that of the first

    def run(
        self, program: FlatJaxpr, values: Sequence[Any], splits: Sequence[Split | None]
    ) -> tuple[list[Any], list[Split | None]]:
        """Return the results of a program, and how each is split."""
        self.slots.update(zip(program.inputs, values, strict=True))
        self.splits.update(zip(program.inputs, splits, strict=True))
        data = program.reached(slot for slot in program.inputs if slot not in self.params)
        instructions = program.instructions
        if self.rule.overlap:  # a ring makes the products of all weights that read a value where the first of them is
            instructions = sorted(instructions, key=lambda i: bool(i.eqn.effects) or not data.isdisjoint(i.outs))
        for n, i in enumerate(instructions):
            self.after = instructions[n:] if self.rule.overlap else ()
            values = [read(ref, self.slots) for ref in i.ins]
            splits = [self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value) for ref in i.ins]
            outs, of_outs = self.apply(i, values, splits, data)
            self.slots.update(zip(i.outs, outs, strict=True))
            self.splits.update(zip(i.outs, of_outs, strict=True))
            if data.isdisjoint(i.outs):
                paths = tuple(dict.fromkeys(path for slot in i.reads for path in self.params[slot]))
                self.params.update(dict.fromkeys(i.outs, paths))
            elif i.eqn.primitive.name == "convert_element_type":
                # Modules cast their input, each for itself: what they read is one value all the same.
                slot = self.canonical(i.reads[0])
                self.same[i.outs[0]] = self.casts.setdefault((slot, i.eqn.params["new_dtype"]), i.outs[0])
        refs = program.outputs
        of_outs = [self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value) for ref in refs]
        return [read(ref, self.slots) for ref in refs], of_outs

    def canonical(self, slot: int) -> int:
        return self.same.get(slot, slot)

    def apply(
        self, i: Instruction, values: list[Any], splits: list[Split | None], data: set[int]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run one equation, with what is put in beside it."""
        if data.isdisjoint(i.outs):
            return self.plain(i, values, splits)
        if (dot := product_of(i.eqn)) is not None:
            return self.product(i, dot, values, splits)
        if i.eqn.primitive.name in _REGIONS:
            return self.region(i, values, splits)
        if (loop := parse(i.eqn)) is not None:
            return self.loop(i, loop, values, splits)
        name = i.eqn.primitive.name
        if name == "fft":
            return self.fft(i, values, splits)
        if i.has_jaxpr or name in _OTHER_PRODUCTS:
            why = f"inside of {name}, which is not entered" if i.has_jaxpr else f"{name} is left to the partitioner"
            for ref, split in zip(i.ins, splits, strict=True):
                if isinstance(ref, int) and ref in self.params and split is not None and _dims(split):
                    self.note(i, self.params[ref], "left alone", why)
        return self.plain(i, values, splits)

    def fft(self, i: Instruction, values: list[Any], splits: list[Split | None]) -> tuple[list[Any], list[Split | None]]:
        """Run a transform along whole dims: XLA's partitioner ends the process where a split one does not divide twice."""
        split = splits[0]
        if split is None:
            return self.plain(i, values, splits)
        spec = _as_spec(split)
        if any(d >= len(split) - len(i.eqn.params["fft_lengths"]) for d in _dims(split)):
            values, spec = [self.gathered(i.ins[0], values[0], spec)], without_axis(spec, TENSOR)
        # Both ends are stated, and so are those of the transform of its cotangent.
        outs, of_outs = self.plain(i, [constrain(values[0], spec, self.mesh)], [tuple(map(axes_of, spec))])
        return [constrain(outs[0], spec, self.mesh)], of_outs

    def plain(self, i: Instruction, values: Sequence[Any], splits: Sequence[Split | None]) -> tuple[Any, list[Split | None]]:
        return bind(i.eqn, values), outs_of(i.eqn, splits, self.mesh.shape)

    def note(self, i: Instruction, weight: Sequence[str], kind: str, why: str) -> None:
        out: Any = i.eqn.outvars[0].aval
        self.rule.products.append(BlockProduct("", ", ".join(weight), tuple(out.shape), kind, why))

    # --- one product -----------------------------------------------------------------------------------------------------

    def product(
        self, i: Instruction, dot: jex.JaxprEqn, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a product: its operand is gathered, of a weight split in a free dim; its result scattered, in a summed one."""
        at = [n for n, ref in enumerate(i.ins) if not isinstance(ref, int) or ref in self.params]
        (contract, batch), paths = dot.params["dimension_numbers"], ()
        why, kind = "no operand is a weight", "left alone"
        if at:
            w = at[0]
            ref, split = i.ins[w], splits[w]
            paths = self.params[ref] if isinstance(ref, int) else ()
            kind, why = _kind(split, splits[1 - w], contract[w], contract[1 - w], batch[w])
        if kind == "left alone":
            self.note(i, paths, kind, why)
            return self.plain(i, values, splits)
        d = 1 - at[0]
        self.kinds[i.outs[0]] = (kind, at[0])
        if self.rule.overlap:
            ring, no_ring = self.ring(i, kind, at[0], values, splits)
            if ring is not None:
                self.note(i, paths, kind, _AROUND[kind])
                return ring
            why += no_ring
        over = [dim for dim in _dims(splits[d] or ()) if dim not in contract[d]]
        if over:
            spec = _as_spec(splits[d] or ())
            values = [self.gathered(i.ins[d], v, spec) if n == d else v for n, v in enumerate(values)]
            splits = [tuple(map(axes_of, without_axis(spec, TENSOR))) if n == d else s for n, s in enumerate(splits)]
        outs, of_outs = self.plain(i, values, splits)
        if kind == "column":
            self.note(i, paths, kind, why if over else "its operand is whole")
            return outs, of_outs
        spec = self.scattered_spec(outs[0].shape, of_outs[0])
        if spec is None:
            streams = " and ".join(map(str, sorted(self.rule.streams)))
            self.note(i, paths, "left alone", f"its result does not begin with batch and sequence of x, {streams}, both whole")
            return outs, of_outs
        self.note(i, paths, kind, why)
        self.scattered.add(i.outs[0])
        return [scatter_sequence(outs[0], spec, self.mesh)], [tuple(map(axes_of, spec))]

    def ring(
        self, i: Instruction, kind: str, w: int, values: list[Any], splits: list[Split | None]
    ) -> tuple[tuple[list[Array], list[Split | None]] | None, str]:
        """Run a product with its gather or its scatter around a ring.

        Returns:
          Its result and how that is split, or None where no ring serves; and the reason of that.
        """
        data = splits[1 - w]
        if kind == "column" and not _dims(data or ()):
            return None, ""  # its operand is whole: there is nothing to gather
        one, reason = ring_product(i.eqn, kind, w, splits)
        if one is None:
            return None, reason
        whole = tuple(() if entry is not ANY and TENSOR in entry and kind == "column" else entry for entry in data or ())
        of_outs = outs_of(i.eqn, [whole if n != w else s for n, s in enumerate(splits)], self.mesh.shape)
        if kind == "row":
            spec = self.scattered_spec(i.eqn.outvars[0].aval.shape, of_outs[0])  # pyright: ignore[reportAttributeAccessIssue]
            if spec is None:
                return None, ""
            y = constrain(row_product(values[1 - w], values[w], one, self.mesh), spec, self.mesh)
            return ([y], [tuple(map(axes_of, spec))]), ""
        if i.outs[0] not in self.made:
            reason = self.ring_of_readers(self.canonical(i.ins[1 - w]), values[1 - w], data or ())  # pyright: ignore[reportArgumentType]
            if reason:
                return None, reason
        return ([self.made.pop(i.outs[0])], of_outs), ""

    def ring_of_readers(self, key: int, value: Array, split: Split) -> str:
        """Run all column products that read a value around one ring; return the reason why not, where one of them cannot."""
        if key in self.whole:
            return "; no ring, since another product had it gathered"
        same, products = {key, *(s for s, of in self.same.items() if of == key)}, list[tuple[Instruction, int, RingProduct]]()
        for i in self.after:
            # Casts to come, of what the value was cast from.
            is_cast = i.eqn.primitive.name == "convert_element_type" and bool(i.reads)
            if is_cast and self.casts.get((self.canonical(i.reads[0]), i.eqn.params["new_dtype"])) == key:
                same.add(i.outs[0])
            dot, reads = product_of(i.eqn), [n for n, ref in enumerate(i.ins) if isinstance(ref, int) and ref in same]
            if dot is None or len(reads) != 1:
                continue
            d, w = reads[0], 1 - reads[0]
            ref = i.ins[w]
            if isinstance(ref, int) and ref not in self.params:
                continue
            of_weight = self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value)
            (contract, batch), splits = dot.params["dimension_numbers"], [split, split]
            splits[w] = of_weight  # pyright: ignore[reportArgumentType, reportCallIssue]
            if _kind(of_weight, split, contract[w], contract[d], batch[w])[0] != "column":
                continue
            one, reason = ring_product(i.eqn, "column", w, splits)
            if one is None:
                return reason
            products.append((i, w, one))
        weights = [read(i.ins[w], self.slots) for i, w, _ in products]
        value = constrain(value, _as_spec(split), self.mesh)
        made = column_products(value, weights, [one for *_, one in products], self.mesh, again=not self.rule.recomputed)
        self.made.update((i.outs[0], y) for (i, *_), y in zip(products, made, strict=True))
        return ""

    def gathered(self, ref: Any, value: Array, spec: Spec) -> Array:
        """Return a value gathered, once for all that read it."""
        key = self.canonical(ref)
        if key not in self.whole:
            self.whole[key] = gather_sequence(value, spec, self.mesh)
        return self.whole[key]

    def scattered_spec(self, shape: tuple[int, ...], split: Split | None) -> Spec | None:
        """Return the spec of the scattered result of a row product, or None where it is not clear which dim is the sequence."""
        if len(shape) < 3 or shape[:2] not in self.rule.streams:
            return None
        split = _split_as_batch(jax.ShapeDtypeStruct(shape, jnp.float32), self.mesh) if split is None else split
        if _dims(split) or (split[1] is not ANY and split[1]):
            return None
        return _as_spec((split[0], (TENSOR,), *split[2:]))

    # --- what holds products ---------------------------------------------------------------------------------------------

    def region(
        self, i: Instruction, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Enter a rematerialised region. What is gathered in it is never kept, whatever its policy keeps."""
        params = i.eqn.params
        inner = flatten(params["jaxpr"], (), lambda eqn: parse(eqn) is not None)
        results: list[Any] = []

        def run(*values: Any) -> list[Any]:
            walk = _Walk(dataclasses.replace(self.rule, products=[], recomputed=True), self.inner_params(i, inner.inputs))
            outs, of_outs = walk.run(inner, values, splits)
            results[:] = [of_outs, walk.rule.products]
            return outs

        outs = jax.checkpoint(run, policy=_never_gathered(params["policy"]), prevent_cse=params["prevent_cse"])(*values)
        of_outs, products = results
        self.rule.products.extend(products)
        return outs, of_outs

    def inner_params(self, i: Instruction, inputs: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Return the input slots of an equation's inner program that are parameters."""
        pairs = zip(inputs, i.ins, strict=True)
        return {slot: self.params[ref] for slot, ref in pairs if isinstance(ref, int) and ref in self.params}

    def loop(
        self, i: Instruction, loop: TileLoop, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a loop over tiles: its operands are gathered before it, its result is scattered after it."""
        unit = flatten(loop.unit, ())
        params = self.inner_params(i, unit.inputs)

        def walked(splits: Sequence[Split | None]) -> _Walk:
            """Walk the unit over shapes alone."""
            stacked = (*loop.tiles, *loop.parts)
            of_tile = [s[1:] if n in stacked and s is not None else s for n, s in enumerate(splits)]
            walk = _Walk(dataclasses.replace(self.rule, products=[], overlap=False), params)
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in loop.unit.invars]  # pyright: ignore[reportAttributeAccessIssue]
            jax.eval_shape(lambda *values: walk.run(unit, values, of_tile)[0], *avals)
            return walk

        first = walked(splits)
        # What its column products gather is computed from operands that are split: these are gathered before the loop.
        hoisted = [
            n
            for n, (slot, split) in enumerate(zip(unit.inputs, splits, strict=True))
            if slot not in params and split is not None and _dims(split) and unit.reached([slot]) & first.whole.keys()
        ]
        specs = {n: _as_spec(splits[n] or ()) for n in hoisted}
        splits = [tuple(map(axes_of, without_axis(specs[n], TENSOR))) if n in specs else s for n, s in enumerate(splits)]
        walk = walked(splits)
        entries = _Entries(unit, walk, {unit.inputs[n] for n in hoisted}, self.mesh)
        is_copied = entries.serves and bool(hoisted) and set(hoisted).isdisjoint(loop.parts)
        values = [gather_sequence(v, specs[n], self.mesh, is_copied) if n in specs else v for n, v in enumerate(values)]
        (out,) = unit.outputs
        spec = (None, *_as_spec(walk.splits[out] or ())) if isinstance(out, int) and out in walk.scattered else None
        # A dim of entries in front, where there is one, and of a sum of tiles' products the dtype that a single product has.
        if is_copied:
            y = entries.loop(loop, values)
            if spec is not None:
                y = scatter_sequence(y.astype(entries.dtype), spec, self.mesh, copies=1).astype(loop.out.dtype)
        else:
            y = bind(i.eqn, values)[0]
            if spec is not None:
                y = scatter_sequence(y, spec, self.mesh)
        whys = {"column": "its operand is gathered", "row": "its result is scattered"} if hoisted or spec is not None else {}
        where = {
            "column": "before the loop",
            "row": "after the loop" if is_copied or not hoisted else "after the loop, and summed in it",
        }
        for product in walk.rule.products:
            why = f"{whys[product.kind]} {where[product.kind]} over tiles" if product.kind in whys else product.why
            self.rule.products.append(dataclasses.replace(product, why=why))
        return [y], [tuple(map(axes_of, spec))] if spec is not None else outs_of(i.eqn, splits, self.mesh.shape)


class _Entries:
    """The unit of a loop over tiles, computed for [t_tensor, ...] entries: one of each device of a tensor group.

        h[B, T, F_t]      = sum_d x[t_tensor, B, T, D] W[D, t_tensor, F/t]        a column product of copies of x
        y[t_tensor, B, T, H] = sum_f h[B, T, t_tensor, F/t] V[t_tensor, F/t, H]   the parts of a row product's sum

    So neither y nor the cotangent of x is reduced while the loop adds to it.

    Attributes:
      serves: whether the unit has this form: only column products read x, and a row product makes its result.
      dtype: of the operands of the row product.
    """

    def __init__(self, unit: FlatJaxpr, walk: "_Walk", copied: set[int], mesh: Mesh) -> None:
        """Read a unit that was walked with the slots `copied` whole."""
        self.unit, self.walk, self.copied, self.mesh = unit, walk, copied, mesh
        self.dtype: Any = None
        self.serves = self._check()

    def _check(self) -> bool:
        for i in self.unit.instructions:
            kind, w = self.walk.kinds.get(i.outs[0], ("", 0)) if i.outs else ("", 0)
            reads = [n for n, ref in enumerate(i.ins) if isinstance(ref, int) and ref in self.copied]
            is_plain = i.eqn.primitive.name == "dot_general"
            is_row = bool(kind) and i.outs[0] in self.walk.scattered
            if reads and not (kind == "column" and reads == [1 - w] and is_plain):
                return False
            if is_row and not (i.outs == self.unit.outputs and (is_plain or is_wide_product(i.eqn))):
                return False
            if (reads or is_row) and self.walk.splits[i.ins[w]][self._split_dim(i, w)] != (TENSOR,):  # pyright: ignore
                return False
            if is_row:
                aval: Any = i.eqn.invars[w].aval
                self.dtype = aval.dtype
        return True

    def loop(self, loop: TileLoop, values: Sequence[Any]) -> Array:
        """Return the loop's result, with a dim of entries behind the first if it is that of a row product."""
        first = loop.sizes[0]
        tiles, parts = ([values[n] for n in at] for at in (loop.tiles, loop.parts))
        shared = [v for n, v in enumerate(values) if n not in (*loop.tiles, *loop.parts)]

        def unit(tiles: list[Any], shared: list[Any], parts: list[Any]) -> Array:
            return self._run([*shared[:first], *tiles, *shared[first:], *parts])

        return loop_over(unit, tiles, shared, parts, num_out=loop.num_out, summed=loop.summed)

    def _run(self, values: Sequence[Any]) -> Array:
        slots: dict[int, Any] = dict(zip(self.unit.inputs, values, strict=True))
        for i in self.unit.instructions:
            vals = [read(ref, slots) for ref in i.ins]
            _, w = self.walk.kinds.get(i.outs[0], ("", 0)) if i.outs else ("", 0)
            dot = product_of(i.eqn)
            if not self.copied.isdisjoint(i.reads):
                outs = [self._column(i, vals, w)]
            elif dot is not None and i.outs[0] in self.walk.scattered:
                outs = [self._row(i, dot, vals, w)]
            else:
                outs = bind(i.eqn, vals)
            slots.update(zip(i.outs, outs, strict=True))
        return slots[self.unit.outputs[0]]  # pyright: ignore[reportArgumentType]

    def _split(self, a: Array, dim: int) -> Array:
        """Return [t_tensor, ...] of an array that is split in a dim: W[D, F_t] -> W[t_tensor, D, F/t]."""
        t = self.mesh.shape[TENSOR]
        return jnp.moveaxis(a.reshape(*a.shape[:dim], t, a.shape[dim] // t, *a.shape[dim + 1 :]), dim, 0)

    def _dot(self, eqn: jex.JaxprEqn, values: Sequence[Array]) -> Array:
        """Return the product of entries, of operands [t, ...]."""
        contract, batch = (tuple(tuple(d + 1 for d in dims) for dims in two) for two in eqn.params["dimension_numbers"])
        numbers: Any = (contract, tuple((0, *dims) for dims in batch))
        options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(*values, dimension_numbers=numbers, **options)

    def _column(self, i: Instruction, values: list[Any], w: int) -> Array:
        contract, batch = i.eqn.params["dimension_numbers"]
        k = self._split_dim(i, w)
        y = self._dot(i.eqn, [self._split(v, k) if n == w else v for n, v in enumerate(values)])
        # Entries are its first dim. They are put before the part of the weight's dim that they are entries of.
        avals: list[Any] = [v.aval for v in i.eqn.invars]
        lhs, rhs = ([d for d in range(a.ndim) if d not in (*contract[n], *batch[n])] for n, a in enumerate(avals))
        place = len(batch[0]) + (len(lhs) + rhs.index(k) if w == 1 else lhs.index(k))
        out: Any = i.eqn.outvars[0].aval
        return jnp.moveaxis(y, 0, place).reshape(out.shape)

    def _row(self, i: Instruction, dot: jex.JaxprEqn, values: list[Any], w: int) -> Array:
        contract, k = dot.params["dimension_numbers"][0], self._split_dim(i, w)
        dims = {w: k, 1 - w: contract[1 - w][contract[w].index(k)]}
        operands = [self._split(v, dims[n]) for n, v in enumerate(values)]
        y = jax.vmap(wide_product)(*operands) if is_wide_product(i.eqn) else self._dot(i.eqn, operands)
        whole = without_axis(_as_spec(self.walk.splits[i.outs[0]] or ()), TENSOR)
        return constrain(y, (TENSOR, *whole), self.mesh)

    def _split_dim(self, i: Instruction, w: int) -> int:
        """Return the dim of its weight that `tensor` splits."""
        ref = i.ins[w]
        assert isinstance(ref, int)
        return _dims(self.walk.splits[ref] or ())[0]


def product_of(eqn: jex.JaxprEqn) -> jex.JaxprEqn | None:
    """Return the dot_general that an equation is, or that a custom derivative holds alone; else None."""
    if eqn.primitive.name == "dot_general":
        return eqn
    if eqn.primitive.name not in ("custom_vjp_call", "custom_jvp_call") or len(eqn.invars) != 2:
        return None
    inner: Any = eqn.params["call_jaxpr"].jaxpr
    program = flatten(inner, eqn.params["call_jaxpr"].consts)
    made = [i for i in program.instructions if i.eqn.primitive.name not in ("name", "convert_element_type")]
    is_alone = len(made) == 1 and made[0].eqn.primitive.name == "dot_general" and made[0].ins == program.inputs
    return made[0].eqn if is_alone else None


def _kind(
    weight: Split | None, data: Split | None, summed: Sequence[int], summed_of_data: Sequence[int], batched: Sequence[int]
) -> tuple[str, str]:
    """Return the kind of a product, and why.

    Args:
      weight: how its weight is split.
      data: how its operand is split.
      summed: dims of the weight that are summed.
      summed_of_data: dims of the operand that are.
      batched: dims of the weight that are batch dims.
    """
    if weight is None:
        return "left alone", "how its weight is split is not known"
    if not (dims := _dims(weight)):
        return "left alone", "tensor does not split its weight"
    if dims[0] in batched:
        return "left alone", "tensor splits its weight in a batch dim"
    if dims[0] in summed:
        return "row", "its result is scattered"
    if data is None:
        return "left alone", "how its operand is split is not known"
    if set(_dims(data)) & set(summed_of_data):
        return "left alone", "its operand is split in a dim that is summed"
    return "column", "its operand is gathered"


def _never_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a checkpoint's policy, except that it never saves what is gathered."""
    if policy is None:
        return None

    def wrapped(prim: Any, *args: Any, **params: Any) -> Any:
        if prim.name == "custom_jvp_call" and holds_gather(params):
            return False
        return policy(prim, *args, **params)

    return wrapped
