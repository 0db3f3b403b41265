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
from typing import Any, NamedTuple

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
_SKIPS = 4
"""What a loop whose tiles may be skipped adds to the number of its kind in its name."""


class _Operands(NamedTuple):
    """Operands of a loop: what all tiles share (consts and x), and what each reads a slice of."""

    consts: Sequence[Any]
    tiles: Sequence[Any]
    x: Sequence[Any]
    parts: Sequence[Any]

    @property
    def stacks(self) -> tuple[list[Any], list[Any]]:
        """Stacks of which each tile reads a slice: (tiles, parts)."""
        return list(self.tiles), list(self.parts)

    def of_tile(self, slices: tuple[list[Any], list[Any]]) -> list[Any]:
        """Return the operands of one tile, given its slices of `stacks`."""
        tiles, parts = slices
        return [*self.consts, *tiles, *self.x, *parts]


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
      skips: whether the last of the parts is bool[T], and says which tiles are needed. The result
        of any other tile is zero.
    """

    unit: jex.Jaxpr
    sizes: tuple[int, int, int, int]
    num_tiles: int
    num_out: int
    summed: bool
    result: jax.ShapeDtypeStruct
    accumulates: bool = False
    skips: bool = False

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
            if total is None:
                total = jnp.zeros(self.result.shape, self.result.dtype)
            values = [*values, total]
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
            if self.num_out == 1:
                # Use the full array, so that in-place addition writes to the loop's carry.
                return self.run(values, y[0])[None]
            place = self.place(tile)
            total = jax.lax.dynamic_index_in_dim(y, place, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(y, self.run(values, total), place, 0)
        result = self.run(values)
        if not self.summed:
            return jax.lax.dynamic_update_index_in_dim(y, result, tile, 0)
        if self.num_out == 1:
            return y + result.astype(y.dtype)[None]
        return y.at[self.place(tile)].add(result)

    def cotangent(self, dy: Array, tile: Array) -> Array:
        """Return the cotangent of one tile's result."""
        entry = jax.lax.dynamic_index_in_dim(dy, self.place(tile), 0, keepdims=False)
        return entry.astype(self.result.dtype)

    def scan(self, operands: Sequence[Any]) -> Array:
        """Return the loop's result from full stacks; backward recomputes each tile."""
        if self.accumulates:
            return self._scan_that_accumulates(operands)
        # Without the checkpoint, the scan would stack the residuals of every tile. `parse` also
        # finds the unit by this equation.
        unit = jax.checkpoint(lambda *values: self.run(values))
        operands = self._split(operands)
        if not self.summed:

            def stack(_: None, slices: Any) -> tuple[None, Array]:
                return None, unit(*operands.of_tile(slices))

            return jax.lax.scan(stack, None, operands.stacks)[1]

        # Sums are kept in float32: rounded to 16 bits after each tile, they would lose more
        # precision the more tiles there are.
        if self.num_out == 1:

            def add(total: Array, slices: Any) -> tuple[Array, None]:
                return total + unit(*operands.of_tile(slices)).astype(jnp.float32), None

            zeros = jnp.zeros(self.result.shape, jnp.float32)
            return jax.lax.scan(add, zeros, operands.stacks)[0][None]

        def add_to_entry(y: Array, tile: Any) -> tuple[Array, None]:
            slices, number = tile
            return y.at[self.place(number)].add(unit(*operands.of_tile(slices))), None

        zeros = jnp.zeros(self.out.shape, jnp.float32)
        tiles = (operands.stacks, jnp.arange(self.num_tiles))
        return jax.lax.scan(add_to_entry, zeros, tiles)[0]

    def _scan_that_accumulates(self, operands: Sequence[Any]) -> Array:
        """Return the loop's result if the unit itself adds to the sum so far."""
        unit = jax.checkpoint(lambda *values: self.run(values[:-1], values[-1]))
        operands = self._split(operands)
        if self.num_out == 1:

            def add(total: Array, slices: Any) -> tuple[Array, None]:
                return unit(*operands.of_tile(slices), total), None

            zeros = jnp.zeros(self.result.shape, jnp.float32)
            return jax.lax.scan(add, zeros, operands.stacks)[0][None]

        def add_to_entry(y: Array, tile: Any) -> tuple[Array, None]:
            slices, number = tile
            place = self.place(number)
            total = jax.lax.dynamic_index_in_dim(y, place, 0, keepdims=False)
            total = unit(*operands.of_tile(slices), total)
            return jax.lax.dynamic_update_index_in_dim(y, total, place, 0), None

        zeros = jnp.zeros(self.out.shape, jnp.float32)
        tiles = (operands.stacks, jnp.arange(self.num_tiles))
        return jax.lax.scan(add_to_entry, zeros, tiles)[0]

    def _split(self, operands: Sequence[Any]) -> _Operands:
        """Return the operands by their kind."""
        consts = operands[: self.tiles.start]
        tiles = operands[self.tiles.start : self.tiles.stop]
        x = operands[self.tiles.stop : self.parts.start]
        return _Operands(consts, tiles, x, operands[self.parts.start :])

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
    needed: Array | None = None,
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
      needed: bool[T], which tiles add to the sum; None: all of them. A streamed step's forward
        without gradients (`program.apply`) neither fetches nor computes the others.

    Returns:
      An array [num_out, ...].

    Raises:
      ValueError: there is no tile, the stacks differ in length, the function does not return one
        array, or `needed` is given to a loop that does not sum.
    """
    if needed is not None:
        if accumulates or not summed:
            raise ValueError("needed= is for loops that sum the results of their tiles")
        function = _zero_unless_needed(function)
        parts = (parts, needed)
    arguments = _Arguments(tiles, x, parts)

    def unit(*values: Array) -> Array:
        num_arrays = len(arguments.arrays)
        args = list(arguments.unflatten(values[:num_arrays]))
        if accumulates:
            args.append(values[num_arrays] if len(values) > num_arrays else None)
        y = function(*args)
        if not isinstance(y, jax.Array):
            raise ValueError(f"a function of a tile returns one array, not {type(y).__name__}")
        return y

    shapes = arguments.tile_shapes()
    if accumulates:
        shapes.append(jax.ShapeDtypeStruct(jax.eval_shape(unit, *shapes).shape, jnp.float32))
    closed, result = jax.make_jaxpr(unit, return_shape=True)(*shapes)
    # Values that the function closed over become operands, so that the equation lists everything
    # that the loop reads.
    consts = list(map(jnp.asarray, closed.consts))
    operands = [*consts, *arguments.arrays]
    sizes = (len(consts), *arguments.sizes)
    loop = TileLoop(
        closed.jaxpr,
        sizes,
        arguments.num_tiles,
        num_out,
        summed,
        result,
        accumulates,
        needed is not None,
    )
    if loop.num_tiles == 1:  # nothing to stream
        return loop.scan(operands)

    def scan(*operands: Any) -> Array:
        return loop.scan(operands)

    # Tracing keeps only the name, from which `parse` reads the loop's description.
    scan.__name__ = scan.__qualname__ = _name(loop, operands)
    return jax.jit(scan)(*operands)


def _zero_unless_needed(function: Callable[..., Array]) -> Callable[[Any, Any, Any], Array]:
    """Return a function of (tile, x, (part, needed)), whose result is zero unless it is needed."""

    def selected(tile: Any, x: Any, part: Any) -> Array:
        part, is_needed = part
        y = function(tile, x, part)
        return jnp.where(is_needed, y, jnp.zeros_like(y))

    return selected


class _Arguments:
    """The trees that `loop_over` gets, as the list of their arrays.

    Leaves of x that are not arrays, such as a flag, stay constants of the unit.

    Attributes:
      arrays: arrays of tiles, x and parts.
      sizes: numbers of arrays in tiles, x and parts.
      num_tiles: length of the stacks.
    """

    def __init__(self, tiles: Any, x: Any, parts: Any) -> None:
        """Flatten the trees.

        Raises:
          ValueError: there is no tile, or the stacks differ in length.
        """
        self._leaves, self._structure = jax.tree.flatten((tiles, x, parts))
        num_stacks = len(jax.tree.leaves(tiles))
        num_parts = len(jax.tree.leaves(parts))
        x_leaves = range(num_stacks, len(self._leaves) - num_parts)
        lengths = set()
        for i, leaf in enumerate(self._leaves):
            if i not in x_leaves:
                lengths.add(jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0)
        if not num_stacks or len(lengths) > 1 or 0 in lengths:
            raise ValueError(
                "tiles and parts are stacks of one length, one entry for each tile, not "
                f"{list(lengths)}"
            )
        self.num_tiles = lengths.pop()
        self._indices = [
            i for i, leaf in enumerate(self._leaves) if i not in x_leaves or hasattr(leaf, "dtype")
        ]
        self._is_stack = [i not in x_leaves for i in self._indices]
        self.arrays = [jnp.asarray(self._leaves[i]) for i in self._indices]
        self.sizes = (num_stacks, len(self.arrays) - num_stacks - num_parts, num_parts)

    def tile_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays that one tile reads."""
        shapes = []
        for a, is_stack in zip(self.arrays, self._is_stack, strict=True):
            shape = a.shape[1:] if is_stack else a.shape
            # Keep weak types: otherwise the unit's dtypes would be promoted differently from the
            # caller's.
            shapes.append(jax.ShapeDtypeStruct(shape, a.dtype, weak_type=a.weak_type))
        return shapes

    def unflatten(self, values: Sequence[Array]) -> tuple[Any, Any, Any]:
        """Return the trees (tile, x, part) of one tile, given their arrays."""
        leaves = list(self._leaves)
        for i, value in zip(self._indices, values, strict=True):
            leaves[i] = value
        return jax.tree.unflatten(self._structure, leaves)


