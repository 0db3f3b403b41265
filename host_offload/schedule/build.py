"""Write a step as operations, and say what to change where it does not fit a budget of bytes.

A phase follows from the order in which it visits the layers, and from the kinds that it fetches,
reads and writes; only kinds off the device count. Everything else follows from the rule of the ring
(`host_offload.schedule.schedule`):

    takes       the layers visited whose record is off the device, in order
    slots       take number c empties slot c mod distance
    preload     the first `distance` takes, before tick 0
    fetch[t]    take t + distance, into the slot that take t has just emptied

What a tick does changes at few ticks: where the ring runs out, where layers begin whose state stays
on the device, and at both ends. Between them all indices are linear in the tick, so a phase is a
few loops however many layers it has.

Bytes in flight never fall as the distance grows, so the largest distance that fits a budget is
found by bisection.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from host_offload.schedule.ops import (
    END_PIECES,
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_ENDS,
    Loop,
    Op,
    Record,
    joined,
)
from host_offload.schedule.schedule import ON_DISK, SIZES, UPDATES, Phase, Schedule
from host_offload.tiers import TIERS


class HasPeak(Protocol):
    """A schedule or a step, with the most bytes that it has in flight on a device."""

    @property
    def peak_bytes(self) -> int: ...


class EndsMove(NamedTuple):
    """Leaves that are no stack of layers and are updated beside a phase whose stores are late.

    Attributes:
      leaves: HEAD, whose gradients are complete before backward: one record; HEAD_PIECES, others of
        the head, of which each of the first ticks updates a piece; LATE_ENDS, which are updated
        when the layers are: groups, one after the other; or END_PIECES, which are updated after
        those in pieces: leaves, one after the other.
      num_bytes: of each of them on one device: of all that an update loads and stores of a record,
        group or piece.
      counts: in how many pieces each is updated; of HEAD_PIECES all in as many.
      loaded: bytes of each that are loaded; by default those that are stored.
    """

    leaves: str
    num_bytes: tuple[int, ...]
    counts: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()


class EndLeaf(NamedTuple):
    """A leaf that is no stack of layers, or all such leaves together.

    Attributes:
      name: of its records: "params.<name>" and the like.
      tiers: by kind of "params", "frozen" and "opt_state", where it rests; the device where a kind
        is missing.
      sizes: bytes on one device, as `record_bytes` of `build_schedule`.
      frozen: it is not trained.
      num_pieces: in which the device updates it.
      is_beside: it is updated beside a phase whose stores are late (`EndsMove`).
    """

    name: str
    tiers: Mapping[str, str]
    sizes: Mapping[str, int]
    frozen: bool = False
    num_pieces: int = 1
    is_beside: bool = False


class HostUpdate(NamedTuple):
    """How callbacks update records on the host.

    Attributes:
      stashes: gradients wait on the host, from the tick of backward that makes them.
      is_delayed: they wait for the next step, and backward takes over what was made of those of the
        step before.
      takes_weights: weights on the device are their own masters, and go down with the gradients.
      gives_params: new parameters come up to the device.
    """

    stashes: bool = False
    is_delayed: bool = False
    takes_weights: bool = False
    gives_params: bool = True


def build_schedule(
    num_layers: int,
    distance: int = 0,
    *,
    tiers: Mapping[str, str] | None = None,
    update: str = "after_backward",
    gather_ahead: bool = False,
    master: bool = True,
    device_layers: int = 0,
    stores_late: int = 0,
    ends: Sequence[EndsMove] = (),
    host: HostUpdate | None = None,
    regathers: bool = False,
    record_bytes: Mapping[str, int] | None = None,
    budget_bytes: int | None = None,
    first_layer: int = 0,
) -> Schedule:
    """Build the schedule of a train step.

    Args:
      num_layers: equal layers of the stack.
      distance: ticks between the fetch of a record and its use; may exceed num_layers.
      tiers: kind -> tier, of KINDS and TIERS; kinds that are missing are on the device.
      update: when a layer's optimizer runs, "after_backward" or "in_backward".
      gather_ahead: take and gather the next layer while one computes; two layers are then whole at
        once.
      master: parameters have float32 masters, which rest and move with opt_state; without, an
        update reads the parameters.
      device_layers: opt_state of layers below this one stays on the device.
      stores_late: how many ticks after its update a record is stored by what updates, backward or
        update; at most num_layers.
      ends: leaves that are no stack of layers, updated beside a phase whose stores are late.
      host: how callbacks update records on the host; None: the device updates them.
      regathers: devices update shards of parameters that each of them has whole, and gather them
        after it.
      record_bytes: bytes of one layer on one device, by kind as they rest (params: its shard).
        Besides there are "gathered", its parameters whole; "derivative", its gradient whole, beside
        the shards; for an update on the host "handed", "weights" and "made"; and "<kind>_on_disk",
        what a record takes on the disk, by default as much as elsewhere. Others are 0.
      budget_bytes: the most bytes that may be in flight on a device.
      first_layer: number of the first layer in its stack, where these are a run of its layers.

    Raises:
      ValueError: impossible sizes, unknown names, or more bytes in flight than the budget. The
        message then gives the largest distance that fits, if possible with the same gather_ahead.
    """
    _check_int("num_layers", num_layers, 1)
    _check_int("distance", distance, 0)
    _check_int("first_layer", first_layer, 0)
    _check_int("stores_late", stores_late, 0, num_layers)
    _check_int("device_layers", device_layers, 0, first_layer + num_layers)
    _check_names("tiers", tiers or {}, KINDS)
    _check_names("ends", [move.leaves for move in ends], (HEAD, HEAD_PIECES, LATE_ENDS, END_PIECES))
    for move in ends:
        for count in move.counts:
            _check_int(
                f"counts of {move.leaves}",
                count,
                1,
                num_layers if move.leaves == HEAD_PIECES else None,
            )
    _check_names("record_bytes", record_bytes or {}, SIZES)
    for kind, tier in (tiers or {}).items():
        if tier not in TIERS:
            raise ValueError(f"tiers[{kind!r}]={tier!r}: known tiers are {', '.join(TIERS)}")
    if update not in UPDATES:
        raise ValueError(f"update={update!r}: 'after_backward' or 'in_backward' is needed")
    for kind, size in (record_bytes or {}).items():
        _check_int(f"record_bytes[{kind!r}]", size, 0)

    where = {kind: (tiers or {}).get(kind, "device") for kind in KINDS}
    sizes = {kind: 0 for kind in SIZES if not kind.endswith(ON_DISK)}
    size = None if record_bytes is None else MappingProxyType(sizes | dict(record_bytes))

    def build(distance: int, gather_ahead: bool) -> Schedule:
        writer = _Writer(
            range(first_layer, first_layer + num_layers),
            distance,
            where,
            update == "in_backward",
            gather_ahead,
            master,
            device_layers,
            stores_late,
            tuple(ends),
            host,
            regathers,
            size or {},
        )
        return Schedule(
            num_layers=num_layers,
            distance=distance,
            update=update,
            gather_ahead=gather_ahead,
            master=master,
            tiers=MappingProxyType(where),
            device_layers=device_layers,
            phases=writer.phases(),
            record_bytes=size,
            first_layer=first_layer,
        )

    schedule = build(distance, gather_ahead)
    if budget_bytes is not None:
        _check_int("budget_bytes", budget_bytes, 0)
        if record_bytes is None:
            raise ValueError(
                f"budget_bytes={budget_bytes} needs record_bytes, the bytes of one layer by kind"
            )
        if schedule.peak_bytes > budget_bytes:
            raise ValueError(
                f"budget_bytes={budget_bytes}: prefetch_distance={distance} with gather_ahead={gather_ahead} puts "
                f"{schedule.peak_bytes} bytes in flight on a device, {schedule.peak_bytes - budget_bytes} more; "
                + advise(build, distance, (True, False) if gather_ahead else (False,), budget_bytes)
            )
    return schedule


def advise(
    build: Callable[[int, bool], HasPeak],
    distance: int,
    gather_ahead: Sequence[bool],
    budget_bytes: int,
) -> str:
    """Return a change of the schedule that makes it fit a budget, as a clause for an error message.

    Args:
      build: builds the schedule of a prefetch distance and a `gather_ahead`.
      distance: the distance that does not fit.
      gather_ahead: choices in order of preference, the one that does not fit first.
      budget_bytes: most bytes in flight on a device.
    """
    for ahead in gather_ahead:
        fits = (
            bisect.bisect_right(
                range(distance + 1), budget_bytes, key=lambda d: build(d, ahead).peak_bytes
            )
            - 1
        )
        if fits >= 0:
            off = "" if ahead == gather_ahead[0] else f"gather_ahead={ahead} with "
            return f"{off}prefetch_distance={fits} fits, with {build(fits, ahead).peak_bytes} bytes"
    ahead = gather_ahead[-1]
    least = build(0, ahead).peak_bytes
    return (
        f"nothing fits: prefetch_distance=0 with gather_ahead={ahead} needs {least} bytes, "
        f"{least - budget_bytes} more"
    )


def build_ends(
    leaves: Sequence[EndLeaf],
    master: bool,
    host: HostUpdate | None = None,
    whole: Mapping[str, int] | None = None,
) -> dict[str, Phase]:
    """Return what a step does with unstacked leaves, as phases by name, in the order in which they
    run.

        embed           parameters are loaded, once a step, and gathered; the first layer's input
        head            the loss and its derivative
        embed_backward  the embedding's derivative, and the reduction of all these gradients
        ends            the update, unless it is beside another phase: leaf by leaf on the device, at once on the host

    Args:
      leaves: in the order in which they are loaded and updated.
      master: see `build_schedule`.
      host: how callbacks update records on the host; None: the device updates them.
      whole: bytes of the parameters of "embed" and "head" while they are gathered; 0 if they are
        not.
    """
    embed, ends, called = list[Op](), list[Loop](), list[Op]()
    for leaf in leaves:
        embed += _moved_of_end(leaf, ["frozen" if leaf.frozen else "params"], "fetch")
        if leaf.frozen or leaf.is_beside:
            continue
        needs, updated = [*([] if master else ["params"]), "opt_state"], ["params", "opt_state"]
        update = Op("update", Record("opt_state", leaf.name), 0, "compute")
        if host is None:
            loads, stores = (
                _moved_of_end(leaf, needs, "load"),
                _moved_of_end(leaf, updated, "store"),
            )
            made = sum(op.num_bytes for op in stores if op.verb == "store")
            ends += _in_pieces(
                [*loads, update._replace(num_bytes=made)],
                stores,
                leaf.num_pieces,
                ends[-1].stop if ends else 0,
            )
            continue
        called += _called_of_end(leaf, host, needs, updated)
    size = whole or {}
    gathers, computes = dict[str, Op](), dict[str, Op]()
    for name in ("embed", "head"):
        gathers[name] = Op("gather", Record("gathered", name), 0, "network", size.get(name, 0))
        computes[name] = Op("compute", Record("layer", name), 0, "compute")
    reduce = Op("reduce", Record("grads", "ends"), 0, "network")
    ops = {
        "embed": [*embed, gathers["embed"], computes["embed"]],
        # The head is gathered a second time for its derivative.
        "head": [gathers["head"], gathers["head"], computes["head"]],
        "embed_backward": [gathers["embed"], computes["embed"], reduce],
    }
    phases = {
        name: Phase(name=name, loops=(Loop(0, 1, 1, tuple(each)),)) for name, each in ops.items()
    }
    return phases | {
        "ends": Phase(name="ends", loops=(Loop(0, 1, 1, tuple(called)),) if host else tuple(ends))
    }


def _called_of_end(
    leaf: EndLeaf, host: HostUpdate, needs: Sequence[str], updated: Sequence[str]
) -> list[Op]:
    """Return what callbacks do to update a leaf on the host, which needs and writes records of some
    kinds.
    """

    def op(verb: str, kind: str, lane: str, lag: int = 0) -> Op:
        return Op(verb, Record(kind, leaf.name), 0, lane, _size_in(lane, kind, leaf.sizes), lag)

    on_disk = [kind for kind in updated if leaf.tiers.get(kind) == "nvme"]
    handed = [op("store", "handed", "down")]
    if host.takes_weights:
        handed.append(op("store", "weights", "down"))
    update = Op(
        "host_update", Record("opt_state", leaf.name), 0, "host", 0, -1 if host.is_delayed else 0
    )
    made = [op("load", "made", "up")] if host.gives_params else []
    if host.is_delayed:
        return [*handed, update, *made]
    reads = [op("host_read", kind, "read") for kind in needs if kind in on_disk]
    writes = [op("host_write", kind, "write") for kind in on_disk]
    return [*handed, *reads, update, *writes, *made]


def _size_in(lane: str, kind: str, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a record in a lane: on the disk it has a size of its own."""
    size = sizes.get(kind, 0)
    return sizes.get(kind + ON_DISK, size) if lane in ("read", "write") else size


