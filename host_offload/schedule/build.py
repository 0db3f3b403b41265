"""Write a step as operations, and suggest a change if it exceeds a budget of bytes.

A phase follows from the order in which it visits the layers, and from the kinds that it fetches,
reads and writes; only kinds off the device count. The rule of the ring gives the rest
(`host_offload.schedule.schedule`):

    takes       the visited layers whose record is off the device, in order
    slots       take number c empties slot c mod distance
    preload     the first `distance` takes, before tick 0
    fetch[t]    take t + distance, into the slot that take t has just emptied

The operations of a tick change at only a few ticks: where the ring runs out, at the first layer
whose state stays on the device, and at both ends. Between these ticks all indices are linear in the
tick, so a phase is a few loops for any number of layers.

Bytes in flight never decrease with the distance, so bisection finds the largest distance that fits
a budget.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from host_offload.schedule.ops import (
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    Loop,
    Op,
    Record,
    joined,
)
from host_offload.schedule.schedule import ON_DISK, SIZES, UPDATES, Phase, Schedule
from host_offload.tiers import TIERS


class HasPeak(Protocol):
    """A schedule or a step that knows its peak of bytes in flight."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device."""
        ...


class UnstackedMove(NamedTuple):
    """Unstacked leaves that are updated during a phase with late stores.

    Attributes:
      leaves: HEAD: leaves whose gradients are complete before backward, as one record. HEAD_PIECES:
        larger leaves of the head; each of the first ticks updates a piece. LATE_UNSTACKED: leaves
        that are updated after the last layer, in groups. UNSTACKED_PIECES: leaves that are updated
        last, one after another, each in pieces.
      num_bytes: bytes per device that the update of each record, group or piece stores (and loads,
        unless `loaded` is given).
      counts: number of pieces of each leaf; all leaves of HEAD_PIECES have the same number.
      loaded: bytes per device that the update of each record, group or piece loads; by default
        `num_bytes`.
    """

    leaves: str
    num_bytes: tuple[int, ...]
    counts: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()


