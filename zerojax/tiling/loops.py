"""Loops over tiles, which a streamed step finds in a block's jaxpr and runs itself.

A streamed step never holds full stacks of tiles, so it cannot run such a loop as an ordinary scan.

A loop of `zerojax.tiling` is a `jit` of a scan. The name of the `jit` describes the operands.
Outside of streamed steps the loop is simply that scan. A streamed step fetches a block's tiles one
by one while the block runs. It treats the `jit` as one equation

    forward    y          = F(consts, tiles, x, parts)
    backward   d_operands = B(consts, tiles, x, parts, dy)

extracts the computation of one tile from it, and runs the other equations unchanged
(`zerojax.streamed`). The description is stored in the equation and not in any tracing state, so it
survives JAX's caches. The name holds a checksum of the operands' shapes. If a transformation (vmap,
jvp) has changed the equation, name and shapes no longer agree, and the equation is treated as an
ordinary scan.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax.jaxprs import REMAT, FlatJaxpr, flatten
from zerojax.trees import Params

Array = jax.Array
NAME = "zerojax_tiles"
"""Prefix of a loop's name."""
MARK = "zerojax_mark"
"""Prefix of the name of a placeholder equation for a loop or its derivative, which never runs."""


@dataclasses.dataclass(frozen=True, eq=False)
class TileLoop:
    """One loop over tiles.

    Attributes:
      unit: jaxpr of `function(tile, x, part)`, or of `function(tile, x, part, total)` if it
        accumulates. Its constants, which the function closed over, precede its arguments.
      sizes: numbers of arrays in consts, tiles, x and parts.
      num_tiles: number of tiles T.
      num_out: leading dim of the result; T / num_out successive tiles make one entry of it.
      summed: whether these successive tiles are summed, in float32.
      result: ShapeDtypeStruct of the unit's result.
      accumulates: whether the unit itself adds to the sum so far, and returns the new sum.
    """

    unit: jex.Jaxpr
    sizes: tuple[int, int, int, int]
    num_tiles: int
    num_out: int
    summed: bool
    result: jax.ShapeDtypeStruct
    accumulates: bool = False

    @property
    def out(self) -> jax.ShapeDtypeStruct:
        """ShapeDtypeStruct of the loop's result."""
        return jax.ShapeDtypeStruct(
            (self.num_out, *self.result.shape), jnp.float32 if self.summed else self.result.dtype
        )

    @property
    def tiles(self) -> range:
        """Positions of the operands that are stacks of tiles."""
        return range(self.sizes[0], self.sizes[0] + self.sizes[1])

    @property
    def parts(self) -> range:
        """Positions of the operands of which each tile reads one slice."""
        return range(sum(self.sizes[:3]), sum(self.sizes))

    def run(self, values: Sequence[Any], total: Array | None = None) -> Array:
        """Return the function's result for one tile.

        If the loop accumulates, the sum starts at `total` (None: at zero). `values` are the
        operands in order, with one slice of each stack and part.
        """
        if self.accumulates:
            values = [
                *values,
                jnp.zeros(self.result.shape, self.result.dtype) if total is None else total,
            ]
        num_consts = len(self.unit.constvars)
        (result,) = flatten(self.unit, values[:num_consts]).run(values[num_consts:])
        return jnp.asarray(result)

    def place(self, tile: Array) -> Array:
        """Return the index i32[] of the result's entry to which a tile contributes."""
        return tile // (self.num_tiles // self.num_out)

    def put(self, y: Array, tile: Array, values: Sequence[Any]) -> Array:
        """Return the loop's result `y` after adding or inserting one tile's result.

        `values` are the operands, with the tile's slice of each stack and part.
        """
        if self.accumulates:
            if (
                self.num_out == 1
            ):  # use the full array, so that in-place addition writes to the loop's carry
                return self.run(values, y[0])[None]
            place = self.place(tile)
            total = jax.lax.dynamic_index_in_dim(y, place, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(y, self.run(values, total), place, 0)
        part = self.run(values)
        if self.summed and self.num_out == 1:
            return y + part.astype(y.dtype)[None]
        if self.summed:
            return y.at[self.place(tile)].add(part)
        return jax.lax.dynamic_update_index_in_dim(y, part, tile, 0)

    def cotangent(self, dy: Array, tile: Array) -> Array:
        """Return the cotangent of one tile's result."""
        return jax.lax.dynamic_index_in_dim(dy, self.place(tile), 0, keepdims=False).astype(
            self.result.dtype
        )

    def scan(self, operands: Sequence[Any]) -> Array:
        """Return the loop's result from full stacks; backward recomputes each tile."""
        if self.accumulates:
            return self._scan_that_accumulates(operands)
        # Without the checkpoint, the scan would stack the residuals of every tile. `parse` also
        # finds the unit by this equation.
        unit = jax.checkpoint(lambda *values: self.run(values))
        shared = list(operands[: self.sizes[0]])
        x = list(operands[self.tiles.stop : self.parts.start])
        tiles, parts = ([operands[p] for p in at] for at in (self.tiles, self.parts))
        if not self.summed:
            return jax.lax.scan(
                lambda _, each: (None, unit(*shared, *each[0], *x, *each[1])), None, (tiles, parts)
            )[1]
        # Sums are kept in float32: rounded to 16 bits after each tile, they would lose more
        # precision the more tiles there are.
        if self.num_out == 1:

            def add(total: Array, each: Any) -> tuple[Array, None]:
                return total + unit(*shared, *each[0], *x, *each[1]).astype(jnp.float32), None

            return jax.lax.scan(add, jnp.zeros(self.result.shape, jnp.float32), (tiles, parts))[0][
                None
            ]

        def put(y: Array, each: Any) -> tuple[Array, None]:
            return y.at[self.place(each[2])].add(unit(*shared, *each[0], *x, *each[1])), None

        y = jnp.zeros(self.out.shape, jnp.float32)
        return jax.lax.scan(put, y, (tiles, parts, jnp.arange(self.num_tiles)))[0]

    def _scan_that_accumulates(self, operands: Sequence[Any]) -> Array:
        """Return the loop's result if the unit itself adds to the sum so far."""
        unit = jax.checkpoint(lambda *values: self.run(values[:-1], values[-1]))
        shared = operands[: self.sizes[0]]
        x = operands[self.tiles.stop : self.parts.start]
        tiles, parts = ([operands[p] for p in at] for at in (self.tiles, self.parts))

        def whole(total: Array, each: Any) -> tuple[Array, None]:
            return unit(*shared, *each[0], *x, *each[1], total), None

        if self.num_out == 1:
            return jax.lax.scan(whole, jnp.zeros(self.result.shape, jnp.float32), (tiles, parts))[
                0
            ][None]

        def entry(y: Array, each: Any) -> tuple[Array, None]:
            place = self.place(each[2])
            total = jax.lax.dynamic_index_in_dim(y, place, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(y, whole(total, each)[0], place, 0), None

        return jax.lax.scan(
            entry,
            jnp.zeros(self.out.shape, jnp.float32),
            (tiles, parts, jnp.arange(self.num_tiles)),
        )[0]

    def derivable(self, number: int, operands: Sequence[Any]) -> Array:
        """Return a placeholder equation for the loop, whose derivative is a placeholder too.

        Neither is ever run. `number` identifies the loop.
        """
        floating = [i for i, a in enumerate(operands) if jnp.issubdtype(a.dtype, jnp.floating)]
        shapes = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in floating]

        def forward(operands: Sequence[Any]) -> Array:
            return _mark(f"{MARK}_{number}_forward", self.out, list(operands))

        @jax.custom_vjp
        def call(*operands: Any) -> Array:
            return forward(operands)

        def backward(operands: Any, dy: Array) -> tuple[Any, ...]:
            cotangents = iter(_mark(f"{MARK}_{number}_backward", shapes, [*operands, dy]))
            # Integers have no cotangent; custom_vjp takes None for them.
            return tuple(next(cotangents) if i in floating else None for i in range(len(operands)))

        call.defvjp(lambda *operands: (forward(operands), operands), backward)
        return call(*operands)


def _mark(name: str, out: Any, operands: list[Any]) -> Any:
    """Return the results of a placeholder, a jit that reads `operands` and is never run."""

    def mark(operands: list[Any]) -> Any:
        del operands
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), out)

    # JAX stores a jit's name in its equation, where `marked` reads it.
    mark.__name__ = mark.__qualname__ = name
    return jax.jit(mark)(operands)


