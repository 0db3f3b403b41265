"""Run a traced function with the operations of sequence parallelism inserted at its products."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.activations.flow import ANY, Split, as_spec, infer_output_splits, tensor_dims
from zerojax.activations.rings import RingProduct, column_products, ring_product, row_product
from zerojax.activations.sequence_ops import (
    constrain,
    gather_sequence,
    is_gather_call,
    scatter_sequence,
)
from zerojax.activations.sequence_tiles import Entries, Walked
from zerojax.jaxprs import (
    ENTERED,
    INLINED,
    FlatJaxpr,
    Instruction,
    bind,
    checkpointed,
    find_product,
    flatten,
    list_regions,
    read,
)
from zerojax.sharding import (
    CONTEXT,
    TENSOR,
    Spec,
    batch_axes,
    context_size,
    num_batch_shards,
    parse_axes,
    without_axes,
)
from zerojax.tiling import TileLoop, parse

Array = jax.Array
STREAM_AXES = (CONTEXT, TENSOR)
"""Axes that split the sequence of a stream, the outer one first."""
_ENTERED = ENTERED["sequence_parallel"] - INLINED
_OTHER_PRODUCTS = ("conv_general_dilated", "ragged_dot", "ragged_dot_general")
_AROUND = {
    "column": "its operand is passed around a ring during the product",
    "row": "its sum is passed around a ring during the product",
}


@dataclasses.dataclass(frozen=True)
class BlockProduct:
    """One product of a block, and its treatment by sequence parallelism.

    Attributes:
      stack: name of the block's stack; "" for a single stack.
      weight: path of its weight in the block's parameters; "" for a product of data with data.
      shape: shape of its result for one microbatch.
      kind: "column", "row", or "left alone".
      why: description of the inserted operation, or the reason why there is none.
    """

    stack: str
    weight: str
    shape: tuple[int, ...]
    kind: str
    why: str

    def __str__(self) -> str:
        """Return the product as one line of a table."""
        return (
            f"{self.kind:<10}  {self.stack}{self.weight or '(data)'} -> {list(self.shape)}: "
            f"{self.why}"
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """Options of a walk.

    Attributes:
      mesh: the device mesh.
      streams: (B, T) of the leaves of x.
      products: products met so far, in order.
      overlap: whether to insert rings.
      recomputed: whether the derivative of the walked function runs its forward too, because it is
        rematerialised or is a head.
    """

    mesh: Mesh
    streams: Set[tuple[int, ...]] = frozenset()
    products: list[BlockProduct] = dataclasses.field(default_factory=list)
    overlap: bool = False
    recomputed: bool = False


class _Treatment(NamedTuple):
    """How a product is treated.

    Attributes:
      kind: "column", "row", or "left alone".
      why: description of the operation, or the reason why there is none.
      w: position of its weight among the operands.
      paths: paths of the parameters that its weight is computed from.
    """

    kind: str
    why: str
    w: int = 0
    paths: Sequence[str] = ()


class _Reader(NamedTuple):
    """A column product of a value that a ring passes around.

    Attributes:
      out: slot of its result.
      weight: its weight.
      product: the product as the ring runs it.
    """

    out: int
    weight: Array
    product: RingProduct


class SequenceInterpreter:
    """Runs a program, inserting the two operations."""

    def __init__(self, rule: Rule, params: Mapping[int, tuple[str, ...]]) -> None:
        """Run under `rule`; `params` maps the input slots that are parameters to their paths."""
        self.rule = rule
        self.mesh = rule.mesh
        self.params = dict(params)
        self.slots: dict[int, Any] = {}
        self.splits: dict[int, Split | None] = {}
        self.same: dict[int, int] = {}  # a cast of a value -> the first such cast of it
        self.casts: dict[tuple[int, Any], int] = {}
        self.gathered: dict[int, Array] = {}  # by slot
        # By the slot of a product's result: its kind, and the position of its weight.
        self.kinds: dict[int, tuple[str, int]] = {}
        self.scattered: set[int] = set()  # slots of results that were scattered
        self.after: Sequence[Instruction] = ()  # this equation, and the equations after it
        self.ring_results: dict[int, Array] = {}  # of products that a ring has already computed

    def run(
        self, program: FlatJaxpr, values: Sequence[Any], splits: Sequence[Split | None]
    ) -> tuple[list[Any], list[Split | None]]:
        """Return the results of a program, and how each is split."""
        self.slots.update(zip(program.inputs, values, strict=True))
        self.splits.update(zip(program.inputs, splits, strict=True))
        data = program.reached(slot for slot in program.inputs if slot not in self.params)
        instructions = program.instructions
        if self.rule.overlap:
            # A ring computes all products of a value at the first one, which needs their weights.
            instructions = sorted(
                instructions, key=lambda i: bool(i.eqn.effects) or not data.isdisjoint(i.outs)
            )
        for n, i in enumerate(instructions):
            self.after = instructions[n:] if self.rule.overlap else ()
            values = [read(ref, self.slots) for ref in i.ins]
            splits = [self.split(ref) for ref in i.ins]
            outs, out_splits = self.apply(i, values, splits, data)
            self.slots.update(zip(i.outs, outs, strict=True))
            self.splits.update(zip(i.outs, out_splits, strict=True))
            if data.isdisjoint(i.outs):
                paths = tuple(dict.fromkeys(path for slot in i.reads for path in self.params[slot]))
                self.params.update(dict.fromkeys(i.outs, paths))
            elif i.eqn.primitive.name == "convert_element_type":
                # Each module casts its input by itself; equal casts of one value are treated as one
                # value.
                cast = (self.canonical(i.reads[0]), i.eqn.params["new_dtype"])
                self.same[i.outs[0]] = self.casts.setdefault(cast, i.outs[0])
        outs = [read(ref, self.slots) for ref in program.outputs]
        return outs, [self.split(ref) for ref in program.outputs]

    def split(self, ref: Any) -> Split | None:
        """Return how a value is split, given its slot or a literal; None if this is not known."""
        return self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value)

    def canonical(self, slot: int) -> int:
        """Return the slot that stands for all equal casts of a value."""
        return self.same.get(slot, slot)

    def apply(
        self, i: Instruction, values: list[Any], splits: list[Split | None], data: set[int]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run one equation, with the inserted operations."""
        if data.isdisjoint(i.outs):
            return self.plain(i, values, splits)
        dot = find_product(i.eqn)
        if dot is not None:
            return self.product(i, dot, values, splits)
        if i.eqn.primitive.name in _ENTERED:
            return self.region(i, values, splits)
        loop = parse(i.eqn)
        if loop is not None:
            return self.loop(i, loop, values, splits)
        name = i.eqn.primitive.name
        if name == "fft":
            return self.fft(i, values, splits)
        if i.has_jaxpr:
            self.note_weights(i, splits, f"inside of {name}, which is not entered")
        elif name in _OTHER_PRODUCTS:
            self.note_weights(i, splits, f"{name} is left to the partitioner")
        return self.plain(i, values, splits)

    def fft(
        self, i: Instruction, values: list[Any], splits: list[Split | None]
    ) -> tuple[list[Any], list[Split | None]]:
        """Run a Fourier transform along unsplit dims.

        XLA's partitioner aborts the process if a split dim is not divisible twice.
        """
        split = splits[0]
        if split is None:
            return self.plain(i, values, splits)
        spec = as_spec(split)
        if any(d >= len(split) - len(i.eqn.params["fft_lengths"]) for d in tensor_dims(split)):
            values = [self.gather(i.ins[0], values[0], spec)]
            spec = without_axes(spec, TENSOR)
        # Constrain both ends, which also constrains the transform of the cotangent.
        operand = constrain(values[0], spec, self.mesh)
        outs, out_splits = self.plain(i, [operand], [_as_split(spec)])
        return [constrain(outs[0], spec, self.mesh)], out_splits

    def plain(
        self, i: Instruction, values: Sequence[Any], splits: Sequence[Split | None]
    ) -> tuple[Any, list[Split | None]]:
        """Run an equation unchanged; return its results and how they are split."""
        return bind(i.eqn, values), infer_output_splits(i.eqn, splits, self.mesh.shape)

    def note(self, i: Instruction, weight: Sequence[str], kind: str, why: str) -> None:
        """Add a product to the list of the rule."""
        out: Any = i.eqn.outvars[0].aval
        self.rule.products.append(BlockProduct("", ", ".join(weight), tuple(out.shape), kind, why))

    def note_weights(self, i: Instruction, splits: Sequence[Split | None], why: str) -> None:
        """Note the weights that an equation reads and that `tensor` splits; it stays unchanged."""
        for ref, split in zip(i.ins, splits, strict=True):
            if not isinstance(ref, int) or ref not in self.params:
                continue
            if split is not None and tensor_dims(split):
                self.note(i, self.params[ref], "left alone", why)

    # --- one product ------------------------------------------------------------------------------

    def product(
        self, i: Instruction, dot: jex.JaxprEqn, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a product with a gather of its operand or a scatter of its result.

        The operand is gathered if the weight is split in a free dim; the result is scattered if the
        weight is split in a summed dim.
        """
        kind, why, w, paths = self.classify(i, dot, splits)
        if kind == "left alone":
            self.note(i, paths, kind, why)
            return self.plain(i, values, splits)
        self.kinds[i.outs[0]] = (kind, w)
        if self.rule.overlap:
            ring, no_ring = self.ring(i, kind, w, values, splits)
            if ring is not None:
                self.note(i, paths, kind, _AROUND[kind])
                return ring
            why += no_ring

        d = 1 - w
        contract = dot.params["dimension_numbers"][0]
        data_split = splits[d] or ()
        is_gathered = any(dim not in contract[d] for dim in tensor_dims(data_split))
        if is_gathered:
            spec = as_spec(data_split)
            values = list(values)
            values[d] = self.gather(i.ins[d], values[d], spec)
            splits = list(splits)
            splits[d] = _as_split(without_axes(spec, TENSOR))
        outs, out_splits = self.plain(i, values, splits)
        if kind == "column":
            self.note(i, paths, kind, why if is_gathered else "its operand is whole")
            return outs, out_splits

        spec = self.scattered_spec(outs[0].shape, out_splits[0])
        if spec is None:
            streams = " and ".join(map(str, sorted(self.rule.streams)))
            self.note(
                i,
                paths,
                "left alone",
                f"its result does not begin with batch and sequence of x, {streams}, both whole",
            )
            return outs, out_splits
        self.note(i, paths, kind, why)
        self.scattered.add(i.outs[0])
        return [scatter_sequence(outs[0], spec, self.mesh)], [_as_split(spec)]

    def classify(
        self, i: Instruction, dot: jex.JaxprEqn, splits: Sequence[Split | None]
    ) -> _Treatment:
        """Return how a product is treated."""
        weights = [
            n for n, ref in enumerate(i.ins) if not isinstance(ref, int) or ref in self.params
        ]
        if not weights:
            return _Treatment("left alone", "no operand is a weight")
        w = weights[0]
        ref = i.ins[w]
        contract, batch = dot.params["dimension_numbers"]
        kind, why = _kind(splits[w], splits[1 - w], contract[w], contract[1 - w], batch[w])
        return _Treatment(kind, why, w, self.params[ref] if isinstance(ref, int) else ())

    def ring(
        self, i: Instruction, kind: str, w: int, values: list[Any], splits: list[Split | None]
    ) -> tuple[tuple[list[Array], list[Split | None]] | None, str]:
        """Run a product with its gather or its scatter in a ring.

        Returns:
          Its result and how that is split, or None if no ring can run it; and the reason, or "".
        """
        data = splits[1 - w]
        if kind == "column" and not tensor_dims(data or ()):
            return None, ""  # its operand is unsplit, so there is nothing to gather
        product, reason = ring_product(i.eqn, kind, w, splits)
        if product is None:
            return None, reason
        splits = list(splits)
        if kind == "column":
            splits[1 - w] = tuple(
                () if entry is not ANY and TENSOR in entry else entry for entry in data or ()
            )
        else:
            splits[1 - w] = data or ()
        out_splits = infer_output_splits(i.eqn, splits, self.mesh.shape)
        if kind == "row":
            out: Any = i.eqn.outvars[0].aval
            spec = self.scattered_spec(out.shape, out_splits[0])
            if spec is None:
                return None, ""
            y = row_product(values[1 - w], values[w], product, self.mesh)
            return ([constrain(y, spec, self.mesh)], [_as_split(spec)]), ""
        if i.outs[0] not in self.ring_results:
            reason = self.ring_of_readers(self.canonical(i.ins[1 - w]), values[1 - w], data or ())  # pyright: ignore[reportArgumentType]
            if reason:
                return None, reason
        return ([self.ring_results.pop(i.outs[0])], out_splits), ""

    def ring_of_readers(self, key: int, value: Array, split: Split) -> str:
        """Run all column products of a value in one ring; return the reason if one cannot."""
        if key in self.gathered:
            return "; no ring, since another product had it gathered"
        same = {key, *(slot for slot, first in self.same.items() if first == key)}
        readers = list[_Reader]()
        for i in self.after:
            # Later casts of the value from which this value was cast.
            if i.eqn.primitive.name == "convert_element_type" and i.reads:
                cast = (self.canonical(i.reads[0]), i.eqn.params["new_dtype"])
                if self.casts.get(cast) == key:
                    same.add(i.outs[0])
            dot = find_product(i.eqn)
            reads = [n for n, ref in enumerate(i.ins) if isinstance(ref, int) and ref in same]
            if dot is None or len(reads) != 1:
                continue
            d = reads[0]
            w = 1 - d
            ref = i.ins[w]
            if isinstance(ref, int) and ref not in self.params:
                continue
            weight_split = self.split(ref)
            contract, batch = dot.params["dimension_numbers"]
            if _kind(weight_split, split, contract[w], contract[d], batch[w])[0] != "column":
                continue
            splits: list[Split | None] = [split, split]
            splits[w] = weight_split
            product, reason = ring_product(i.eqn, "column", w, splits)
            if product is None:
                return reason
            readers.append(_Reader(i.outs[0], read(ref, self.slots), product))
        value = constrain(value, as_spec(split), self.mesh)
        results = column_products(
            value,
            [reader.weight for reader in readers],
            [reader.product for reader in readers],
            self.mesh,
            again=not self.rule.recomputed,
        )
        for reader, result in zip(readers, results, strict=True):
            self.ring_results[reader.out] = result
        return ""

    def gather(self, ref: Any, value: Array, spec: Spec) -> Array:
        """Return a value gathered, once for all equations that read it."""
        key = self.canonical(ref)
        if key not in self.gathered:
            self.gathered[key] = gather_sequence(value, spec, self.mesh)
        return self.gathered[key]

    def scattered_spec(self, shape: tuple[int, ...], split: Split | None) -> Spec | None:
        """Return the spec of a row product's scattered result; None if its sequence is unclear."""
        if len(shape) < 3 or shape[:2] not in self.rule.streams:
            return None
        if split is None:
            split = split_as_batch(jax.ShapeDtypeStruct(shape, jnp.float32), self.mesh)
        if tensor_dims(split) or (split[1] is not ANY and set(split[1]) - {CONTEXT}):
            return None
        axes = STREAM_AXES if context_size(self.mesh) > 1 else (TENSOR,)
        return as_spec((split[0], axes, *split[2:]))

    # --- regions that hold products ---------------------------------------------------------------

    def region(
        self, i: Instruction, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Enter a rematerialised region.

        Values gathered in it are never saved, whatever its policy saves.
        """
        (region,) = list_regions(i.eqn)
        inner = region.flatten(lambda eqn: parse(eqn) is not None)
        # The last trace of `run` fills these.
        out_splits = list[Split | None]()
        products = list[BlockProduct]()

        def run(*values: Any) -> list[Any]:
            rule = dataclasses.replace(self.rule, products=[], recomputed=True)
            interpreter = SequenceInterpreter(rule, self.inner_params(i, inner.inputs))
            outs, out_splits[:] = interpreter.run(inner, values, splits)
            products[:] = rule.products
            return outs

        outs = checkpointed(i.eqn, run, is_gather_call)(*values)
        self.rule.products.extend(products)
        return outs, out_splits

    def inner_params(self, i: Instruction, inputs: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Return the paths of an inner program's input slots that are parameters."""
        params = {}
        for slot, ref in zip(inputs, i.ins, strict=True):
            if isinstance(ref, int) and ref in self.params:
                params[slot] = self.params[ref]
        return params

    def loop(
        self, i: Instruction, loop: TileLoop, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a loop over tiles: gather its operands before it, and scatter its result after it."""
        if loop.accumulates:
            return self._loop_of_kernels(i, loop, values, splits)
        unit = flatten(loop.unit, ())
        params = self.inner_params(i, unit.inputs)
        first_walk = self._walk_unit(loop, unit, params, splits)

        # The column products gather values that are computed from these split operands, so the
        # operands are gathered before the loop.
        hoisted = dict[int, Spec]()
        for n, (slot, split) in enumerate(zip(unit.inputs, splits, strict=True)):
            if slot in params or split is None or not tensor_dims(split):
                continue
            if unit.reached([slot]) & first_walk.gathered.keys():
                hoisted[n] = as_spec(split)
        splits = list(splits)
        for n, spec in hoisted.items():
            splits[n] = _as_split(without_axes(spec, TENSOR))
        walk = self._walk_unit(loop, unit, params, splits)

        walked = Walked(walk.kinds, walk.scattered, walk.splits)
        entries = Entries(unit, walked, {unit.inputs[n] for n in hoisted}, self.mesh)
        is_copied = entries.serves and bool(hoisted) and set(hoisted).isdisjoint(loop.parts)
        values = list(values)
        for n, spec in hoisted.items():
            values[n] = gather_sequence(values[n], spec, self.mesh, is_copied)

        (out,) = unit.outputs
        spec = None
        if isinstance(out, int) and out in walk.scattered:
            spec = (None, *as_spec(walk.splits[out] or ()))
        # The result has a dim of entries in front if `is_copied`. A sum of tiles' products is sent
        # in the dtype of a single product.
        if is_copied:
            y = entries.loop(loop, values)
            if spec is not None:
                y = scatter_sequence(y.astype(entries.dtype), spec, self.mesh, copies=1)
                y = y.astype(loop.out.dtype)
        else:
            y = bind(i.eqn, values)[0]
            if spec is not None:
                y = scatter_sequence(y, spec, self.mesh)
        self._note_loop(walk.rule.products, bool(hoisted), spec is not None, is_copied)
        if spec is not None:
            return [y], [_as_split(spec)]
        return [y], infer_output_splits(i.eqn, splits, self.mesh.shape)

    def _walk_unit(
        self,
        loop: TileLoop,
        unit: FlatJaxpr,
        params: Mapping[int, tuple[str, ...]],
        splits: Sequence[Split | None],
    ) -> "SequenceInterpreter":
        """Walk the unit of a loop over tiles with abstract values only.

        Args:
          loop: the loop.
          unit: its unit.
          params: paths of the unit's input slots that are parameters.
          splits: how the loop's operands are split.
        """
        tile_splits = list(splits)
        for n in (*loop.tiles, *loop.parts):
            split = splits[n]
            if split is not None:
                tile_splits[n] = split[1:]
        rule = dataclasses.replace(self.rule, products=[], overlap=False)
        walk = SequenceInterpreter(rule, params)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in loop.unit.invars]  # pyright: ignore[reportAttributeAccessIssue]
        jax.eval_shape(lambda *values: walk.run(unit, values, tile_splits)[0], *avals)
        return walk

    def _note_loop(
        self,
        products: Sequence[BlockProduct],
        is_gathered: bool,
        is_scattered: bool,
        is_copied: bool,
    ) -> None:
        """Note the products of a loop over tiles.

        Args:
          products: products of its unit.
          is_gathered: whether an operand is gathered before the loop.
          is_scattered: whether the result is scattered after the loop.
          is_copied: whether the loop computes entries, one per device.
        """
        row_place = "after the loop"
        if is_gathered and not is_copied:
            row_place = "after the loop, and summed in it"
        whys = dict[str, str]()
        if is_gathered or is_scattered:
            whys["column"] = "its operand is gathered before the loop over tiles"
            whys["row"] = f"its result is scattered {row_place} over tiles"
        for product in products:
            why = whys.get(product.kind, product.why)
            self.rule.products.append(dataclasses.replace(product, why=why))

    def _loop_of_kernels(
        self, i: Instruction, loop: TileLoop, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a loop whose kernels add to its sum.

        Each kernel has its own `jax.shard_map`, and takes and returns gathered sequences.
        """
        values = list(values)
        spec = None
        rows = loop.result.shape[:-1]
        for n, (ref, split) in enumerate(zip(i.ins, splits, strict=True)):
            if ref in self.params or split is None or not tensor_dims(split):
                continue
            # Gathered before the loop, instead of in it one tile at a time.
            values[n] = gather_sequence(values[n], as_spec(split), self.mesh)
            tile_dims = slice(1, None) if n in loop.parts else slice(None)
            if values[n].shape[tile_dims][:-1] == rows and tensor_dims(split[tile_dims][:-1]):
                spec = (None, *as_spec(split[tile_dims]))
        y = bind(i.eqn, values)[0]
        if spec is None:
            return [y], [None]
        return [scatter_sequence(y, spec, self.mesh)], [_as_split(spec)]


def _as_split(spec: Spec) -> Split:
    return tuple(map(parse_axes, spec))


def split_as_batch(a: Any, mesh: Mesh) -> Split:
    """Return the split of an array whose dim 0 is the batch, and dim 1 the sequence.

    A dim that does not divide is not split.
    """
    shape = jnp.shape(a)
    split: list[Any] = [()] * len(shape)
    if shape and shape[0] % num_batch_shards(mesh) == 0:
        split[0] = batch_axes(mesh)
        if len(shape) > 1 and context_size(mesh) > 1 and shape[1] % context_size(mesh) == 0:
            split[1] = (CONTEXT,)
    return tuple(split)


def _kind(
    weight: Split | None,
    data: Split | None,
    summed: Sequence[int],
    summed_of_data: Sequence[int],
    batched: Sequence[int],
) -> tuple[str, str]:
    """Return the kind of a product, and the reason.

    Args:
      weight: how its weight is split.
      data: how its operand is split.
      summed: dims of the weight that are summed.
      summed_of_data: dims of the operand that are summed.
      batched: dims of the weight that are batch dims.
    """
    if weight is None:
        return "left alone", "how its weight is split is not known"
    dims = tensor_dims(weight)
    if not dims:
        return "left alone", "tensor does not split its weight"
    if dims[0] in batched:
        return "left alone", "tensor splits its weight in a batch dim"
    if dims[0] in summed:
        return "row", "its result is scattered"
    if data is None:
        return "left alone", "how its operand is split is not known"
    if set(tensor_dims(data)) & set(summed_of_data):
        return "left alone", "its operand is split in a dim that is summed"
    return "column", "its operand is gathered"
