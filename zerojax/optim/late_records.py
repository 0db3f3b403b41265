"""Records in host memory that one tick updates and a later tick stores.

The store overlaps the load of the next record, because the host link carries both directions at the
same time: a tick loads the record that it updates while it stores a record that an earlier tick
updated. No array may be read and written at the same time, or XLA would copy it. So the arrays of a
record, such as its master and its moments, are dealt out to groups of about equal bytes. In each
turn one group is loaded while another group is stored:

    turn   0             1           2
    load   master[k]     mu[k]       nu[k]
    store  mu[k-1]       nu[k-1]     master[k-1]

A record is a layer of a stack, or a **piece** of an unstacked leaf that is larger than a layer,
such as an embedding. If such a leaf were loaded in full, updated and then stored, one direction of
the link would idle while the other works, and the device would hold all of its state. An
elementwise optimizer can update a subset of the rows on its own. So the leaf is seen as a stack of
K pieces, W[V, D] -> W[K, V/K, D]. If dim 0 is split over n shards, each device cuts its own rows,
W[V_fsdp, D] -> W[n_fsdp, K, V/(n K), D], and no row leaves its device.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from host_offload.device import one_trip, run_loop
from zerojax.sharding import local_elements, parse_axes, place
from zerojax.state import FlatState, RecordSpec, StateRecords, read_layer, write_layer

Array = jax.Array
UpdateRows = Callable[[Array, list[Array]], tuple[Array, list[Array]]]
"""(gradient, [weight, *optimizer state]) of some rows -> (new float32 weight, new state)."""

MOST_PIECES = 32
"""Maximum number of pieces of a leaf.

Nothing is stored during the first piece's load, and nothing is loaded during the last store.
"""
LEAST_BYTES = 1 << 20
"""Minimum number of bytes per device of one array of a piece.