def marked(eqn: jex.JaxprEqn) -> tuple[int, bool] | None:
    """Return (number of the loop, whether it is the derivative) of a placeholder equation.

    Return None for any other equation.
    """
    # Match the full name, because a user's function may have a name with this prefix.
    match = re.fullmatch(rf"{MARK}_(\d+)_(forward|backward)", str(eqn.params.get("name", "")))
    return None if match is None else (int(match[1]), match[2] == "backward")


def loop_over(
    function: Callable[..., Array],
    tiles: Any,
    x: Any,
    parts: Any = None,
    *,
    num_out: int = 1,
    summed: bool = True,
    accumulates: bool = False,
) -> Array:
    """Return function(tiles[k], x, parts[k]), summed over successive tiles or stacked.

    Args:
      function: `function(tile, x, part)`, which returns one array, of the same shape for every
        tile.
      tiles: tree of stacks [T, ...].
      x: tree that is the same for every tile. Leaves that are not arrays are passed on unchanged.
      parts: tree of stacks [T, ...], or None.
      num_out: number of entries of the result, a divisor of T. Each entry sums T / num_out
        successive tiles. It is T if not summed.
      summed: whether to sum, in float32.
      accumulates: whether the function is `function(tile, x, part, total)`. It then returns total,
        the float32 sum so far, plus its own result, so that a kernel can add in place; if total is
        None, only its own result.

    Returns:
      An array [num_out, ...].

    Raises:
      ValueError: there is no tile, the stacks differ in length, or the function does not return one
        array.
    """
    leaves, structure = jax.tree.flatten((tiles, x, parts))
    counts = [len(jax.tree.leaves(tree)) for tree in (tiles, x, parts)]
    stacks = [leaves[i] for i in (*range(counts[0]), *range(counts[0] + counts[1], sum(counts)))]
    lengths = {a.shape[0] if a.ndim else 0 for a in map(jnp.asarray, stacks)}
    if not counts[0] or len(lengths) > 1 or 0 in lengths:
        raise ValueError(
            "tiles and parts are stacks of one length, one entry for each tile, not "
            f"{list(lengths)}"
        )
    middle = range(counts[0], counts[0] + counts[1])
    # Leaves of x that are not arrays, such as a flag, stay constants of the unit.
    at = [i for i, a in enumerate(leaves) if i not in middle or hasattr(a, "dtype")]
    arrays = [jnp.asarray(leaves[i]) for i in at]
    is_stack = [i not in middle for i in at]

    def unit(*values: Array) -> Array:
        by_index = dict(zip(at, values, strict=False))
        total = (values[len(at) :] or (None,)) if accumulates else ()
        y = function(
            *jax.tree.unflatten(
                structure, [by_index.get(i, leaf) for i, leaf in enumerate(leaves)]
            ),
            *total,
        )
        if not isinstance(y, jax.Array):
            raise ValueError(f"a function of a tile returns one array, not {type(y).__name__}")
        return y

    pairs = zip(arrays, is_stack, strict=True)
    # Keep weak types: otherwise the unit's dtypes would be promoted differently from the caller's.
    shapes = [
        jax.ShapeDtypeStruct(a.shape[1:] if s else a.shape, a.dtype, weak_type=a.weak_type)
        for a, s in pairs
    ]
    if accumulates:
        shapes.append(jax.ShapeDtypeStruct(jax.eval_shape(unit, *shapes).shape, jnp.float32))
    closed, result = jax.make_jaxpr(unit, return_shape=True)(*shapes)
    # Values that the function closed over become operands, so that the equation lists everything
    # that the loop reads.
    consts = list(map(jnp.asarray, closed.consts))
    sizes = (len(consts), counts[0], len(at) - counts[0] - counts[2], counts[2])
    loop = TileLoop(closed.jaxpr, sizes, lengths.pop(), num_out, summed, result, accumulates)
    if loop.num_tiles == 1:  # nothing to stream
        return loop.scan([*consts, *arrays])

    def scan(*operands: Any) -> Array:
        return loop.scan(operands)

    # Tracing keeps only the name, from which `parse` reads the loop's description.
    scan.__name__ = scan.__qualname__ = _name(loop, [*consts, *arrays])
    return jax.jit(scan)(*consts, *arrays)


