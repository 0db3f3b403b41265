"""The update of a large leaf whose state rests in host memory, in pieces of rows: one is stored while the next one is loaded.

Loaded as a whole, updated and then stored, a leaf lets one direction of the link rest while the other one works, and the device
holds all of its state. But an elementwise optimizer may update some rows by themselves. So a leaf that is no stack of layers is
seen as a stack of K pieces, W[V, D] -> W[K, V/K, D], and a loop goes over them. Where dim 0 is split over n shards, each device
cuts its own rows, W[V_fsdp, D] -> W[n_fsdp, K, V/(n K), D]: no row leaves its device.

The loop loads piece k while it stores piece k - 1. No array may be read and written at once: XLA would copy it. So the arrays
of a leaf, its master and its moments, are dealt out to groups, and in each turn one group is loaded while another is stored:

    turn   0             1           2
    load   master[k]     mu[k]       nu[k]
    store  mu[k-1]       nu[k-1]     master[k-1]
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from host_offload.device import one_trip, run_loop
from zerojax.sharding import axes_of, local_elements, place
from zerojax.state import FlatState, RecordSpec, StateRecords

Array = jax.Array
Move = Callable[[Array, list[Array]], tuple[Array, list[Array]]]
"""(gradient, [weight, *optimizer state]) of some rows -> the weight, float32, and the optimizer state after the update."""

MOST_PIECES = 32
"""Of a leaf. Nothing is stored beside the first piece, and nothing is loaded beside the last store."""
LEAST_BYTES = 1 << 20
"""Of a piece of an array on one device. PCIe 5 moves so much in 20 microseconds, of which a copy takes 3 to start."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a leaf is cut into rows.

    Attributes:
      count: K, pieces.
      shards: n, into which dim 0 is split.
    """

    count: int
    shards: int

    @property
    def _lead(self) -> tuple[int, ...]:
        """The dims in front of the rows of a piece. A piece's number is the index of the last of them."""
        return (self.count,) if self.shards == 1 else (self.shards, self.count)

    def split(self, array: Array) -> Array:
        """Return an array [V, ...] as [n, K, V/(n K), ...], where it rests."""
        rows = array.shape[0] // (self.shards * self.count)
        return array.reshape(*self._lead, rows, *array.shape[1:])

    def join(self, array: Array) -> Array:
        """Return what `split` took."""
        dims = len(self._lead) + 1
        return array.reshape(math.prod(array.shape[:dims]), *array.shape[dims:])

    def shape(self, array: Any) -> tuple[int, ...]:
        """Return the shape of a piece of what `split` returned: [V/K, ...]."""
        lead, rest = array.shape[: len(self._lead) - 1], array.shape[len(self._lead) :]
        return (math.prod(lead) * rest[0], *rest[1:])

    def read(self, record: RecordSpec, array: Array, piece: Array) -> Array:
        """Return a piece of what `split` returned, on the device: [V/K, ...], sharded as the leaf is."""
        value = jax.lax.dynamic_index_in_dim(array, piece, len(self._lead) - 1, keepdims=False)
        if record.is_away:
            value = jax.device_put(value, self._sharding(record, "device"))
        if self.shards > 1:
            value = value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])
        return jax.lax.with_sharding_constraint(value, record.sharding)

    def write(self, record: RecordSpec, array: Array, piece: Array, value: Array) -> Array:
        """Return what `split` returned, with another piece."""
        value = jax.lax.with_sharding_constraint(value, record.sharding)
        if self.shards > 1:
            value = value.reshape(self.shards, value.shape[0] // self.shards, *value.shape[1:])
        if record.is_away:
            value = jax.device_put(value, self._sharding(record, record.tier))
        return jax.lax.dynamic_update_index_in_dim(array, value, piece, len(self._lead) - 1)

    def _sharding(self, record: RecordSpec, tier: str) -> Any:
        spec = record.spec if self.shards == 1 else (record.spec[0], None, *record.spec[1:])
        return place(record.mesh, spec, tier)


def pieces_of(records: StateRecords, index: int, most: int = MOST_PIECES) -> Pieces | None:
    """Return how a leaf that is no stack of layers is cut, into `most` pieces at most; None: it crosses the link as a whole.

    It does where no link loads and stores at once; where there is but one array to load; and where
    rows do not divide into pieces that are worth a copy each.
    """
    leaf, layout = records.leaves[index], records.layout
    specs, param = records.opt_records((index,)), records.params[index]
    itemsizes = [layout.opt_map.leaves[j].dtype.itemsize for j in layout.opt_map.states_of((index,))]
    if layout.has_master:
        itemsizes = [4, *itemsizes]
    else:  # the parameter is the weight, and loaded
        specs, itemsizes = [*specs, param], [*itemsizes, leaf.dtype.itemsize]
    loaded = [(r, itemsize) for r, itemsize in zip(specs, itemsizes, strict=True) if r.is_away]
    on_disk = any(r.disk_records is not None for r in (param, *specs))
    if not records.both_ways or len(loaded) < 2 or on_disk or not leaf.shape:
        return None
    splits = {axes_of(r.spec[0]) for r, _ in loaded}
    shards = math.prod(records.mesh.shape[axis] for axis in next(iter(splits)))
    if len(splits) > 1 or leaf.shape[0] % shards:
        return None
    smallest = min(itemsize * local_elements(leaf.shape, r.spec, r.mesh) for r, itemsize in loaded)
    rows, most = leaf.shape[0] // shards, min(most, smallest // LEAST_BYTES)
    count = max((n for n in range(1, most + 1) if rows % n == 0), default=1)
    return Pieces(count, shards) if count > 1 else None


def dealt(sizes: Sequence[int], num_groups: int) -> list[list[int]]:
    """Deal arrays out to groups of bytes as equal as the largest ones allow; returns the places of each group's arrays."""
    groups: list[list[int]] = [[] for _ in range(min(num_groups, len(sizes)))]
    filled = [0] * len(groups)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = filled.index(min(filled))
        groups[least].append(n)
        filled[least] += sizes[n]
    return groups


def _turns(sizes: Sequence[int]) -> list[list[int]]:
    """Return the groups with which the turns take least: each takes as long as the larger of what it loads and stores."""

    def bytes_of(groups: list[list[int]]) -> int:
        filled = [sum(sizes[n] for n in group) for group in groups]
        return sum(max(up, down) for up, down in zip(filled, [*filled[1:], filled[0]], strict=True))

    return min((dealt(sizes, num) for num in range(2, len(sizes) + 1)), key=bytes_of)


def update_in_pieces(
    records: StateRecords, states: FlatState, index: int, grad: Array, move: Move, pieces: Pieces, begin: Array
) -> tuple[FlatState, Array]:
    """Update a leaf that is no stack of layers, piece by piece.

    Args:
      records: how the state rests.
      states: all leaves.
      index: of the leaf.
      grad: of it, sharded as its optimizer state is.
      move: the optimizer.
      pieces: how the leaf is cut.
      begin: i32[] zero, known when this may begin.

    Returns:
      The states, and a zero that is known when this is done.
    """
    # The parameter comes last. It is loaded where it is the weight, and stored where it rests.
    specs, last = [*records.opt_records((index,)), records.params[index]], len(records.opt_records((index,)))
    has_master, of_grad = states.master is not None, records.grads[index]
    arrays = [pieces.split(a) for a in (*records.opt_states(states, (index,)), states.params[index])]
    grads = pieces.split(grad)
    read = range(last if has_master else last + 1)
    loads = [n for n in read if specs[n].is_away]
    groups = [[loads[n] for n in group] for group in _turns([arrays[n].size * arrays[n].dtype.itemsize for n in loads])]
    stores = [*groups[1:], groups[0]]
    if has_master and specs[last].is_away:
        stores[0] = [*stores[0], last]

    def store(arrays: list[Any], pending: dict[int, Array], turn: int, piece: Array) -> list[Any]:
        return [pieces.write(specs[n], a, piece, pending[n]) if n in stores[turn] else a for n, a in enumerate(arrays)]

    def tick(piece: Array, carry: Any, is_first: bool = False) -> Any:
        arrays, pending, begin = carry
        loaded: dict[int, Array] = {}
        for turn, group in enumerate(groups):
            if turn:
                arrays, loaded = jax.lax.optimization_barrier((arrays, loaded))
            loaded |= {n: pieces.read(specs[n], arrays[n], piece) for n in group}
            if not is_first:
                arrays = store(arrays, pending, turn, piece - 1)
        old = [loaded[n] if n in loaded else pieces.read(specs[n], arrays[n], piece) for n in read]
        # A master leads its record. Without one the parameter, which is read last, is the weight.
        loaded_piece = old if has_master else [old[-1], *old[:-1]]
        weight, opt = move(pieces.read(of_grad, grads, piece), loaded_piece)
        after = [*([weight] if has_master else []), *opt, records.cast(index, weight)]
        # What rests on the device is written in place.
        arrays = [a if r.is_away else pieces.write(r, a, piece, v) for r, a, v in zip(specs, arrays, after, strict=True)]
        return arrays, {n: v for n, v in enumerate(after) if specs[n].is_away}, begin

    def drain(piece: Array, carry: Any) -> Any:
        arrays, pending, begin = carry
        for turn in range(len(groups)):
            arrays = store(arrays, pending, turn, piece)
        return arrays, pending, begin

    def first(piece: Array, carry: Any) -> Any:
        arrays, _, begin = carry
        return tick(piece, (arrays, {}, begin), is_first=True)

    _, shapes, _ = jax.eval_shape(first, jax.ShapeDtypeStruct((), jnp.int32), (arrays, {}, begin))
    empty = {n: jax.lax.with_sharding_constraint(jnp.zeros(a.shape, a.dtype), specs[n].sharding) for n, a in shapes.items()}
    carry = one_trip(0, first, (arrays, empty, begin), records.mesh)
    carry = run_loop(1, pieces.count, tick, carry, records.mesh)
    arrays, _, begin = one_trip(pieces.count - 1, drain, carry, records.mesh)
    arrays = [pieces.join(a) for a in arrays]
    params = [*states.params[:index], arrays[-1], *states.params[index + 1 :]]
    return records.replace(dataclasses.replace(states, params=params), (index,), arrays[:-1]), begin