def _name(loop: TileLoop, operands: Sequence[Any]) -> str:
    shapes = str([(tuple(a.shape), str(a.dtype)) for a in (*operands, loop.out)])
    # vmap and jvp change the operands but keep the name, so the name holds a checksum of the
    # operands' shapes.
    numbers = (
        *loop.sizes,
        loop.num_tiles,
        loop.num_out,
        loop.summed + loop.accumulates + _SKIPS * loop.skips,
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
    *sizes, num_tiles, num_out, kind, _ = map(int, name.removeprefix(f"{NAME}_").split("_"))
    skips, summed = divmod(kind, _SKIPS)
    scans = [e for e in eqn.params["jaxpr"].jaxpr.eqns if e.primitive.name == "scan"]
    units = []
    for scan in scans:
        body = scan.params["jaxpr"].jaxpr.eqns
        units += [e.params["jaxpr"] for e in body if e.primitive.name == REMAT]
    accumulates = summed == 2
    # A transformation keeps the name and may rewrite the body. An unchanged loop is one scan of
    # one checkpointed unit.
    if len(scans) != 1 or len(units) != 1 or len(eqn.invars) != sum(sizes):
        return None
    if len(units[0].invars) != sum(sizes) + accumulates:
        return None
    aval: Any = units[0].outvars[0].aval
    result = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    loop = TileLoop(
        units[0],
        tuple(sizes),  # pyright: ignore[reportArgumentType]
        num_tiles,
        num_out,
        bool(summed),
        result,
        accumulates,
        bool(skips),
    )
    return loop if _name(loop, [v.aval for v in eqn.invars]) == name else None


def find_loops(program: FlatJaxpr) -> dict[int, TileLoop]:
    """Return the loops over tiles in a program, keyed by the slot of their result."""
    loops = {}
    for i in program.instructions:
        loop = parse(i.eqn)
        if loop is not None:
            loops[i.outs[0]] = loop
    return loops


def find_stacks(function: Callable[..., Any], params: Params, *args: Any) -> Any:
    """Return which leaves of abstract parameters are used only as stacks of tiles.

    The result is a tree of bool, shaped like `params`. A leaf counts if `function(params, *args)`
    only loops over its tiles.
    """
    closed = jax.make_jaxpr(lambda *args: function(*args))(params, *args)
    program = flatten(closed.jaxpr, closed.consts, lambda eqn: parse(eqn) is not None)
    loops = find_loops(program)
    read_by_tile = set[int]()
    # A stack that is returned is needed in full.
    read_in_full = {ref for ref in program.outputs if isinstance(ref, int)}
    for i in program.instructions:
        tiles = loops[i.outs[0]].tiles if i.outs and i.outs[0] in loops else range(0)
        for position, ref in enumerate(i.ins):
            if isinstance(ref, int):
                slots = read_by_tile if position in tiles else read_in_full
                slots.add(ref)
    leaves, structure = jax.tree.flatten(params)
    stacks = read_by_tile - read_in_full
    return jax.tree.unflatten(structure, [slot in stacks for slot in program.inputs[: len(leaves)]])
