"""Run a traced function with the operations of sequence parallelism inserted at its products."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

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
from zerojax.sharding import BATCH_AXES, TENSOR, Spec, num_batch_shards, parse_axes, without_axis
from zerojax.tiling import TileLoop, parse

Array = jax.Array
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
        self.whole: dict[int, Array] = {}  # gathered values, by slot
        self.kinds: dict[
            int, tuple[str, int]
        ] = {}  # by the slot of a product's result: its kind, and the position of its weight
        self.scattered: set[int] = set()  # slots of results that were scattered
        self.after: Sequence[Instruction] = ()  # this equation, and the equations after it
        self.made: dict[int, Array] = {}  # results of products that a ring has already computed

    def run(
        self, program: FlatJaxpr, values: Sequence[Any], splits: Sequence[Split | None]
    ) -> tuple[list[Any], list[Split | None]]:
        """Return the results of a program, and how each is split."""
        self.slots.update(zip(program.inputs, values, strict=True))
        self.splits.update(zip(program.inputs, splits, strict=True))
        data = program.reached(slot for slot in program.inputs if slot not in self.params)
        instructions = program.instructions
        if (
            self.rule.overlap
        ):  # a ring computes all products of a value at the first one, which needs their weights
            instructions = sorted(
                instructions, key=lambda i: bool(i.eqn.effects) or not data.isdisjoint(i.outs)
            )
        for n, i in enumerate(instructions):
            self.after = instructions[n:] if self.rule.overlap else ()
            values = [read(ref, self.slots) for ref in i.ins]
            splits = [
                self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value)
                for ref in i.ins
            ]
            outs, of_outs = self.apply(i, values, splits, data)
            self.slots.update(zip(i.outs, outs, strict=True))
            self.splits.update(zip(i.outs, of_outs, strict=True))
            if data.isdisjoint(i.outs):
                paths = tuple(dict.fromkeys(path for slot in i.reads for path in self.params[slot]))
                self.params.update(dict.fromkeys(i.outs, paths))
            elif i.eqn.primitive.name == "convert_element_type":
                # Each module casts its input by itself; equal casts of one value are treated as one
                # value.
                slot = self.canonical(i.reads[0])
                self.same[i.outs[0]] = self.casts.setdefault(
                    (slot, i.eqn.params["new_dtype"]), i.outs[0]
                )
        refs = program.outputs
        of_outs = [
            self.splits[ref] if isinstance(ref, int) else (ANY,) * jnp.ndim(ref.value)
            for ref in refs
        ]
        return [read(ref, self.slots) for ref in refs], of_outs

    def canonical(self, slot: int) -> int:
        """Return the slot that stands for all equal casts of a value."""
        return self.same.get(slot, slot)

    def apply(
        self, i: Instruction, values: list[Any], splits: list[Split | None], data: set[int]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run one equation, with the inserted operations."""
        if data.isdisjoint(i.outs):
            return self.plain(i, values, splits)
        if (dot := find_product(i.eqn)) is not None:
            return self.product(i, dot, values, splits)
        if i.eqn.primitive.name in _ENTERED:
            return self.region(i, values, splits)
        if (loop := parse(i.eqn)) is not None:
            return self.loop(i, loop, values, splits)
        name = i.eqn.primitive.name
        if name == "fft":
            return self.fft(i, values, splits)
        if i.has_jaxpr or name in _OTHER_PRODUCTS:
            if i.has_jaxpr:
                why = f"inside of {name}, which is not entered"
            else:
                why = f"{name} is left to the partitioner"
            for ref, split in zip(i.ins, splits, strict=True):
                if (
                    isinstance(ref, int)
                    and ref in self.params
                    and split is not None
                    and tensor_dims(split)
                ):
                    self.note(i, self.params[ref], "left alone", why)
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
            values = [self.gathered(i.ins[0], values[0], spec)]
            spec = without_axis(spec, TENSOR)
        # Constrain both ends, which also constrains the transform of the cotangent.
        outs, of_outs = self.plain(
            i, [constrain(values[0], spec, self.mesh)], [tuple(map(parse_axes, spec))]
        )
        return [constrain(outs[0], spec, self.mesh)], of_outs

    def plain(
        self, i: Instruction, values: Sequence[Any], splits: Sequence[Split | None]
    ) -> tuple[Any, list[Split | None]]:
        """Run an equation unchanged; return its results and how they are split."""
        return bind(i.eqn, values), infer_output_splits(i.eqn, splits, self.mesh.shape)

    def note(self, i: Instruction, weight: Sequence[str], kind: str, why: str) -> None:
        """Add a product to the list of the rule."""
        out: Any = i.eqn.outvars[0].aval
        self.rule.products.append(BlockProduct("", ", ".join(weight), tuple(out.shape), kind, why))

    # --- one product ------------------------------------------------------------------------------

    def product(
        self, i: Instruction, dot: jex.JaxprEqn, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a product with a gather of its operand or a scatter of its result.

        The operand is gathered if the weight is split in a free dim; the result is scattered if the
        weight is split in a summed dim.
        """
        at = [n for n, ref in enumerate(i.ins) if not isinstance(ref, int) or ref in self.params]
        (contract, batch), paths = dot.params["dimension_numbers"], ()
        why = "no operand is a weight"
        kind = "left alone"
        if at:
            w = at[0]
            ref = i.ins[w]
            split = splits[w]
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
        over = [dim for dim in tensor_dims(splits[d] or ()) if dim not in contract[d]]
        if over:
            spec = as_spec(splits[d] or ())
            values = [
                self.gathered(i.ins[d], v, spec) if n == d else v for n, v in enumerate(values)
            ]
            splits = [
                tuple(map(parse_axes, without_axis(spec, TENSOR))) if n == d else s
                for n, s in enumerate(splits)
            ]
        outs, of_outs = self.plain(i, values, splits)
        if kind == "column":
            self.note(i, paths, kind, why if over else "its operand is whole")
            return outs, of_outs
        spec = self.scattered_spec(outs[0].shape, of_outs[0])
        if spec is None:
            streams = " and ".join(map(str, sorted(self.rule.streams)))
            self.note(
                i,
                paths,
                "left alone",
                f"its result does not begin with batch and sequence of x, {streams}, both whole",
            )
            return outs, of_outs
        self.note(i, paths, kind, why)
        self.scattered.add(i.outs[0])
        return [scatter_sequence(outs[0], spec, self.mesh)], [tuple(map(parse_axes, spec))]

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
        one, reason = ring_product(i.eqn, kind, w, splits)
        if one is None:
            return None, reason
        whole = tuple(
            () if entry is not ANY and TENSOR in entry and kind == "column" else entry
            for entry in data or ()
        )
        of_outs = infer_output_splits(
            i.eqn, [whole if n != w else s for n, s in enumerate(splits)], self.mesh.shape
        )
        if kind == "row":
            spec = self.scattered_spec(i.eqn.outvars[0].aval.shape, of_outs[0])  # pyright: ignore[reportAttributeAccessIssue]
            if spec is None:
                return None, ""
            y = constrain(row_product(values[1 - w], values[w], one, self.mesh), spec, self.mesh)
            return ([y], [tuple(map(parse_axes, spec))]), ""
        if i.outs[0] not in self.made:
            reason = self.ring_of_readers(self.canonical(i.ins[1 - w]), values[1 - w], data or ())  # pyright: ignore[reportArgumentType]
            if reason:
                return None, reason
        return ([self.made.pop(i.outs[0])], of_outs), ""

    def ring_of_readers(self, key: int, value: Array, split: Split) -> str:
        """Run all column products of a value in one ring; return the reason if one cannot."""
        if key in self.whole:
            return "; no ring, since another product had it gathered"
        same = {key, *(s for s, of in self.same.items() if of == key)}
        products = list[tuple[Instruction, int, RingProduct]]()
        for i in self.after:
            # Later casts of the value from which this value was cast.
            is_cast = i.eqn.primitive.name == "convert_element_type" and bool(i.reads)
            if (
                is_cast
                and self.casts.get((self.canonical(i.reads[0]), i.eqn.params["new_dtype"])) == key
            ):
                same.add(i.outs[0])
            dot = find_product(i.eqn)
            reads = [n for n, ref in enumerate(i.ins) if isinstance(ref, int) and ref in same]
            if dot is None or len(reads) != 1:
                continue
            d = reads[0]
            w = 1 - reads[0]
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
        value = constrain(value, as_spec(split), self.mesh)
        made = column_products(
            value, weights, [one for *_, one in products], self.mesh, again=not self.rule.recomputed
        )
        self.made.update((i.outs[0], y) for (i, *_), y in zip(products, made, strict=True))
        return ""

    def gathered(self, ref: Any, value: Array, spec: Spec) -> Array:
        """Return a value gathered, once for all equations that read it."""
        key = self.canonical(ref)
        if key not in self.whole:
            self.whole[key] = gather_sequence(value, spec, self.mesh)
        return self.whole[key]

    def scattered_spec(self, shape: tuple[int, ...], split: Split | None) -> Spec | None:
        """Return the spec of a row product's scattered result; None if its sequence is unclear."""
        if len(shape) < 3 or shape[:2] not in self.rule.streams:
            return None
        if split is None:
            split = split_as_batch(jax.ShapeDtypeStruct(shape, jnp.float32), self.mesh)
        else:
            split = split
        if tensor_dims(split) or (split[1] is not ANY and split[1]):
            return None
        return as_spec((split[0], (TENSOR,), *split[2:]))

    # --- regions that hold products ---------------------------------------------------------------

    def region(
        self, i: Instruction, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Enter a rematerialised region.

        Values gathered in it are never saved, whatever its policy saves.
        """
        (region,) = list_regions(i.eqn)
        inner = region.flatten(lambda eqn: parse(eqn) is not None)
        results: list[Any] = []

        def run(*values: Any) -> list[Any]:
            rule = dataclasses.replace(self.rule, products=[], recomputed=True)
            interpreter = SequenceInterpreter(rule, self.inner_params(i, inner.inputs))
            outs, of_outs = interpreter.run(inner, values, splits)
            results[:] = [of_outs, rule.products]
            return outs

        outs = checkpointed(i.eqn, run, is_gather_call)(*values)
        of_outs, products = results
        self.rule.products.extend(products)
        return outs, of_outs

    def inner_params(self, i: Instruction, inputs: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Return the paths of an inner program's input slots that are parameters."""
        pairs = zip(inputs, i.ins, strict=True)
        return {
            slot: self.params[ref]
            for slot, ref in pairs
            if isinstance(ref, int) and ref in self.params
        }

    def loop(
        self, i: Instruction, loop: TileLoop, values: list[Any], splits: list[Split | None]
    ) -> tuple[Sequence[Any], Sequence[Split | None]]:
        """Run a loop over tiles: gather its operands before it, and scatter its result after it."""
        if loop.accumulates:
            return self._loop_of_kernels(i, loop, values, splits)
        unit = flatten(loop.unit, ())
        params = self.inner_params(i, unit.inputs)

        def walked(splits: Sequence[Split | None]) -> SequenceInterpreter:
            """Walk the unit with abstract values only."""
            stacked = (*loop.tiles, *loop.parts)
            of_tile = [s[1:] if n in stacked and s is not None else s for n, s in enumerate(splits)]
            rule = dataclasses.replace(self.rule, products=[], overlap=False)
            walk = SequenceInterpreter(rule, params)
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in loop.unit.invars]  # pyright: ignore[reportAttributeAccessIssue]
            jax.eval_shape(lambda *values: walk.run(unit, values, of_tile)[0], *avals)
            return walk

        first = walked(splits)
        # The column products gather values that are computed from these split operands, so the
        # operands are gathered before the loop.
        hoisted = [
            n
            for n, (slot, split) in enumerate(zip(unit.inputs, splits, strict=True))
            if slot not in params
            and split is not None
            and tensor_dims(split)
            and unit.reached([slot]) & first.whole.keys()
        ]
        specs = {n: as_spec(splits[n] or ()) for n in hoisted}
        splits = [
            tuple(map(parse_axes, without_axis(specs[n], TENSOR))) if n in specs else s
            for n, s in enumerate(splits)
        ]
        walk = walked(splits)
        entries = Entries(
            unit,
            Walked(walk.kinds, walk.scattered, walk.splits),
            {unit.inputs[n] for n in hoisted},
            self.mesh,
        )
        is_copied = entries.serves and bool(hoisted) and set(hoisted).isdisjoint(loop.parts)
        values = [
            gather_sequence(v, specs[n], self.mesh, is_copied) if n in specs else v
            for n, v in enumerate(values)
        ]
        (out,) = unit.outputs
        if isinstance(out, int) and out in walk.scattered:
            spec = (None, *as_spec(walk.splits[out] or ()))
        else:
            spec = None
        # The result has a dim of entries in front if `is_copied`. A sum of tiles' products is sent
        # in the dtype of a single product.
        if is_copied:
            y = entries.loop(loop, values)
            if spec is not None:
                y = scatter_sequence(y.astype(entries.dtype), spec, self.mesh, copies=1).astype(
                    loop.out.dtype
                )
        else:
            y = bind(i.eqn, values)[0]
            if spec is not None:
                y = scatter_sequence(y, spec, self.mesh)
        if hoisted or spec is not None:
            whys = {"column": "its operand is gathered", "row": "its result is scattered"}
        else:
            whys = {}
        where = {
            "column": "before the loop",
            "row": "after the loop"
            if is_copied or not hoisted
            else "after the loop, and summed in it",
        }
        for product in walk.rule.products:
            if product.kind in whys:
                why = f"{whys[product.kind]} {where[product.kind]} over tiles"
            else:
                why = product.why
            self.rule.products.append(dataclasses.replace(product, why=why))
        return [y], [tuple(map(parse_axes, spec))] if spec is not None else infer_output_splits(
            i.eqn, splits, self.mesh.shape
        )

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
            of_tile = slice(1, None) if n in loop.parts else slice(None)
            if values[n].shape[of_tile][:-1] == rows and tensor_dims(split[of_tile][:-1]):
                spec = (None, *as_spec(split[of_tile]))
        y = bind(i.eqn, values)[0]
        if spec is None:
            return [y], [None]
        return [scatter_sequence(y, spec, self.mesh)], [tuple(map(parse_axes, spec))]


def split_as_batch(a: Any, mesh: Mesh) -> Split:
    """Return the split of an array whose dim 0 is the batch, if it is divisible."""
    shape = jnp.shape(a)
    is_batch = bool(shape) and shape[0] % num_batch_shards(mesh) == 0
    return tuple(BATCH_AXES if is_batch and d == 0 else () for d in range(len(shape)))


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
    if not (dims := tensor_dims(weight)):
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