def _name(loop: TileLoop, operands: Sequence[Any]) -> str:
    shapes = str([(tuple(a.shape), str(a.dtype)) for a in (*operands, loop.out)])
    # vmap and jvp change the operands but keep the name, so the name holds a checksum of the
    # operands' shapes.
    numbers = (
        *loop.sizes,
        loop.num_tiles,
        loop.num_out,
        loop.summed + loop.accumulates,
        zlib.crc32(shapes.encode()),
    )
    return "_".join([NAME, *map(str, numbers)])


def parse(eqn: jex.JaxprEqn) -> TileLoop | None:
    """Return the loop over tiles that an equation represents, or None."""
    name = str(eqn.params.get("name", ""))
    # Match the full name, because a user's function may have a name with this prefix.
    is_named = re.fullmatch(rf"{NAME}(_\d+){{8}}", name) is not None
    if eqn.primitive.name != "jit" or not is_named or len(eqn.outvars) != 1:
        return None
    *sizes, num_tiles, num_out, summed, _ = map(int, name.removeprefix(f"{NAME}_").split("_"))
    scans = [e for e in eqn.params["jaxpr"].jaxpr.eqns if e.primitive.name == "scan"]
    units = [
        e.params["jaxpr"]
        for s in scans
        for e in s.params["jaxpr"].jaxpr.eqns
        if e.primitive.name == REMAT
    ]
    accumulates = summed == 2
    # A transformation keeps the name and may rewrite the body. An unchanged loop is one scan of
    # one checkpointed unit.
    if len(scans) != 1 or len(units) != 1 or len(eqn.invars) != sum(sizes):
        return None
    if len(units[0].invars) != sum(sizes) + accumulates:
        return None
    aval: Any = units[0].outvars[0].aval
    result = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    loop = TileLoop(units[0], tuple(sizes), num_tiles, num_out, bool(summed), result, accumulates)  # pyright: ignore[reportArgumentType]
    return loop if _name(loop, [v.aval for v in eqn.invars]) == name else None


def find_loops(program: FlatJaxpr) -> dict[int, TileLoop]:
    """Return the loops over tiles in a program, keyed by the slot of their result."""
    return {i.outs[0]: loop for i in program.instructions if (loop := parse(i.eqn)) is not None}


def find_stacks(function: Callable[..., Any], params: Params, *args: Any) -> Any:
    """Return which leaves of abstract parameters are used only as stacks of tiles.

    The result is a tree of bool, shaped like `params`. A leaf counts if `function(params, *args)`
    only loops over its tiles.
    """
    closed = jax.make_jaxpr(lambda *args: function(*args))(params, *args)
    program = flatten(closed.jaxpr, closed.consts, lambda eqn: parse(eqn) is not None)
    loops = find_loops(program)
    stacks: set[Any] = set()
    others: set[Any] = {
        ref for ref in program.outputs if isinstance(ref, int)
    }  # a stack that is returned is needed in full
    for i in program.instructions:
        at = loops[i.outs[0]].tiles if i.outs and i.outs[0] in loops else range(0)
        for position, ref in enumerate(i.ins):
            if isinstance(ref, int):
                (stacks if position in at else others).add(ref)
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree, [slot in stacks - others for slot in program.inputs[: len(leaves)]]
    )