PCIe 5 moves 1 MiB in 20 microseconds; starting a copy takes 3 microseconds.
"""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the rows of a leaf are cut into pieces.

    Attributes:
      count: K, the number of pieces.
      shards: n, the number of shards of dim 0.
    """

    count: int
    shards: int

    @property
    def _lead(self) -> tuple[int, ...]:
        """The leading dims of a split array, before the rows of a piece.

        The last of them is indexed by the piece number.
        """
        return (self.count,) if self.shards == 1 else (self.shards, self.count)

    def split(self, array: Array) -> Array:
        """Return an array [V, ...] as [n, K, V/(n K), ...], or as [K, V/K, ...] if n is 1.

        The result uses the memory of the array.
        """
        rows = array.shape[0] // (self.shards * self.count)
        return array.reshape(*self._lead, rows, *array.shape[1:])

    def join(self, array: Array) -> Array:
        """Return the array [V, ...] that `split` was given."""
        dims = len(self._lead) + 1
        return array.reshape(math.prod(array.shape[:dims]), *array.shape[dims:])

    def shape(self, array: Any) -> tuple[int, ...]:
        """Return the shape of one piece of a split array: [V/K, ...]."""
        shards = array.shape[: len(self._lead) - 1]
        rows, *row_shape = array.shape[len(self._lead) :]
        return (math.prod(shards) * rows, *row_shape)

    def read(self, record: RecordSpec, array: Array, piece: Array) -> Array:
        """Return one piece of a split array, on the device.

        Args:
          record: where the array is stored, and how it is sharded.
          array: array returned by `split`.
          piece: i32[], number of the piece.

        Returns:
          The piece [V/K, ...], sharded like the leaf.
        """
        value = jax.lax.dynamic_index_in_dim(array, piece, len(self._lead) - 1, keepdims=False)
        if record.is_away:
            value = jax.device_put(value, self._sharding(record, "device"))
        if self.shards > 1:
            value = value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])
        return jax.lax.with_sharding_constraint(value, record.sharding)

    def write(self, record: RecordSpec, array: Array, piece: Array, value: Array) -> Array:
        """Return a split array with one piece replaced.

        Args:
          record: where the array is stored, and how it is sharded.
          array: array returned by `split`.
          piece: i32[], number of the piece.
          value: new piece [V/K, ...], on the device.
        """
        value = jax.lax.with_sharding_constraint(value, record.sharding)
        if self.shards > 1:
            value = value.reshape(self.shards, value.shape[0] // self.shards, *value.shape[1:])
        if record.is_away:
            value = jax.device_put(value, self._sharding(record, record.tier))
        return jax.lax.dynamic_update_index_in_dim(array, value, piece, len(self._lead) - 1)

    def _sharding(self, record: RecordSpec, tier: str) -> Any:
        spec = record.spec if self.shards == 1 else (record.spec[0], None, *record.spec[1:])
        return place(record.mesh, spec, tier)


def cut_leaf(records: StateRecords, index: int, most: int = MOST_PIECES) -> Pieces | None:
    """Return how an unstacked leaf is cut into pieces, or None if it is moved in full.

    It is moved in full in three cases: the link cannot load and store at the same time; there is
    only one array to load; or the rows do not divide into pieces large enough to be worth a copy
    each.

    Args:
      records: where the state is stored.
      index: index of the unstacked leaf.
      most: maximum number of pieces.
    """
    leaf = records.leaves[index]
    layout = records.layout
    specs = records.opt_records((index,))
    param = records.params[index]
    state_leaves = layout.opt_map.list_state_leaves((index,))
    itemsizes = [layout.opt_map.leaves[j].dtype.itemsize for j in state_leaves]
    if layout.has_master:
        itemsizes = [4, *itemsizes]
    else:  # the parameter is the weight, so it is loaded
        specs = [*specs, param]
        itemsizes = [*itemsizes, leaf.dtype.itemsize]

    loaded: list[RecordSpec] = []
    loaded_bytes: list[int] = []  # per device, of each loaded array
    for spec, itemsize in zip(specs, itemsizes, strict=True):
        if spec.is_away:
            loaded.append(spec)
            loaded_bytes.append(itemsize * local_elements(leaf.shape, spec.spec, spec.mesh))
    on_disk = any(spec.disk_records is not None for spec in (param, *specs))
    if not records.both_ways or len(loaded) < 2 or on_disk or not leaf.shape:
        return None

    row_axes = {parse_axes(spec.spec[0]) for spec in loaded}
    shards = math.prod(records.mesh.shape[axis] for axis in next(iter(row_axes)))
    if len(row_axes) > 1 or leaf.shape[0] % shards:
        return None
    rows = leaf.shape[0] // shards
    most = min(most, min(loaded_bytes) // LEAST_BYTES)
    count = max((n for n in range(1, most + 1) if rows % n == 0), default=1)
    return Pieces(count, shards) if count > 1 else None


def dealt(sizes: Sequence[int], num_groups: int) -> list[list[int]]:
    """Deal arrays out to groups whose bytes are as equal as the largest arrays allow.

    Args:
      sizes: bytes of each array.
      num_groups: maximum number of groups.

    Returns:
      For each group, the positions of its arrays in `sizes`.
    """
    groups: list[list[int]] = [[] for _ in range(min(num_groups, len(sizes)))]
    group_bytes = [0] * len(groups)
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        smallest = group_bytes.index(min(group_bytes))
        groups[smallest].append(n)
        group_bytes[smallest] += sizes[n]
    return groups


def _turns(sizes: Sequence[int]) -> list[list[int]]:
    """Return the groups whose turns take the least time in total.

    A turn takes as long as the larger of its load and its store.
    """

    def sum_bytes(groups: list[list[int]]) -> int:
        loads = [sum(sizes[n] for n in group) for group in groups]
        stores = [*loads[1:], loads[0]]
        return sum(map(max, loads, stores))

    choices = [dealt(sizes, num_groups) for num_groups in range(2, len(sizes) + 1)]
    return min(choices, key=sum_bytes)


class LateTick(Protocol):
    """What a tick says about the records that it moves; see `zerojax.streamed.phases.Tick`."""

    @property
    def layer(self) -> Any:
        """The layer that is updated, or the number of a piece, i32[]."""
        ...

    @property
    def fetch(self) -> Array | None:
        """The layer whose parameters are loaded for a later tick, i32[], or None."""
        ...

    @property
    def stored(self) -> Array | None:
        """The layer that is stored, i32[], or None."""
        ...

    @property
    def loads_pieces(self) -> bool:
        """Whether pieces are loaded and updated."""
        ...

    @property
    def stores_pieces(self) -> bool:
        """Whether pieces are stored."""
        ...


@dataclasses.dataclass(frozen=True)
class _PieceTick:
    """A tick that updates only a piece, and no layer."""

    layer: Array
    stored: Array | None
    fetch: Array | None = None
    loads_pieces: bool = True
    stores_pieces: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DuplexResult:
    """The state, and the arrays loaded from it, while a tick computes.

    Attributes:
      states: all leaves of the state; the stacks in host memory are written turn by turn.
      loaded: arrays loaded so far, by position in the record.
      unstacked: records of unstacked leaves that the tick stores, by leaf index; `states` lacks
        them meanwhile.
    """

    states: FlatState
    loaded: dict[int, Array]
    unstacked: dict[int, list[Any]]


UnstoredRecords = list[list[Array]]
"""Updated records that later ticks store: arrays on the device, the oldest record first."""


class DuplexTransfer:
    """Loads a tick's record, and stores an earlier tick's record, while the tick computes.

    If parameters are in host memory, it also loads the parameters that a later tick uses.
    """

    def __init__(
        self,
        record: "LateRecord",
        num_groups: int,
        now: LateTick,
        pending: "UnstoredRecords",
        states: FlatState,
        unstacked: Mapping[int, list[Array]] | None = None,
    ) -> None:
        """Plan the turns of a tick.

        Args:
          record: arrays that the tick loads and stores.
          num_groups: maximum number of groups.
          now: the tick.
          pending: records that earlier ticks updated, on the device.
          states: all leaves of the state.
          unstacked: updated records of unstacked leaves, on the device, by leaf index; this tick
            stores them.
        """
        self.record = record
        self.now = now
        self.pending = pending[0]
        self.states = states
        self.unstacked = unstacked or {}
        self.groups = dealt([a.size * a.dtype.itemsize for a in self.pending], num_groups)

    @property
    def num_turns(self) -> int:
        """The number of turns: one for each group."""
        return len(self.groups)

    def begin(self) -> DuplexResult:
        """Start the first turn."""
        states = without_unstacked(self.record.records, self.states, list(self.unstacked))
        return self.turn(0, DuplexResult(states, {}, {i: [] for i in self.unstacked}))

    def cross(self) -> DuplexResult:
        """Take all turns, one after the other, without overlapping computation."""
        result = self.begin()
        for number in range(1, self.num_turns):
            result = self.turn(number, jax.lax.optimization_barrier(result))
        return result

    def turn(self, number: int, result: DuplexResult) -> DuplexResult:
        """Start a turn. The loads and stores of the turns before it must be done."""
        record = self.record
        now = self.now
        up = self.groups[number]
        down = self.groups[(number + self.num_turns // 2) % self.num_turns]
        loaded = record.load(result.states, up, now)
        states = result.states
        if now.stored is not None:
            stop = len(self.pending) if now.stores_pieces else record.num_own
            values = {n: self.pending[n] for n in down if n < stop}
            states = record.store(states, now.stored, values)
        unstacked = self._start_stores(number, result.unstacked)
        return DuplexResult(states, result.loaded | loaded, unstacked)

    def _start_stores(self, number: int, stored: dict[int, list[Any]]) -> dict[int, list[Any]]:
        """Start a turn's share of the stores of unstacked leaves.

        XLA starts a store as late as its turn allows.
        """
        stored = {i: list(arrays) for i, arrays in stored.items()}
        num_arrays = sum(map(len, self.unstacked.values()))
        n = 0  # number of the array among all arrays of unstacked leaves
        for i, values in self.unstacked.items():
            specs = record_specs(self.record.records, (i,))
            for spec, value in zip(specs, values, strict=True):
                if n * self.num_turns // num_arrays == number:
                    stored[i].append(spec.store(value))
                n += 1
        return stored

    def finish_states(self, result: DuplexResult) -> FlatState:
        """Return the state after all turns."""
        return with_unstacked(self.record.records, result.states, result.unstacked)

    def loaded(self, result: DuplexResult) -> tuple[list[Array], list[Array]]:
        """Return the loaded arrays of the updated layer, and loaded parameters of a later layer."""
        record = self.record
        arrays = [result.loaded[n] for n in sorted(result.loaded) if n < record.num_own]
        return arrays[: record.num_opt], arrays[record.num_opt :]

    def loaded_piece(self, result: DuplexResult, leaf: int) -> list[Array]:
        """Return the loaded arrays of a piece: master (if any), optimizer state, parameter."""
        return [result.loaded[n] for n in self.record.positions[leaf] if n in result.loaded]


class LateRecord:
    """The arrays that one tick loads and updates, and a later tick stores.

    They belong to a layer's record and to one piece of each of some unstacked leaves: the layer's
    masters, if any, and optimizer state; its parameters if they are in host memory; then the same
    arrays for each piece. Piece k belongs to the tick of layer `lowest` + k.

    Attributes:
      records: where the state is stored.
      leaf_ids: indices of the layer's leaves.
      pieces: how each unstacked leaf is cut, by leaf index; the state holds these leaves as
        `Pieces.split` returns them.
      lowest: the layer whose tick updates piece 0.
      num_opt: number of the layer's masters and optimizer state arrays, which come first.
      num_own: number of arrays of the layer.
      positions: positions of each piece's arrays, by leaf index.
    """

    def __init__(
        self,
        records: StateRecords,
        leaf_ids: Sequence[int],
        pieces: Mapping[int, Pieces] | None = None,
        lowest: int = 0,
    ) -> None:
        """Lay out the arrays of a layer and of the pieces."""
        self.records = records
        self.leaf_ids = leaf_ids
        self.pieces = pieces or {}
        self.lowest = lowest
        self._specs = record_specs(records, leaf_ids)
        self.num_opt = len(records.opt_records(leaf_ids))
        self.num_own = len(self._specs)
        self.positions = dict[int, range]()
        self._leaf_of = dict[int, int]()
        for i in self.pieces:
            specs = record_specs(records, (i,))
            self.positions[i] = range(len(self._specs), len(self._specs) + len(specs))
            self._leaf_of |= dict.fromkeys(self.positions[i], i)
            self._specs += specs

    def load(self, states: FlatState, positions: Sequence[int], now: LateTick) -> dict[int, Array]:
        """Return the arrays among `positions` that a tick loads, on the device, by position."""
        stacks = self._stacks(states)
        loaded = dict[int, Array]()
        for n in positions:
            if n >= self.num_own:
                if now.loads_pieces and self._is_loaded(n, states.master is not None):
                    pieces = self.pieces[self._leaf_of[n]]
                    piece = self.piece(now.layer)
                    loaded[n] = pieces.read(self._specs[n], stacks[n], piece)
                continue
            index = now.layer if n < self.num_opt else now.fetch
            if index is not None:
                (loaded[n],) = read_layer([self._specs[n]], [stacks[n]], index)
        return loaded

    def _is_loaded(self, position: int, has_master: bool) -> bool:
        """Return whether a piece's array is loaded. A parameter that has a master is only stored.

        Args:
          position: position of the array in the record.
          has_master: whether the leaf has a master.
        """
        i = self._leaf_of[position]
        num_opt = len(self.records.opt_records((i,)))
        return not has_master or position - self.positions[i].start < num_opt

    def store(self, states: FlatState, layer: Array, values: Mapping[int, Array]) -> FlatState:
        """Return the state with some arrays written for the tick of a layer.

        Args:
          states: all leaves of the state.
          layer: i32[], layer of the tick.
          values: arrays on the device, by position in the record.
        """
        stacks = self._stacks(states)
        for n, value in values.items():
            if n >= self.num_own:
                pieces = self.pieces[self._leaf_of[n]]
                piece = self.piece(layer)
                stacks[n] = pieces.write(self._specs[n], stacks[n], piece, value)
            else:
                (stacks[n],) = write_layer([self._specs[n]], [stacks[n]], layer, [value])

        params = list(states.params)
        away = _away(self.records, self.leaf_ids)
        for i, stack in zip(away, stacks[self.num_opt : self.num_own], strict=True):
            params[i] = stack
        states = dataclasses.replace(states, params=params)
        states = self.records.replace(states, self.leaf_ids, stacks[: self.num_opt])
        unstacked = {}
        for i, positions in self.positions.items():
            unstacked[i] = [stacks[n] for n in positions]
        return with_unstacked(self.records, states, unstacked)

    def num_loaded(self, states: FlatState) -> int:
        """Return how many arrays a tick loads if it updates only pieces.

        A parameter that has a master is not loaded.
        """
        if states.master is None:
            return len(self._specs)
        return sum(len(self.records.opt_records((i,))) for i in self.pieces)

    def piece(self, layer: Array) -> Array:
        """Return the number of the pieces that belong to the tick of a layer."""
        return layer - self.lowest if self.lowest else layer

    def empty(self, states: FlatState, lag: int) -> UnstoredRecords:
        """Return zeros for the records of the last `lag` ticks that are not stored yet."""
        stacks = self._stacks(states)
        record = list[Array]()
        for n, (spec, stack) in enumerate(zip(self._specs, stacks, strict=True)):
            if n < self.num_own:
                shape = stack.shape[1:]
            else:
                shape = self.pieces[self._leaf_of[n]].shape(stack)
            zeros = jnp.zeros(shape, stack.dtype)
            record.append(jax.lax.with_sharding_constraint(zeros, spec.sharding))
        return [record] * lag

    def drain(
        self, states: FlatState, number: int, layer: Array, pending: UnstoredRecords
    ) -> tuple[FlatState, UnstoredRecords]:
        """Store the oldest pending record after the last tick.

        Args:
          states: all leaves of the state.
          number: number of the layer, as a Python integer.
          layer: number of the layer, i32[].
          pending: records that are not stored yet.

        Returns:
          The states, and the pending records with the next one to store first.
        """
        oldest, *newer = pending
        # If there are fewer pieces than layers, the last layers have no piece.
        values = oldest if number >= self.lowest else oldest[: self.num_own]
        return self.store(states, layer, dict(enumerate(values))), [*newer, oldest]

    def _stacks(self, states: FlatState) -> list[Any]:
        """Return the stacks of the record's arrays, by position."""
        stacks = record_stacks(self.records, states, self.leaf_ids)
        for i in self.pieces:
            stacks += record_stacks(self.records, states, (i,))
        return stacks


def record_specs(records: StateRecords, leaf_ids: Sequence[int]) -> list[RecordSpec]:
    """Return the specs of a record's arrays: masters, optimizer state, offloaded parameters."""
    return [*records.opt_records(leaf_ids), *(records.params[i] for i in _away(records, leaf_ids))]


def record_stacks(records: StateRecords, states: FlatState, leaf_ids: Sequence[int]) -> list[Any]:
    """Return the stacks of a record's arrays, in the order of `record_specs`."""
    return [
        *records.opt_states(states, leaf_ids),
        *(states.params[i] for i in _away(records, leaf_ids)),
    ]


def with_unstacked(
    records: StateRecords, states: FlatState, unstacked: Mapping[int, Sequence[Any]]
) -> FlatState:
    """Return the state with the records of some unstacked leaves replaced.

    Args:
      records: where the state is stored.
      states: all leaves of the state.
      unstacked: new arrays in their tiers, by leaf index, in the order of `record_specs`.
    """
    for i, arrays in unstacked.items():
        num_opt = len(records.opt_records((i,)))
        params = list(states.params)
        params[i : i + 1] = arrays[num_opt:] or params[i : i + 1]
        states = records.replace(dataclasses.replace(states, params=params), (i,), arrays[:num_opt])
    return states


def without_unstacked(
    records: StateRecords, states: FlatState, unstacked: Sequence[int]
) -> FlatState:
    """Return the state without the records of some leaves.

    Their old arrays can then be freed before new ones are made.
    """
    return with_unstacked(
        records, states, {i: [None] * len(record_specs(records, (i,))) for i in unstacked}
    )


def _away(records: StateRecords, leaf_ids: Sequence[int]) -> list[int]:
    return [i for i in leaf_ids if records.params[i].is_away]


def kept_for_later(
    records: StateRecords,
    states: FlatState,
    leaf_ids: Sequence[int],
    layer: Array,
    weights: list[Array],
    opt: list[Array],
) -> tuple[FlatState, list[Array]]:
    """Return the state and the layer's updated record, which is stored later.

    Parameters stored on the device are written to the state right away.
    """
    params = [records.cast(i, w) for i, w in zip(leaf_ids, weights, strict=True)]
    if not _away(records, leaf_ids):
        # On the device they are written in place.
        states = records.write_params(states, leaf_ids, layer, params)
        params = []
    masters = [] if states.master is None else weights
    return states, [*masters, *opt, *params]


def update_piece(
    record: "LateRecord",
    transfer: "DuplexTransfer",
    result: "DuplexResult",
    index: int,
    grad: Array,
    update_rows: UpdateRows,
    states: FlatState,
) -> tuple[FlatState, list[Array]]:
    """Update a tick's piece of an unstacked leaf.

    Args:
      record: arrays that the tick loads.
      transfer: the tick's loads and stores; all turns have been taken.
      result: arrays that the turns loaded.
      index: index of the leaf.
      grad: gradient of the leaf, as `Pieces.split` returns it.
      update_rows: the optimizer's update of some rows.
      states: all leaves of the state.

    Returns:
      The states, and the arrays of the piece that a later tick stores.
    """
    records = record.records
    pieces = record.pieces[index]
    piece = record.piece(transfer.now.layer)
    loaded = transfer.loaded_piece(result, index)
    spec = records.params[index]
    num_opt = len(records.opt_records((index,)))
    if states.master is None:  # the parameter is the weight
        weight = loaded[num_opt] if spec.is_away else pieces.read(spec, states.params[index], piece)
        loaded = [weight, *loaded[:num_opt]]
    weight, opt = update_rows(pieces.read(records.grads[index], grad, piece), loaded)
    to_store = opt if states.master is None else [weight, *opt]
    param = records.cast(index, weight)
    if spec.is_away:
        return states, [*to_store, param]
    params = list(states.params)  # on the device it is written in place
    params[index] = pieces.write(spec, params[index], piece, param)
    return dataclasses.replace(states, params=params), to_store


def update_in_pieces(
    records: StateRecords,
    states: FlatState,
    index: int,
    grad: Array,
    update_rows: UpdateRows,
    pieces: Pieces,
    begin: Array,
) -> tuple[FlatState, Array]:
    """Update an unstacked leaf piece by piece.

    Args:
      records: where the state is stored.
      states: all leaves of the state.
      index: index of the leaf.
      grad: gradient of the leaf, sharded like its optimizer state.
      update_rows: the optimizer's update of some rows.
      pieces: how the leaf is cut.
      begin: i32[] zero, known when this update may begin.

    Returns:
      The states, and a zero that is known when this update is done.
    """
    record = LateRecord(records, (), {index: pieces})
    grads = pieces.split(grad)
    cut = _alone(records, with_pieces(records, states, record.pieces, Pieces.split), index)
    pending = record.empty(cut, 1)
    sizes = [a.size * a.dtype.itemsize for a in pending[0][: record.num_loaded(cut)]]
    num_groups = len(_turns(sizes))

    def tick(piece: Array, carry: Any, stored: bool = True) -> Any:
        states, pending, begin = carry
        now = _PieceTick(piece, piece - 1 if stored else None)
        transfer = DuplexTransfer(record, num_groups, now, pending, states)
        result = transfer.cross()
        states, updated = update_piece(
            record, transfer, result, index, grads, update_rows, transfer.finish_states(result)
        )
        return states, [*pending[1:], updated], begin

    def drain(piece: Array, carry: Any) -> Any:
        states, pending, begin = carry
        return *record.drain(states, pieces.count - 1, piece, pending), begin

    carry = one_trip(0, partial(tick, stored=False), (cut, pending, begin), records.mesh)
    carry = run_loop(1, pieces.count, tick, carry, records.mesh)
    cut, _, begin = one_trip(pieces.count - 1, drain, carry, records.mesh)
    cut = with_pieces(records, cut, record.pieces, Pieces.join)
    params = [*states.params[:index], cut.params[index], *states.params[index + 1 :]]
    opt = records.opt_states(cut, (index,))
    return records.replace(dataclasses.replace(states, params=params), (index,), opt), begin


def _alone(records: StateRecords, states: FlatState, index: int) -> FlatState:
    """Return the state with only one unstacked leaf: a loop should carry only what it changes."""

    def only(leaves: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        return [leaf if i in indices else None for i, leaf in enumerate(leaves)]

    return FlatState(
        params=only(states.params, [index]),
        master=None if states.master is None else only(states.master, [index]),
        opt=only(states.opt, records.opt_map.list_state_leaves((index,))),
    )


def with_pieces(
    records: StateRecords,
    states: FlatState,
    cut: Mapping[int, Pieces],
    change: Callable[[Pieces, Array], Array],
) -> FlatState:
    """Return the state with some leaves changed by `Pieces.split` or `Pieces.join`.

    Args:
      records: where the state is stored.
      states: all leaves of the state.
      cut: how each leaf is cut, by leaf index.
      change: `Pieces.split` or `Pieces.join`.
    """
    for i, pieces in cut.items():
        params = list(states.params)
        params[i] = change(pieces, params[i])
        opt = [change(pieces, a) for a in records.opt_states(states, (i,))]
        states = records.replace(dataclasses.replace(states, params=params), (i,), opt)
    return states