def _moved_of_end(leaf: EndLeaf, kinds: Sequence[str], verb: str) -> list[Op]:
    """Return the operations that load a leaf's records of some kinds, or store them."""
    ops = list[Op]()
    for kind in (kind for kind in kinds if leaf.tiers.get(kind, "device") != "device"):
        record = Record(kind, leaf.name)
        lane, disk = ("down", "write") if verb == "store" else ("up", "read")
        both = [Op(verb, record, 0, lane, leaf.sizes[kind])]
        if leaf.tiers[kind] == "nvme":
            both.append(Op(disk, record, 0, disk, _size_in(disk, kind, leaf.sizes)))
        ops += both if verb == "store" else both[::-1]
    return ops


def _in_pieces(loads: Sequence[Op], stores: Sequence[Op], count: int, tick: int) -> Iterator[Loop]:
    """Yield loops that update a leaf: as one, or in pieces of which each is stored while the next
    one is loaded.
    """
    if count == 1:
        yield Loop(tick, 1, 1, (*loads, *stores))
        return
    first, last = (
        [op._replace(num_bytes=op.num_bytes // count) for op in ops] for ops in (loads, stores)
    )
    last = [op._replace(lag=1) for op in last]
    yield Loop(tick, 1, 1, tuple(first))
    yield Loop(tick + 1, count - 1, 1, (*(op._replace(number=1) for op in first), *last))
    yield Loop(tick + count, 1, 1, tuple(op._replace(number=count - 1) for op in last))


@dataclasses.dataclass(frozen=True)
class _Pass:
    """How a phase visits the layers, and what it does with their records.

    Attributes:
      name: of the phase.
      order: the layers, in the order in which they are visited.
      fetches: kinds that it reads ahead.
      reads: kinds that it reads in the tick that uses them.
      writes: kinds that it writes.
    """

    name: str
    order: tuple[range, ...]
    fetches: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def layer(self, tick: int) -> int:
        """Return the layer of a tick."""
        first = self.order[0]
        return first[tick] if tick < len(first) else self.order[1][tick - len(first)]


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Writes the phases of a schedule; the attributes are the arguments of `build_schedule`."""

    layers: range
    distance: int
    tiers: Mapping[str, str]
    in_backward: bool
    gather_ahead: bool
    master: bool
    device_layers: int
    stores_late: int
    ends: tuple[EndsMove, ...]
    host: HostUpdate | None
    regathers: bool
    sizes: Mapping[str, int]

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases, in the order in which they run."""
        return tuple(
            Phase(
                name=each.name,
                loops=joined(self._loops(each)),
                device_layers=self.device_layers,
                first_layer=self.layers.start,
            )
            for each in self._passes()
        )

    def _passes(self) -> list[_Pass]:
        upward, downward, away, host = (self.layers,), (self.layers[::-1],), self._away, self.host
        forward = _Pass("forward", upward, away("params", "frozen"), (), away("activations"))
        # Callbacks write what they update where it rests: but for parameters, that is no business
        # of the device.
        updates, taken = (
            away("params") if host else away("opt_state", "params"),
            away("params", "frozen", "activations"),
        )
        if self.in_backward:
            return [
                forward,
                _Pass("backward", downward, taken, () if host else away("opt_state"), updates),
            ]
        backward = _Pass("backward", downward, taken, (), () if host else away("grads"))
        if host and host.is_delayed:
            return [forward, backward]
        needs = () if host else away("grads", "opt_state", *([] if self.master else ["params"]))
        if self.stores_late:
            # A record is loaded in the tick that updates it, while the one before it is stored:
            # nothing else is waited for.
            return [forward, backward, _Pass("update", upward, (), needs, updates)]
        # Rolled: the layers whose state is on the device come last, so that fetches begin with the
        # first tick.
        split = max(0, self.device_layers - self.layers.start)
        order = tuple(part for part in (self.layers[split:], self.layers[:split]) if part)
        return [forward, backward, _Pass("update", order, needs, (), updates)]

    # --- which kinds move -------------------------------------------------------------------------

    def _away(self, *kinds: str) -> tuple[str, ...]:
        """Return those of some kinds that rest off the device for some layer."""
        return tuple(self._off(kinds, self.layers.stop - 1))

    def _off(self, kinds: Iterable[str], layer: int) -> list[str]:
        """Return those of some kinds of which a layer's record is off the device: all, but
        opt_state of the first layers.
        """
        moving = [kind for kind in kinds if self.tiers[kind] != "device"]
        return [kind for kind in moving if kind != "opt_state" or layer >= self.device_layers]

    def _num_takes(self, each: _Pass, is_ahead: bool) -> int:
        """Return how many ticks take a record that is off the device: the first ones."""
        if set(each.fetches) <= {"opt_state"}:
            return len(self.layers[max(0, self.device_layers - self.layers.start) :]) * len(
                each.fetches
            )
        return len(self.layers) - is_ahead

    # --- loops ------------------------------------------------------------------------------------

    def _loops(self, each: _Pass) -> Iterator[Loop]:
        """Yield the loops of a phase; those that go on as one are joined by the caller."""
        num_ticks, step, distance = len(self.layers), each.order[0].step, self.distance
        is_ahead = self.gather_ahead and each.name != "update"
        num_takes = self._num_takes(each, is_ahead)
        num_slots = min(distance, num_takes)
        if is_ahead:
            first = each.layer(0)
            ops = [
                *self._loads("fetch", each.fetches, first, -num_slots - 1),
                self._op("gather", "gathered", first, "network"),
            ]
            yield Loop(-num_slots - 1, 1, step, tuple(ops))
        for n in range(num_slots):
            ops = self._loads(
                "fetch", each.fetches, each.layer(n + is_ahead), -num_slots - is_ahead
            )
            yield Loop(n - num_slots, 1, step, tuple(ops))
        lag = self._lag(each)
        ends = [move for move in self.ends if lag]
        for move in ends:
            if move.leaves == HEAD:
                yield Loop(-1, 1, step, tuple(self._update_of_ends(move, 0, makes=False)))
        # What a tick does changes here: in its own layer, in the one that it gathers, and in the
        # one that it fetches.
        borders, ahead = {len(each.order[0]), self._first_on_device(each)}, distance + is_ahead
        turns = {turn - n for turn in borders for n in (0, is_ahead, ahead)} | {
            num_takes - distance
        }
        turns |= {num_ticks - 1} if is_ahead else set()
        turns |= {lag, *(turn + lag for turn in borders)} if lag else set()
        turns |= {1} if any(move.leaves == HEAD for move in ends) else set()
        turns |= {
            n
            for move in ends
            if move.leaves == HEAD_PIECES
            for n in (move.counts[0], move.counts[0] + lag)
        }
        cuts = sorted({0, num_ticks} | {tick for tick in turns if 0 < tick < num_ticks})
        for start, stop in itertools.pairwise(cuts):
            yield Loop(
                start, stop - start, step, tuple(self._tick(each, start, num_takes, is_ahead, ends))
            )
        if lag:
            yield from self._drain(each, lag, ends, num_ticks, step)

    def _first_on_device(self, each: _Pass) -> int:
        """Return the first tick whose layer's state rests in another tier than that of the tick
        before it.
        """
        num = max(0, self.device_layers - self.layers.start)
        return num if each.order[0].step == 1 else len(self.layers) - num

    def _lag(self, each: _Pass) -> int:
        """Return how many ticks after its update a phase stores a record; 0 if it stores none late."""
        is_updating = each.name == ("backward" if self.in_backward else "update") and bool(
            each.writes
        )
        return self.stores_late if is_updating else 0

    def _tick(
        self, each: _Pass, tick: int, num_takes: int, is_ahead: bool, ends: Sequence[EndsMove]
    ) -> list[Op]:
        """Return the operations of a tick, in order."""
        layer, lag, take = each.layer(tick), self._lag(each), tick + is_ahead
        ops = list[Op]()
        if tick + self.distance < num_takes:
            ahead = self.distance + is_ahead
            ops += self._loads("fetch", each.fetches, each.layer(tick + ahead), -ahead)
        if each.name != "update" and take < len(self.layers):
            ops.append(self._op("gather", "gathered", each.layer(take), "network", -is_ahead))
        ops += self._loads("load", each.reads, layer, 0)
        made = 0 if lag else sum(self._size(kind) for kind in self._off(each.writes, layer))
        if each.name == "forward":
            ops.append(
                Op(
                    "compute",
                    Record("layer"),
                    layer,
                    "compute",
                    self._kept_ahead(each, is_ahead) + made,
                )
            )
        if each.name == "backward":
            derivative = self._kept_ahead(each, is_ahead) + self._size("derivative")
            ops.append(Op("compute", Record("layer"), layer, "compute", derivative))
            ops.append(self._op("reduce", "grads", layer, "network"))
            if self.in_backward and not self.host:
                ops.append(Op("update", Record("opt_state"), layer, "compute", made))
        if each.name == "update" and not self.host:
            ops.append(Op("update", Record("opt_state"), layer, "compute", made))
        if self.regathers and (
            each.name == "update" or (each.name == "backward" and self.in_backward)
        ):
            ops.append(self._op("gather", "params", layer, "network"))
        if self.host and each.name != "forward":
            ops += self._called(each, layer, self.host)
        elif tick >= lag:
            ops += self._stores(each, each.layer(tick - lag), lag)
        for move in ends:
            if move.leaves == HEAD and tick == 0:
                ops.append(self._store_of_ends(move, 0))
            if move.leaves == HEAD_PIECES:
                piece = move.counts[0] - 1 - tick  # the last one first, as layers
                ops += self._update_of_ends(move, piece, makes=False) if piece >= 0 else []
                ops += self._piece_stored(move, tick, lag)
        return ops

    def _piece_stored(self, move: EndsMove, tick: int, lag: int) -> list[Op]:
        """Return the store of the piece of the head that was updated `lag` ticks before, if there
        is one.
        """
        piece = move.counts[0] - 1 - (tick - lag)
        return [self._store_of_ends(move, piece, lag)] if 0 <= piece < move.counts[0] else []

    def _kept_ahead(self, each: _Pass, is_ahead: bool) -> int:
        """Return the bytes that a layer which was gathered a tick ago still has: whole, and what
        its gather has not used up.
        """
        used = ["activations"] if self.master or not self.in_backward else ["activations", "params"]
        if not is_ahead:
            return 0
        return self._size("gathered") + sum(
            self._size(kind) for kind in each.fetches if kind in used and each.name != "forward"
        )

    def _called(self, each: _Pass, layer: int, host: HostUpdate) -> list[Op]:
        """Return what callbacks of an update on the host do in a tick of backward or update."""
        updating = each.name == ("backward" if self.in_backward or host.is_delayed else "update")
        hands = updating if not host.stashes else each.name == "backward"
        ops, on_disk = list[Op](), [kind for kind, tier in self.tiers.items() if tier == "nvme"]
        if hands:
            ops.append(self._op("store", "handed", layer, "down"))
            if host.stashes and "grads" in on_disk:
                ops.append(self._op("host_write", "grads", layer, "write"))
        if not updating:
            return ops
        if host.takes_weights:
            ops.append(self._op("store", "weights", layer, "down"))
        if host.is_delayed:
            ops.append(Op("host_update", Record("opt_state"), layer, "host", 0, -len(self.layers)))
        else:
            # Without masters the parameters are what is updated.
            needs = (
                ["grads"] * host.stashes
                + ["params"] * (not self.master)
                + self._off(["opt_state"], layer)
            )
            ops += [self._op("host_read", kind, layer, "read") for kind in needs if kind in on_disk]
            ops.append(Op("host_update", Record("opt_state"), layer, "host"))
            ops += [
                Op("store", Record(kind), layer, "host") for kind in self._off(each.writes, layer)
            ]
            writes = self._off(["params", "opt_state"], layer)
            ops += [
                self._op("host_write", kind, layer, "write") for kind in writes if kind in on_disk
            ]
        if host.gives_params:
            ops.append(self._op("load", "made", layer, "up"))
        return ops

    # --- leaves that are no stack of layers -------------------------------------------------------

    def _update_of_ends(self, move: EndsMove, number: int, makes: bool) -> list[Op]:
        """Return the load and the update of a record, group or piece; `makes`: beside what was
        loaded.
        """
        n = number if len(move.num_bytes) > 1 else 0
        record, size = Record("opt_state", move.leaves), move.num_bytes[n]
        loaded = move.loaded[n] if move.loaded else size
        return [
            Op("load", record, number, "up", loaded),
            Op("update", record, number, "compute", size if makes else 0),
        ]

    def _store_of_ends(self, move: EndsMove, number: int, lag: int = 1) -> Op:
        size = move.num_bytes[number if len(move.num_bytes) > 1 else 0]
        return Op("store", Record("opt_state", move.leaves), number, "down", size, lag)

    def _drain(
        self, each: _Pass, lag: int, ends: Sequence[EndsMove], num_ticks: int, step: int
    ) -> Iterator[Loop]:
        """Yield the loops after the last layer: they store the records of the last `lag` layers."""
        pieces = [move for move in ends if move.leaves == HEAD_PIECES]
        pending = list[Op]()
        tick = num_ticks
        for late in range(num_ticks, num_ticks + lag):
            if pending:
                yield Loop(tick, 1, step, tuple(pending))
                tick += 1
            pending = self._stores(each, each.layer(late - lag), lag)
            for move in pieces:
                pending += self._piece_stored(move, late, lag)
        for move in (move for move in ends if move.leaves == LATE_ENDS):
            for n in range(len(move.num_bytes)):
                yield Loop(tick, 1, step, (*pending, *self._update_of_ends(move, n, makes=True)))
                pending, tick = [self._store_of_ends(move, n)], tick + 1
        if pending:
            yield Loop(tick, 1, step, tuple(pending))
            tick += 1
        for move in (move for move in ends if move.leaves == END_PIECES):
            for n, count in enumerate(move.counts):
                load, store = (
                    self._update_of_ends(move, n, makes=True),
                    self._store_of_ends(move, n),
                )
                # `num_bytes` is of a piece.
                whole = [
                    op._replace(number=0, num_bytes=count * op.num_bytes) for op in (*load, store)
                ]
                yield from _in_pieces(whole[:-1], whole[-1:], count, tick)
                tick += count + 1

    # --- single operations ------------------------------------------------------------------------

    def _size(self, kind: str) -> int:
        return self.sizes.get(kind, 0)

    def _op(self, verb: str, kind: str, layer: int, lane: str, lag: int = 0) -> Op:
        return Op(verb, Record(kind), layer, lane, _size_in(lane, kind, self.sizes), lag)

    def _loads(self, verb: str, kinds: Sequence[str], layer: int, lag: int) -> list[Op]:
        """Return what brings a record to the device, by "fetch" or "load": off the disk first,
        where it rests there.
        """
        ops = list[Op]()
        for kind in self._off(kinds, layer):
            ops += (
                [self._op("read", kind, layer, "read", lag)] if self.tiers[kind] == "nvme" else []
            )
            ops.append(self._op(verb, kind, layer, "up", lag))
        return ops

    def _stores(self, each: _Pass, layer: int, lag: int = 0) -> list[Op]:
        """Return what takes a record off the device, and to the disk where it rests there."""
        ops = list[Op]()
        for kind in self._off(each.writes, layer):
            ops.append(self._op("store", kind, layer, "down", lag))
            ops += (
                [self._op("write", kind, layer, "write", lag)] if self.tiers[kind] == "nvme" else []
            )
        return ops


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}={value!r}: an int is needed")
    if value < least or (most is not None and value > most):
        raise ValueError(
            f"{name}={value}: {least} or more is needed"
            if most is None
            else f"{name}={value}: {least} to {most}"
        )


def _check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(known), key=str):
        raise ValueError(
            f"{what} has {', '.join(map(repr, unknown))}: known are {', '.join(known)}"
        )
