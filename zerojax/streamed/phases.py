"""One phase of a streamed step: a loop over ticks, with a ring of records in flight."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from host_offload.device import one_trip, run_loop
from host_offload.schedule import HEAD, HEAD_PIECES, LAYERS, Loop, Op, Phase
from zerojax.ordering import adds_order
from zerojax.state import (
    Index,
    OnDevice,
)

Array = jax.Array
Fetch = Callable[[Any, Any], list[Array]]
"""Fetches a record ahead: (carry, i32[] number of the record) -> its arrays.

With `device_records` in `run_phase`, the number of some layers is an `OnDevice`.
"""
Drain = Callable[[int, Array, Any], Any]
"""Stores a record after a phase's last tick: (layer as int, layer as i32[], carry) -> carry."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """One tick, as its body sees it.

    Attributes:
      layer: i32[], the layer computed; in an update, the record updated; in a loop over tiles, the
        tile.
      consume: i32[], the layer whose record is taken; only valid if `takes_record`.
      record: the record taken out of the ring, or None if nothing was fetched ahead.
      in_flight: the record in flight, or None; a tick returns it.
      takes_record: whether a record is taken in this tick.
      on_device: whether the layer's optimizer state stays on the device.
      takes_on_device: whether the optimizer state of the layer whose record is taken does.
      writes_after_fetch: whether the phase writes the stacks that it fetches from, so that the
        tick's writes wait for `in_flight`.
      fetch: i32[], the layer whose record the tick fetches itself, if records are stored late or
        while another is loaded; else None.
      stored: i32[], the layer that an earlier tick updated and this tick stores
        (`Phase.stores_late`); else None.
      stores_unstacked: whether the tick stores the records of unstacked leaves whose gradients the
        head completed.
      loads_pieces: whether the tick loads and updates one piece of the larger leaves of the head.
      stores_pieces: whether the tick stores the piece that the same earlier tick updated.
    """

    layer: Any
    consume: Array
    record: list[Array] | None
    in_flight: list[Array] | None
    takes_record: bool
    on_device: bool
    takes_on_device: bool = False
    writes_after_fetch: bool = False
    fetch: Array | None = None
    stored: Array | None = None
    stores_unstacked: bool = False
    loads_pieces: bool = False
    stores_pieces: bool = False

    def index(self, index_of: Callable[[Any], Index] = lambda layer: layer) -> Index:
        """Return the index of the record in stacks of optimizer state.

        Args:
          index_of: maps the number of a layer or tile to its index in stacks that are off the
            device.
        """
        return OnDevice(self.layer) if self.on_device else index_of(self.layer)

    @property
    def taken(self) -> Index:
        """The index of the layer whose record is taken; only valid if `takes_record`."""
        return OnDevice(self.consume) if self.takes_on_device else self.consume


RunTick = Callable[[Any, Tick], tuple[Any, list[Array] | None]]
"""Computes a tick: (carry, tick) -> (carry, record in flight or None)."""


def run_phase(
    phase: Phase,
    begin: Array,
    carry: Any,
    tick: RunTick,
    *,
    mesh: Mesh,
    slices_host: bool,
    fetch: Fetch,
    device_layers: int = 0,
    device_records: bool = False,
    drain: Drain | None = None,
    drains_last: bool = True,
    tick_fetches: bool = False,
) -> Any:
    """Run the ticks of a phase as loops.

    Consecutive ticks with the same operations (fetch or not, take or not) run in one loop, so that
    no record is fetched in vain. A single tick is also a loop, of one iteration, that XLA does not
    inline. Otherwise XLA would start its gathers and fetches at the top of the program.

    Args:
      phase: the operations, which decide what is compiled.
      begin: i32[] zero, known when the phase may begin (`wait_for`).
      carry: value that the ticks pass on.
      tick: `tick(carry, now) -> (carry, in_flight)`. It may tie `now.in_flight` to an operation
        (`beside`): the transfer then ends before that operation and overlaps earlier ones.
      mesh: the device mesh.
      slices_host: whether records are slices of host memory (`StateRecords.slices_host`).
      fetch: `fetch(carry, layer) -> record`, the arrays that are fetched ahead.
      device_layers: number of layers whose optimizer state stays on the device.
      device_records: whether `fetch` is given the number of such a layer as an `OnDevice`.
      drain: `drain(number, layer, carry) -> carry`, called after the last tick if records are
        stored late; it stores the record of a layer, given as an int and as an i32[].
      drains_last: whether the last record is stored here too; otherwise the caller stores it.
      tick_fetches: whether the ticks fetch the records that fill the ring themselves, as they do
        if records are stored late.

    Returns:
      The final carry.
    """
    ring = None
    ring_on_device = device_layers if device_records else 0
    if len(phase.preload):
        ring = _fetch_all(
            phase.preload.tolist(),
            begin,
            functools.partial(fetch, carry),
            mesh,
            slices_host,
            ring_on_device,
        )
    # No index orders the loops after the values that `begin` waits for, so the carried values do.
    carry, ring, begin = jax.lax.optimization_barrier((carry, ring, begin))
    added = _added(begin, mesh, slices_host)
    for loop in _tick_loops(phase, device_layers, ring_on_device):
        body = functools.partial(
            _run_tick, phase, loop, added, tick, fetch, tick_fetches or bool(phase.stores_late)
        )
        carry, ring = run_loop(loop.start, loop.stop, body, (carry, ring), mesh)
    for layer in phase.drain.tolist()[: None if drains_last else -1]:
        assert drain is not None
        carry = one_trip(layer, functools.partial(drain, layer), carry, mesh)
    return carry


def _run_tick(
    phase: Phase,
    loop: "_TickLoop",
    added: Array | None,
    tick: RunTick,
    fetch: Fetch,
    tick_fetches: bool,
    t: Array,
    state: tuple[Any, list[Array] | None],
) -> tuple[Any, list[Array] | None]:
    """Run one tick of a loop: start its fetch, take a record out of the ring, and compute.

    Args:
      phase: the phase.
      loop: the loop that has the tick.
      added: number that is added to record numbers (`_added`), or None.
      tick: the tick's computation, as in `run_phase`.
      fetch: fetches a record, as in `run_phase`.
      tick_fetches: whether the tick fetches the record that fills the ring itself.
      t: i32[], number of the tick.
      state: the ticks' carry, and the ring.

    Returns:
      The carry and the ring after the tick.
    """
    carry, ring = state
    kind = loop.kind
    num_slots = len(phase.preload)
    index = functools.partial(loop.index, t=t, added=added)
    layer = index("layer")
    consume = index("consume") if kind.takes else layer
    record = None
    in_flight = None
    writes_after_fetch = False
    fetched = None
    # Record number n of the ring is in slot n mod d. The record that a tick fetches fills the slot
    # that the tick takes from.
    take = t - jnp.int32(phase.first_take) if phase.first_take else t
    slot = jax.lax.rem(take, jnp.int32(max(1, num_slots)))
    if kind.takes and kind.from_ring:
        assert ring is not None
        record = _take_slot(ring, slot, num_slots)
    if kind.fetches and ring is not None and tick_fetches:
        fetched = index("fetch")
    elif kind.fetches and ring is not None:
        number = index("fetch")
        in_flight = fetch(carry, OnDevice(number) if kind.fetches_on_device else number)
        # A stack may be read and written in one tick. Unless the write waits for the read, XLA
        # copies the stack.
        writes_after_fetch = bool(set(phase.fetches) & set(phase.writes))
    # Without a ring, a record is fetched in the tick that takes it.
    elif kind.fetches:
        record = fetch(carry, OnDevice(consume) if kind.fetches_on_device else consume)
    stored = index("store") if phase.stores_late and kind.stores else None
    now = Tick(
        layer,
        consume,
        record,
        in_flight,
        kind.takes,
        kind.on_device,
        kind.takes_on_device,
        writes_after_fetch,
        fetched,
        stored,
        kind.stores_unstacked,
        kind.loads_pieces,
        kind.stores_pieces,
    )
    carry, landed = tick(carry, now)
    if landed is not None:
        # The record was taken out of this slot before.
        ring = _fill_slot(ring or [], landed, slot, num_slots)
    return carry, ring


def _take_slot(ring: list[Array], slot: Array, num_slots: int) -> list[Array]:
    """Return the record in a slot of the ring; a single slot is carried without a slot dim."""
    if num_slots == 1:
        return ring
    return [jax.lax.dynamic_index_in_dim(slots, slot, 0, keepdims=False) for slots in ring]


def _fill_slot(ring: list[Array], record: list[Array], slot: Array, num_slots: int) -> list[Array]:
    """Return the ring with `record` in a slot; a single slot is carried without a slot dim."""
    if num_slots == 1:
        return record
    return [
        jax.lax.dynamic_update_index_in_dim(slots, value, slot, 0)
        for slots, value in zip(ring, record, strict=True)
    ]


def fetch_first(
    phase: Phase,
    begin: Array,
    fetch: Callable[[Any], list[Array]],
    mesh: Mesh,
    slices_host: bool,
    device_layers: int = 0,
) -> list[Array]:
    """Fetch the record of `phase.first`, which is taken before the phase's ticks.

    `fetch` is given the number of a layer below `device_layers` as an `OnDevice`.
    """
    return _fetch_all([phase.first], begin, fetch, mesh, slices_host, device_layers)


def _fetch_all(
    layers: Sequence[int],
    begin: Array,
    fetch: Callable[[Any], list[Array]],
    mesh: Mesh,
    slices_host: bool,
    device_layers: int = 0,
) -> list[Array]:
    """Fetch the records of `layers`; the number of one below `device_layers` is an `OnDevice`.

    Returns [num, ...] of each leaf, or the record itself for a single layer.

    On GPUs, loops fetch the records, so that copy engines move them. XLA for CPUs would copy a
    stack that such a loop reads and a later loop writes, so on CPUs each record is fetched outside
    of a loop.
    """
    single = len(layers) == 1

    def index(layer: int, number: Array) -> Index:
        return OnDevice(number) if layer < device_layers else number

    if adds_order(mesh):
        records = [fetch(index(layer, jnp.int32(layer) + begin)) for layer in layers]
        if single:
            return records[0]
        return [jnp.stack(leaves) for leaves in zip(*records, strict=True)]

    def fetch_into(n: Array, ring: list[Array], start: int, step: int) -> list[Array]:
        number = _linear(layers[start], step, start, n, added)
        record = fetch(index(layers[start], number))
        if single:
            return record
        return _fill_slot(ring, record, n, len(layers))

    lead = () if single else (len(layers),)
    shapes = jax.eval_shape(fetch, jax.ShapeDtypeStruct((), jnp.int32))
    ring = [jnp.zeros((*lead, *a.shape), a.dtype) for a in shapes]
    # The loops start when `begin` is known, not at the top of the program.
    ring, begin = jax.lax.optimization_barrier((ring, begin))
    added = _added(begin, mesh, slices_host)
    num_on_device = sum(layer < device_layers for layer in layers)
    for progression in _progressions(layers, num_on_device):
        start = progression.start
        body = functools.partial(fetch_into, start=start, step=progression.step)
        ring = run_loop(start, progression.stop, body, ring, mesh)
    return ring


class _Progression(NamedTuple):
    """Consecutive numbers of a sequence, each `step` after the previous one.

    Attributes:
      start: position of the first number in the sequence.
      stop: position after the last number.
      step: difference between consecutive numbers.
    """

    start: int
    stop: int
    step: int


def _progressions(numbers: Sequence[int], border: int = 0) -> list[_Progression]:
    """Split a sequence into the fewest arithmetic progressions, none of which crosses `border`."""
    progressions = list[_Progression]()
    start = 0
    while start < len(numbers):
        stop = start + 1
        end = border if start < border else len(numbers)
        step = numbers[stop] - numbers[start] if stop < end else 1
        while stop < end and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        progressions.append(_Progression(start, stop, step))
        start = stop
    return progressions


def _added(begin: Array, mesh: Mesh, slices_host: bool) -> Array | None:
    """Return `begin` if it is added to record numbers, or None if they use the loop counter alone.

    For copy engines to move records in host memory, XLA for GPUs has to know the records'
    addresses. In all other cases `begin` is added. On CPUs it keeps the order of loops. On GPUs it
    hides the address: XLA would copy records out of stacks on the device at known addresses and
    keep the copies. With these copies, a step of 4 layers that updates in backward takes 17 % more
    bytes.
    """
    return begin if adds_order(mesh) or not slices_host else None


def _linear(first: int, step: int, start: int, t: Array, added: Array | None) -> Array:
    """Return the record number of tick t: `first` in tick `start`, `step` more in each tick."""
    number = jnp.int32(first - step * start) + jnp.int32(step) * t
    return number if added is None else number + added


@dataclasses.dataclass(frozen=True)
class _TickKind:
    """Properties that the ticks of one loop share.

    Attributes:
      fetches: whether a record is fetched.
      takes: whether a record is taken.
      from_ring: whether the record taken was fetched in an earlier tick.
      on_device: whether the layer's optimizer state stays on the device.
      takes_on_device: whether the optimizer state of the layer whose record is taken does.
      fetches_on_device: whether the fetched layer's number is given to `fetch` as an `OnDevice`.
      stores: whether a record is stored.
      stores_unstacked: whether the leaves that the head completed are stored.
      loads_pieces: whether one piece of the larger leaves of the head is loaded and updated.
      stores_pieces: whether a piece that an earlier tick updated is stored.
    """

    fetches: bool
    takes: bool
    from_ring: bool
    on_device: bool
    takes_on_device: bool
    fetches_on_device: bool
    stores: bool
    stores_unstacked: bool
    loads_pieces: bool
    stores_pieces: bool


@dataclasses.dataclass(frozen=True)
class _TickLoop:
    """A loop that is compiled.

    Attributes:
      kind: properties that its ticks share.
      start: the first tick.
      stop: the tick after the last one.
      step: difference between the numbers of consecutive ticks.
      numbers: numbers of the first tick: the "layer" computed and, if present, the layer taken
        ("consume"), fetched ("fetch") and stored late ("store").
    """

    kind: _TickKind
    start: int
    stop: int
    step: int
    numbers: Mapping[str, int]

    def index(self, name: str, t: Array, added: Array | None) -> Array:
        """Return one of the numbers in tick t; see `_added`."""
        return _linear(self.numbers[name], self.step, self.start, t, added)

    def goes_on_in(self, following: "_TickLoop") -> bool:
        """Return whether `following` continues this loop with the next ticks and layers."""
        advance = self.step * (self.stop - self.start)
        numbers = {name: number + advance for name, number in self.numbers.items()}
        return (
            following.kind == self.kind
            and following.start == self.stop
            and following.step == self.step
            and following.numbers == numbers
        )


def _tick_loops(phase: Phase, device_layers: int, ring_on_device: int = 0) -> list[_TickLoop]:
    """Return the loops to compile: the phase's loops, with equal consecutive loops merged.

    Args:
      phase: the phase.
      device_layers: number of layers whose optimizer state stays on the device.
      ring_on_device: number of these layers that are fetched as `OnDevice`.
    """
    loops = list[_TickLoop]()
    for loop in phase.main:
        start = loop.start
        ops = loop.ops
        # A pass that takes records of optimizer state updates the layers that it takes; others
        # update the layers that they compute.
        takes_on_device = _is_below(ring_on_device, phase.consume, loop)
        on_device = (
            takes_on_device if ring_on_device else _is_below(device_layers, phase.layer, loop)
        )
        kind = _TickKind(
            fetches=any(op.verb == "fetch" for op in ops),
            takes=int(phase.consume[start]) >= 0,
            from_ring=int(phase.use_slot[start]) >= 0,
            on_device=on_device,
            takes_on_device=takes_on_device,
            fetches_on_device=_is_below(ring_on_device, phase.fetch, loop),
            # If records are not stored late, each tick of a phase stores one, or the record is on
            # the device together with its state.
            stores=not phase.stores_late or any(_moves(op, LAYERS, "store") for op in ops),
            stores_unstacked=any(_moves(op, HEAD, "store") for op in ops),
            loads_pieces=any(_moves(op, HEAD_PIECES, "load") for op in ops),
            stores_pieces=any(_moves(op, HEAD_PIECES, "store") for op in ops),
        )
        columns = {"layer": phase.layer, "consume": phase.consume, "fetch": phase.fetch}
        if phase.stores_late:
            columns["store"] = phase.store
        numbers = {name: int(c[start]) for name, c in columns.items() if c[start] >= 0}
        tick_loop = _TickLoop(kind, start, loop.stop, loop.step, numbers)
        if loops and loops[-1].goes_on_in(tick_loop):
            loops[-1] = dataclasses.replace(loops[-1], stop=loop.stop)
        else:
            loops.append(tick_loop)
    return loops


def _is_below(device_layers: int, layers: np.ndarray, loop: Loop) -> bool:
    """Return whether a loop's layers are below `device_layers`; -1 is no layer."""
    first, last = (0 <= int(layers[tick]) < device_layers for tick in (loop.start, loop.stop - 1))
    assert first == last
    return first


def _moves(op: Op, leaves: str, verb: str) -> bool:
    return (op.record.leaves, op.verb) == (leaves, verb)