class UnstackedLeaf(NamedTuple):
    """An unstacked leaf, or all unstacked leaves together.

    Attributes:
      name: suffix of its records' names, such as "params.<name>".
      tiers: tier of "params", "frozen" and "opt_state"; a missing kind is on the device.
      sizes: bytes per device by kind, as in `record_bytes` of `build_schedule`.
      frozen: whether the leaf is frozen.
      num_pieces: number of pieces in which the device updates the leaf.
      is_beside: whether the leaf is updated during a phase with late stores (`UnstackedMove`).
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
      stashes: whether gradients wait on the host, from the tick of backward that computes them.
      is_delayed: whether gradients wait for the next step; backward then loads the parameters that
        the previous step's gradients produced.
      takes_weights: whether the weights on the device are their own masters, and are stored
        together with the gradients.
      gives_params: whether new parameters are loaded to the device.
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
    unstacked: Sequence[UnstackedMove] = (),
    host: HostUpdate | None = None,
    regathers: bool = False,
    record_bytes: Mapping[str, int] | None = None,
    budget_bytes: int | None = None,
    first_layer: int = 0,
) -> Schedule:
    """Return the schedule of a train step over equal layers.

    Args:
      num_layers: number of equal layers of the stack.
      distance: ticks between the fetch of a record and its use; may exceed num_layers.
      tiers: tier in TIERS by kind in KINDS; missing kinds are on the device.
      update: when a layer's optimizer runs, "after_backward" or "in_backward".
      gather_ahead: whether to take and gather the next layer while the current layer computes; two
        layers are then gathered at the same time.
      master: whether parameters have float32 masters, stored and moved with opt_state; without them
        an update reads the parameters.
      device_layers: number of the first layer whose opt_state is in its tier; the opt_state of
        lower layers stays on the device.
      stores_late: number of ticks between a record's update and its store, in the phase that
        updates (backward or update); at most num_layers.
      unstacked: unstacked leaves that are updated during a phase with late stores.
      host: how callbacks update records on the host; None: the device updates them.
      regathers: whether devices update shards of replicated parameters and gather them afterwards.
      record_bytes: bytes of one layer per device, by kind as stored (params: the device's shard).
        More keys are "gathered", the layer's gathered parameters; "derivative", its unsharded
        gradient, in addition to the shards; "handed", "weights" and "made" for an update on the
        host; and "<kind>_on_disk", a record's size on disk, by default the kind's own size. Missing
        keys are 0.
      budget_bytes: most bytes in flight per device; None for no limit.
      first_layer: number of the first layer in its stack, if the layers are a part of a stack.

    Raises:
      ValueError: a size is invalid, a name is unknown, or more bytes are in flight than the budget.
        In the last case the message gives the largest distance that fits, with the same
        gather_ahead if possible.
    """
    _check_int("num_layers", num_layers, 1)
    _check_int("distance", distance, 0)
    _check_int("first_layer", first_layer, 0)
    _check_int("stores_late", stores_late, 0, num_layers)
    _check_int("device_layers", device_layers, 0, first_layer + num_layers)
    _check_names("tiers", tiers or {}, KINDS)
    _check_names(
        "unstacked",
        [move.leaves for move in unstacked],
        (HEAD, HEAD_PIECES, LATE_UNSTACKED, UNSTACKED_PIECES),
    )
    for move in unstacked:
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
            tuple(unstacked),
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
                f"budget_bytes={budget_bytes}: prefetch_distance={distance} with "
                f"gather_ahead={gather_ahead} puts {schedule.peak_bytes} bytes in flight on a "
                f"device, {schedule.peak_bytes - budget_bytes} more; "
                + advise(build, distance, (True, False) if gather_ahead else (False,), budget_bytes)
            )
    return schedule


def advise(
    build: Callable[[int, bool], HasPeak],
    distance: int,
    gather_ahead: Sequence[bool],
    budget_bytes: int,
) -> str:
    """Return a change that makes a schedule fit a budget, as a clause of an error message.

    Args:
      build: function that builds the schedule of a prefetch distance and a `gather_ahead`.
      distance: prefetch distance that does not fit.
      gather_ahead: choices in order of preference, beginning with the choice that does not fit.
      budget_bytes: most bytes in flight per device.
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


def build_unstacked(
    leaves: Sequence[UnstackedLeaf],
    master: bool,
    host: HostUpdate | None = None,
    whole: Mapping[str, int] | None = None,
) -> dict[str, Phase]:
    """Return the operations on unstacked leaves, as phases by name in the order in which they run.

        embed           load and gather the parameters, once a step; compute the first layer's input
        head            compute the loss and its derivative
        embed_backward  compute the embedding's derivative; reduce all these gradients
        ends            update: leaf by leaf on the device, all leaves in one tick on the host;
                        leaves that are updated during another phase are left out

    Args:
      leaves: unstacked leaves, in the order in which they are loaded and updated.
      master: whether parameters have float32 masters, stored and moved with opt_state.
      host: how callbacks update records on the host; None: the device updates them.
      whole: bytes per device of the gathered parameters of "embed" and "head"; 0 if they are not
        gathered.
    """
    embed = list[Op]()
    unstacked = list[Loop]()
    called = list[Op]()
    for leaf in leaves:
        embed += _moved_of_end(leaf, ["frozen" if leaf.frozen else "params"], "fetch")
        if leaf.frozen or leaf.is_beside:
            continue
        needs = [*([] if master else ["params"]), "opt_state"]
        updated = ["params", "opt_state"]
        update = Op("update", Record("opt_state", leaf.name), 0, "compute")
        if host is None:
            loads = _moved_of_end(leaf, needs, "load")
            stores = _moved_of_end(leaf, updated, "store")
            made = sum(op.num_bytes for op in stores if op.verb == "store")
            unstacked += _in_pieces(
                [*loads, update._replace(num_bytes=made)],
                stores,
                leaf.num_pieces,
                unstacked[-1].stop if unstacked else 0,
            )
            continue
        called += _called_of_end(leaf, host, needs, updated)
    size = whole or {}
    gathers = dict[str, Op]()
    computes = dict[str, Op]()
    for name in ("embed", "head"):
        gathers[name] = Op("gather", Record("gathered", name), 0, "network", size.get(name, 0))
        computes[name] = Op("compute", Record("layer", name), 0, "compute")
    reduce = Op("reduce", Record("grads", "unstacked"), 0, "network")
    ops = {
        "embed": [*embed, gathers["embed"], computes["embed"]],
        # The head is gathered again for its derivative.
        "head": [gathers["head"], gathers["head"], computes["head"]],
        "embed_backward": [gathers["embed"], computes["embed"], reduce],
    }
    phases = {
        name: Phase(name=name, loops=(Loop(0, 1, 1, tuple(each)),)) for name, each in ops.items()
    }
    return phases | {
        "unstacked": Phase(
            name="unstacked", loops=(Loop(0, 1, 1, tuple(called)),) if host else tuple(unstacked)
        )
    }


def _called_of_end(
    leaf: UnstackedLeaf, host: HostUpdate, needs: Sequence[str], updated: Sequence[str]
) -> list[Op]:
    """Return the callbacks' operations that update a leaf on the host.

    The update reads the kinds in `needs` and writes the kinds in `updated`.
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
    """Return the bytes of a record in a lane; a record may have another size on disk."""
    size = sizes.get(kind, 0)
    return sizes.get(kind + ON_DISK, size) if lane in ("read", "write") else size


def _moved_of_end(leaf: UnstackedLeaf, kinds: Sequence[str], verb: str) -> list[Op]:
    """Return the operations that load or store a leaf's records of some kinds."""
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
    """Yield the loops that update a leaf.

    With several pieces, each piece is stored while the next is loaded.
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
    """The order in which a phase visits the layers, and the kinds of records that it moves.

    Attributes:
      name: name of the phase.
      order: layers in the order in which they are visited.
      fetches: kinds read ahead.
      reads: kinds read in the tick that uses them.
      writes: kinds written.
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
    unstacked: tuple[UnstackedMove, ...]
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
        upward = (self.layers,)
        downward = (self.layers[::-1],)
        away = self._away
        host = self.host
        forward = _Pass("forward", upward, away("params", "frozen"), (), away("activations"))
        # Callbacks write updated records to their tiers themselves; the device only takes part
        # for parameters.
        updates = away("params") if host else away("opt_state", "params")
        taken = away("params", "frozen", "activations")
        if self.in_backward:
            return [
                forward,
                _Pass("backward", downward, taken, () if host else away("opt_state"), updates),
            ]
        backward = _Pass("backward", downward, taken, (), () if host else away("grads"))
        if host and host.is_delayed:
            return [forward, backward]
        needs = ()
        if not host:
            needs = away("grads", "opt_state", *([] if self.master else ["params"]))
        if self.stores_late:
            # Each tick loads the record that it updates while the previous record is stored, so
            # prefetching would gain nothing.
            return [forward, backward, _Pass("update", upward, (), needs, updates)]
        # Visit the layers whose state is on the device last, so fetches begin with the first tick.
        split = max(0, self.device_layers - self.layers.start)
        order = tuple(part for part in (self.layers[split:], self.layers[:split]) if part)
        return [forward, backward, _Pass("update", order, needs, (), updates)]

    # --- which kinds move -------------------------------------------------------------------------

    def _away(self, *kinds: str) -> tuple[str, ...]:
        """Return the `kinds` that are off the device for some layer."""
        return tuple(self._off(kinds, self.layers.stop - 1))

    def _off(self, kinds: Iterable[str], layer: int) -> list[str]:
        """Return the `kinds` of a layer's record that are off the device.

        These are all kinds with a tier off the device, except opt_state for the first layers.
        """
        moving = [kind for kind in kinds if self.tiers[kind] != "device"]
        return [kind for kind in moving if kind != "opt_state" or layer >= self.device_layers]

    def _num_takes(self, each: _Pass, is_ahead: bool) -> int:
        """Return the number of (first) ticks that take a record that is off the device."""
        if set(each.fetches) <= {"opt_state"}:
            return len(self.layers[max(0, self.device_layers - self.layers.start) :]) * len(
                each.fetches
            )
        return len(self.layers) - is_ahead

    # --- loops ------------------------------------------------------------------------------------

    def _loops(self, each: _Pass) -> Iterator[Loop]:
        """Yield the loops of a phase; the caller merges loops that continue each other."""
        num_ticks = len(self.layers)
        step = each.order[0].step
        distance = self.distance
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
        unstacked = [move for move in self.unstacked if lag]
        for move in unstacked:
            if move.leaves == HEAD:
                yield Loop(-1, 1, step, tuple(self._update_unstacked(move, 0, makes=False)))
        # The ticks whose operations differ from the previous tick's: for their own layer, for the
        # layer that they gather, or for the layer that they fetch.
        borders = {len(each.order[0]), self._first_on_device(each)}
        ahead = distance + is_ahead
        turns = {turn - n for turn in borders for n in (0, is_ahead, ahead)} | {
            num_takes - distance
        }
        turns |= {num_ticks - 1} if is_ahead else set()
        turns |= {lag, *(turn + lag for turn in borders)} if lag else set()
        turns |= {1} if any(move.leaves == HEAD for move in unstacked) else set()
        turns |= {
            n
            for move in unstacked
            if move.leaves == HEAD_PIECES
            for n in (move.counts[0], move.counts[0] + lag)
        }
        cuts = sorted({0, num_ticks} | {tick for tick in turns if 0 < tick < num_ticks})
        for start, stop in itertools.pairwise(cuts):
            yield Loop(
                start,
                stop - start,
                step,
                tuple(self._tick(each, start, num_takes, is_ahead, unstacked)),
            )
        if lag:
            yield from self._drain(each, lag, unstacked, num_ticks, step)

    def _first_on_device(self, each: _Pass) -> int:
        """Return the first tick whose layer has its state in another tier than its predecessor."""
        num = max(0, self.device_layers - self.layers.start)
        return num if each.order[0].step == 1 else len(self.layers) - num

    def _lag(self, each: _Pass) -> int:
        """Return the number of ticks by which a phase's stores are late."""
        is_updating = each.name == ("backward" if self.in_backward else "update") and bool(
            each.writes
        )
        return self.stores_late if is_updating else 0

    def _tick(
        self,
        each: _Pass,
        tick: int,
        num_takes: int,
        is_ahead: bool,
        unstacked: Sequence[UnstackedMove],
    ) -> list[Op]:
        """Return the operations of a tick, in order."""
        layer = each.layer(tick)
        lag = self._lag(each)
        take = tick + is_ahead
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
        for move in unstacked:
            if move.leaves == HEAD and tick == 0:
                ops.append(self._store_unstacked(move, 0))
            if move.leaves == HEAD_PIECES:
                piece = move.counts[0] - 1 - tick  # last to first, like the layers
                ops += self._update_unstacked(move, piece, makes=False) if piece >= 0 else []
                ops += self._piece_stored(move, tick, lag)
        return ops

    def _piece_stored(self, move: UnstackedMove, tick: int, lag: int) -> list[Op]:
        """Return the store of the head's piece that was updated `lag` ticks earlier, if any."""
        piece = move.counts[0] - 1 - (tick - lag)
        return [self._store_unstacked(move, piece, lag)] if 0 <= piece < move.counts[0] else []

    def _kept_ahead(self, each: _Pass, is_ahead: bool) -> int:
        """Return the bytes that a layer still holds from its gather in the previous tick.

        They are its gathered parameters, and the records that its gather has not used up.
        """
        used = ["activations"] if self.master or not self.in_backward else ["activations", "params"]
        if not is_ahead:
            return 0
        return self._size("gathered") + sum(
            self._size(kind) for kind in each.fetches if kind in used and each.name != "forward"
        )

    def _called(self, each: _Pass, layer: int, host: HostUpdate) -> list[Op]:
        """Return the operations of a host update's callbacks in a tick of backward or update."""
        updating = each.name == ("backward" if self.in_backward or host.is_delayed else "update")
        hands = updating if not host.stashes else each.name == "backward"
        ops = list[Op]()
        on_disk = [kind for kind, tier in self.tiers.items() if tier == "nvme"]
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
            # Without masters the parameters themselves are updated.
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

    # --- unstacked leaves -------------------------------------------------------------------------

    def _update_unstacked(self, move: UnstackedMove, number: int, makes: bool) -> list[Op]:
        """Return the load and the update of a record, group or piece.

        With `makes`, the updated record needs memory in addition to the loaded record.
        """
        n = number if len(move.num_bytes) > 1 else 0
        record = Record("opt_state", move.leaves)
        size = move.num_bytes[n]
        loaded = move.loaded[n] if move.loaded else size
        return [
            Op("load", record, number, "up", loaded),
            Op("update", record, number, "compute", size if makes else 0),
        ]

    def _store_unstacked(self, move: UnstackedMove, number: int, lag: int = 1) -> Op:
        size = move.num_bytes[number if len(move.num_bytes) > 1 else 0]
        return Op("store", Record("opt_state", move.leaves), number, "down", size, lag)

    def _drain(
        self, each: _Pass, lag: int, unstacked: Sequence[UnstackedMove], num_ticks: int, step: int
    ) -> Iterator[Loop]:
        """Yield the loops after the last layer, which store the records of the last `lag` layers.

        They also update the remaining unstacked leaves.
        """
        pieces = [move for move in unstacked if move.leaves == HEAD_PIECES]
        pending = list[Op]()
        tick = num_ticks
        for late in range(num_ticks, num_ticks + lag):
            if pending:
                yield Loop(tick, 1, step, tuple(pending))
                tick += 1
            pending = self._stores(each, each.layer(late - lag), lag)
            for move in pieces:
                pending += self._piece_stored(move, late, lag)
        for move in (move for move in unstacked if move.leaves == LATE_UNSTACKED):
            for n in range(len(move.num_bytes)):
                yield Loop(tick, 1, step, (*pending, *self._update_unstacked(move, n, makes=True)))
                pending = [self._store_unstacked(move, n)]
                tick = tick + 1
        if pending:
            yield Loop(tick, 1, step, tuple(pending))
            tick += 1
        for move in (move for move in unstacked if move.leaves == UNSTACKED_PIECES):
            for n, count in enumerate(move.counts):
                load = self._update_unstacked(move, n, makes=True)
                store = self._store_unstacked(move, n)
                # `num_bytes` counts one piece.
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
        """Return the operations ("fetch" or "load") that bring a layer's records to the device.

        Records on disk are read first.
        """
        ops = list[Op]()
        for kind in self._off(kinds, layer):
            ops += (
                [self._op("read", kind, layer, "read", lag)] if self.tiers[kind] == "nvme" else []
            )
            ops.append(self._op(verb, kind, layer, "up", lag))
        return ops

    def _stores(self, each: _Pass, layer: int, lag: int = 0) -> list[Op]:
        """Return the operations that store a layer's records, and write nvme records to disk."""
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
            f"{what} has unknown {', '.join(map(repr, unknown))}: choose from {', '.join(known)}"
        )
