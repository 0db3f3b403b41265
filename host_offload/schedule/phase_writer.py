"""Write the phases of a schedule: which layer each tick visits, and the operations of each tick.

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
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from host_offload.schedule.ops import (
    HEAD,
    HEAD_PIECES,
    KINDS,
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    HostUpdate,
    Loop,
    Op,
    Record,
    merge_loops,
    size_in_lane,
)
from host_offload.schedule.phase import Phase
from host_offload.schedule.unstacked import UnstackedMove, loop_over_pieces

_UPDATED = ("opt_state", "params")
"""Kinds that an update writes."""


@dataclasses.dataclass(frozen=True)
class LayerPass:
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

    @property
    def step(self) -> int:
        """Change of the layer from tick to tick: 1 or -1."""
        return self.order[0].step

    def layer(self, tick: int) -> int:
        """Return the layer of a tick."""
        first_range = self.order[0]
        if tick < len(first_range):
            return first_range[tick]
        return self.order[1][tick - len(first_range)]


@dataclasses.dataclass(frozen=True)
class PhaseWriter:
    """Writes the phases of a schedule; the attributes are the arguments of `build_schedule`."""

    layers: range
    distance: int
    tiers: Mapping[str, str]
    update: str
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
        return tuple(map(self._phase, self._passes()))

    def _phase(self, layer_pass: LayerPass) -> Phase:
        return Phase(
            name=layer_pass.name,
            loops=merge_loops(self._loops(layer_pass)),
            device_layers=self.device_layers,
            first_layer=self.layers.start,
        )

    def _passes(self) -> list[LayerPass]:
        off_device = self._off_device
        host = self.host
        upward = (self.layers,)
        downward = (self.layers[::-1],)
        forward = LayerPass(
            "forward", upward, off_device("params", "frozen"), (), off_device("activations")
        )
        if self.update == "in_forward":
            return [self._updating_forward(), self._plain_backward()]
        backward_fetches = off_device("params", "frozen", "activations")
        # Callbacks write updated records to their tiers themselves; the device only takes part
        # for parameters.
        updated = off_device("params") if host else off_device("opt_state", "params")

        if self.update == "in_backward":
            reads = () if host else off_device("opt_state")
            return [forward, LayerPass("backward", downward, backward_fetches, reads, updated)]

        backward = self._plain_backward()
        if host and host.is_delayed:
            return [forward, backward]

        update_kinds = ["grads", "opt_state"] if self.master else ["grads", "opt_state", "params"]
        update_reads = () if host else off_device(*update_kinds)
        if self.stores_late:
            # Each tick loads the record that it updates while the previous record is stored, so
            # prefetching would gain nothing.
            return [forward, backward, LayerPass("update", upward, (), update_reads, updated)]
        # Visit the layers whose state is on the device last, so fetches begin with the first tick.
        split = self._num_on_device()
        ranges = (self.layers[split:], self.layers[:split])
        order = tuple(layers for layers in ranges if layers)
        return [forward, backward, LayerPass("update", order, update_reads, (), updated)]

    def _plain_backward(self) -> LayerPass:
        """Return the pass of a backward that stores gradients and updates nothing."""
        fetches = self._off_device("params", "frozen", "activations")
        writes = () if self.host else self._off_device("grads")
        return LayerPass("backward", (self.layers[::-1],), fetches, (), writes)

    def _updating_forward(self) -> LayerPass:
        """Return the pass of a forward that updates each layer before it computes it.

        The parameters are made from the updated weights, so they are read only if they are the
        weights.
        """
        weights = ["opt_state"] if self.master else ["params", "opt_state"]
        fetches = self._off_device("grads", *weights, "frozen")
        writes = self._off_device("activations", "opt_state", "params")
        return LayerPass("forward", (self.layers,), fetches, (), writes)

    # --- which kinds move -------------------------------------------------------------------------

    def _num_on_device(self) -> int:
        """Return the number of these layers whose opt_state stays on the device."""
        return max(0, self.device_layers - self.layers.start)

    def _off_device(self, *kinds: str) -> tuple[str, ...]:
        """Return the `kinds` that are off the device for some layer."""
        return tuple(self._off_device_at(kinds, self.layers.stop - 1))

    def _off_device_at(self, kinds: Iterable[str], layer: int) -> list[str]:
        """Return the `kinds` of a layer's record that are off the device.

        These are all kinds with a tier off the device, except opt_state for the first layers.
        """
        moving = [kind for kind in kinds if self.tiers[kind] != "device"]
        return [kind for kind in moving if kind != "opt_state" or layer >= self.device_layers]

    def _updates_in(self, layer_pass: LayerPass) -> bool:
        """Return whether layers are updated in a pass."""
        phases = {"in_backward": "backward", "in_forward": "forward"}
        return layer_pass.name == phases.get(self.update, "update")

    def _lag(self, layer_pass: LayerPass) -> int:
        """Return the number of ticks by which a phase's stores are late."""
        return self.stores_late if self._updates_in(layer_pass) and layer_pass.writes else 0

    def _gathers_ahead(self, layer_pass: LayerPass) -> bool:
        return self.gather_ahead and layer_pass.name != "update"

    def _num_takes(self, layer_pass: LayerPass) -> int:
        """Return the number of (first) ticks that take a record that is off the device."""
        if set(layer_pass.fetches) <= {"opt_state"}:
            # The first layer is gathered ahead before any tick.
            first = max(self._num_on_device(), self._gathers_ahead(layer_pass))
            return len(self.layers[first:]) * len(layer_pass.fetches)
        return len(self.layers) - self._gathers_ahead(layer_pass)

    # --- loops ------------------------------------------------------------------------------------

    def _loops(self, layer_pass: LayerPass) -> Iterator[Loop]:
        """Yield the loops of a phase; the caller merges loops that continue each other."""
        yield from self._preload(layer_pass)
        unstacked = self.unstacked if self._lag(layer_pass) else ()
        for move in unstacked:
            if move.leaves == HEAD:
                ops = move.update_ops(0, in_new_memory=False)
                yield Loop(-1, 1, layer_pass.step, tuple(ops))
        for start, stop in itertools.pairwise(self._cuts(layer_pass, unstacked)):
            ops = self._tick(layer_pass, start, unstacked)
            yield Loop(start, stop - start, layer_pass.step, tuple(ops))
        if self._lag(layer_pass):
            yield from self._drain(layer_pass, unstacked)

    def _preload(self, layer_pass: LayerPass) -> Iterator[Loop]:
        """Yield the loops before tick 0, which gather the first layer ahead and fill the ring."""
        step = layer_pass.step
        fetches = layer_pass.fetches
        is_ahead = self._gathers_ahead(layer_pass)
        num_slots = min(self.distance, self._num_takes(layer_pass))
        if is_ahead:
            start = -num_slots - 1
            first = layer_pass.layer(0)
            ops = self._loads("fetch", fetches, first, start)
            ops += self._updates_before_gather(layer_pass, first)
            ops.append(self._op("gather", "gathered", first, "network"))
            if layer_pass.name == "forward" and self._updates_in(layer_pass):
                ops += self._stores(layer_pass, _UPDATED, first)
            yield Loop(start, 1, step, tuple(ops))
        for slot in range(num_slots):
            layer = layer_pass.layer(slot + is_ahead)
            ops = self._loads("fetch", fetches, layer, -num_slots - is_ahead)
            yield Loop(slot - num_slots, 1, step, tuple(ops))

    def _cuts(self, layer_pass: LayerPass, unstacked: Sequence[UnstackedMove]) -> list[int]:
        """Return the ticks whose operations may differ from the previous tick's, and the end."""
        num_ticks = len(self.layers)
        is_ahead = self._gathers_ahead(layer_pass)
        lag = self._lag(layer_pass)

        # The layers change here: where another range begins, and where the state's tier changes.
        borders = {len(layer_pass.order[0]), self._first_on_device(layer_pass)}
        cuts = {self._num_takes(layer_pass) - self.distance}
        for tick in borders:
            # For its own layer, for the layer that it gathers, for the layer that it fetches.
            cuts |= {tick, tick - is_ahead, tick - self.distance - is_ahead}
        if is_ahead:
            cuts.add(num_ticks - 1)
        if lag:
            cuts.add(lag)
            cuts |= {tick + lag for tick in borders}
        for move in unstacked:
            if move.leaves == HEAD:
                cuts.add(1)
            if move.leaves == HEAD_PIECES:
                cuts |= {move.counts[0], move.counts[0] + lag}
        inner = {tick for tick in cuts if 0 < tick < num_ticks}
        return sorted({0, num_ticks} | inner)

    def _first_on_device(self, layer_pass: LayerPass) -> int:
        """Return the first tick whose layer has its state in another tier than its predecessor."""
        num_on_device = self._num_on_device()
        return num_on_device if layer_pass.step == 1 else len(self.layers) - num_on_device

    def _drain(self, layer_pass: LayerPass, unstacked: Sequence[UnstackedMove]) -> Iterator[Loop]:
        """Yield the loops after the last layer, which store the records of the last `lag` layers.

        They also update the remaining unstacked leaves.
        """
        lag = self._lag(layer_pass)
        step = layer_pass.step
        num_ticks = len(self.layers)
        tick = num_ticks
        pending = list[Op]()
        for late_tick in range(num_ticks, num_ticks + lag):
            if pending:
                yield Loop(tick, 1, step, tuple(pending))
                tick += 1
            pending = self._stores(layer_pass, KINDS, layer_pass.layer(late_tick - lag), lag)
            for move in unstacked:
                if move.leaves == HEAD_PIECES:
                    pending += _store_head_piece(move, late_tick, lag)

        for move in unstacked:
            if move.leaves != LATE_UNSTACKED:
                continue
            for group in range(len(move.num_bytes)):
                ops = (*pending, *move.update_ops(group, in_new_memory=True))
                yield Loop(tick, 1, step, ops)
                pending = [move.store_op(group)]
                tick += 1
        if pending:
            yield Loop(tick, 1, step, tuple(pending))
            tick += 1

        for move in unstacked:
            if move.leaves != UNSTACKED_PIECES:
                continue
            for leaf, num_pieces in enumerate(move.counts):
                *loads, store = [
                    # `num_bytes` counts one piece.
                    op._replace(number=0, num_bytes=num_pieces * op.num_bytes)
                    for op in (*move.update_ops(leaf, in_new_memory=True), move.store_op(leaf))
                ]
                yield from loop_over_pieces(loads, [store], num_pieces, tick)
                tick += num_pieces + 1

    # --- one tick ---------------------------------------------------------------------------------

    def _tick(
        self, layer_pass: LayerPass, tick: int, unstacked: Sequence[UnstackedMove]
    ) -> list[Op]:
        """Return the operations of a tick, in order."""
        layer = layer_pass.layer(tick)
        lag = self._lag(layer_pass)
        ops = self._takes(layer_pass, tick)
        ops += self._loads("load", layer_pass.reads, layer, 0)
        ops += self._computes(layer_pass, layer)
        if self.host and layer_pass.name != "forward":
            ops += self._callbacks(layer_pass, layer, self.host)
        elif layer_pass.name == "forward":
            ops += self._forward_stores(layer_pass, tick)
        elif tick >= lag:
            ops += self._stores(layer_pass, KINDS, layer_pass.layer(tick - lag), lag)
        for move in unstacked:
            if move.leaves == HEAD and tick == 0:
                ops.append(move.store_op(0))
            if move.leaves == HEAD_PIECES:
                piece = move.counts[0] - 1 - tick  # last to first, like the layers
                if piece >= 0:
                    ops += move.update_ops(piece, in_new_memory=False)
                ops += _store_head_piece(move, tick, lag)
        return ops

    def _takes(self, layer_pass: LayerPass, tick: int) -> list[Op]:
        """Return the operations of a tick that fetch a later layer's records and gather a layer."""
        is_ahead = self._gathers_ahead(layer_pass)
        ops = list[Op]()
        if tick + self.distance < self._num_takes(layer_pass):
            ahead = self.distance + is_ahead
            ops += self._loads("fetch", layer_pass.fetches, layer_pass.layer(tick + ahead), -ahead)
        gathered_tick = tick + is_ahead
        if layer_pass.name != "update" and gathered_tick < len(self.layers):
            layer = layer_pass.layer(gathered_tick)
            ops += self._updates_before_gather(layer_pass, layer, -is_ahead)
            ops.append(self._op("gather", "gathered", layer, "network", -is_ahead))
        return ops

    def _updates_before_gather(self, layer_pass: LayerPass, layer: int, lag: int = 0) -> list[Op]:
        """Return the operations that update a layer before forward gathers it, if any."""
        if layer_pass.name != "forward" or not self._updates_in(layer_pass):
            return []
        ops = [Op("update", Record("opt_state"), layer, "compute", 0, lag)]
        if self.regathers:
            ops.append(self._op("gather", "params", layer, "network", lag))
        return ops

    def _forward_stores(self, layer_pass: LayerPass, tick: int) -> list[Op]:
        """Return the stores of a tick of forward: its activations, and the layer it updates."""
        ops = self._stores(layer_pass, ("activations",), layer_pass.layer(tick))
        is_ahead = self._gathers_ahead(layer_pass)
        if self._updates_in(layer_pass) and tick + is_ahead < len(self.layers):
            updated = layer_pass.layer(tick + is_ahead)
            ops += self._stores(layer_pass, _UPDATED, updated, -is_ahead)
        return ops

    def _computes(self, layer_pass: LayerPass, layer: int) -> list[Op]:
        """Return the operations of a tick that compute its layer, and update it on the device."""
        new_bytes = 0
        if not self._lag(layer_pass):
            written = self._off_device_at(layer_pass.writes, layer)
            new_bytes = sum(self._size(kind) for kind in written)

        ops = list[Op]()
        if layer_pass.name == "forward":
            num_bytes = self._bytes_gathered_ahead(layer_pass) + new_bytes
            ops.append(Op("compute", Record("layer"), layer, "compute", num_bytes))
        if layer_pass.name == "backward":
            num_bytes = self._bytes_gathered_ahead(layer_pass) + self._size("derivative")
            ops.append(Op("compute", Record("layer"), layer, "compute", num_bytes))
            ops.append(self._op("reduce", "grads", layer, "network"))
        if self._updates_in(layer_pass) and layer_pass.name != "forward":
            if not self.host:
                ops.append(Op("update", Record("opt_state"), layer, "compute", new_bytes))
            if self.regathers:
                ops.append(self._op("gather", "params", layer, "network"))
        return ops

    def _bytes_gathered_ahead(self, layer_pass: LayerPass) -> int:
        """Return the bytes that a layer still holds from its gather in the previous tick.

        They are its gathered parameters, and the records that its gather has not used up.
        """
        if not self._gathers_ahead(layer_pass):
            return 0
        num_bytes = self._size("gathered")
        if layer_pass.name == "forward":
            return num_bytes
        used_later = ["activations"]
        if self.update == "in_backward" and not self.master:
            used_later.append("params")
        return num_bytes + sum(
            self._size(kind) for kind in layer_pass.fetches if kind in used_later
        )

    def _callbacks(self, layer_pass: LayerPass, layer: int, host: HostUpdate) -> list[Op]:
        """Return the operations of a host update's callbacks in a tick of backward or update."""
        if host.is_delayed:
            is_updating = layer_pass.name == "backward"
        else:
            is_updating = self._updates_in(layer_pass)
        hands_over = layer_pass.name == "backward" if host.stashes else is_updating
        ops = list[Op]()
        if hands_over:
            ops.append(self._op("store", "handed", layer, "down"))
            if host.stashes:
                ops += self._disk_ops("host_write", ["grads"], layer, "write")
        if not is_updating:
            return ops
        if host.takes_weights:
            ops.append(self._op("store", "weights", layer, "down"))
        if host.is_delayed:
            ops.append(Op("host_update", Record("opt_state"), layer, "host", 0, -len(self.layers)))
        else:
            ops += self._update_on_host(layer_pass, layer, host)
        if host.gives_params:
            ops.append(self._op("load", "made", layer, "up"))
        return ops

    def _update_on_host(self, layer_pass: LayerPass, layer: int, host: HostUpdate) -> list[Op]:
        """Return the operations of a host update in this tick, between the copies over the link."""
        read = list[str]()
        if host.stashes:
            read.append("grads")
        if not self.master:
            # Without masters the parameters themselves are updated.
            read.append("params")
        read += self._off_device_at(["opt_state"], layer)

        ops = self._disk_ops("host_read", read, layer, "read")
        ops.append(Op("host_update", Record("opt_state"), layer, "host"))
        for kind in self._off_device_at(layer_pass.writes, layer):
            ops.append(Op("store", Record(kind), layer, "host"))
        written = self._off_device_at(["params", "opt_state"], layer)
        return ops + self._disk_ops("host_write", written, layer, "write")

    # --- single operations ------------------------------------------------------------------------

    def _size(self, kind: str) -> int:
        return self.sizes.get(kind, 0)

    def _op(self, verb: str, kind: str, layer: int, lane: str, lag: int = 0) -> Op:
        return Op(verb, Record(kind), layer, lane, size_in_lane(lane, kind, self.sizes), lag)

    def _disk_ops(self, verb: str, kinds: Iterable[str], layer: int, lane: str) -> list[Op]:
        """Return the operations that read or write the `kinds` that are on disk."""
        return [
            self._op(verb, kind, layer, lane) for kind in kinds if self.tiers.get(kind) == "nvme"
        ]

    def _loads(self, verb: str, kinds: Sequence[str], layer: int, lag: int) -> list[Op]:
        """Return the operations ("fetch" or "load") that bring a layer's records to the device.

        Records on disk are read first.
        """
        ops = list[Op]()
        for kind in self._off_device_at(kinds, layer):
            if self.tiers[kind] == "nvme":
                ops.append(self._op("read", kind, layer, "read", lag))
            ops.append(self._op(verb, kind, layer, "up", lag))
        return ops

    def _stores(
        self, layer_pass: LayerPass, kinds: Sequence[str], layer: int, lag: int = 0
    ) -> list[Op]:
        """Return the operations that store a layer's records, and write nvme records to disk.

        Only `kinds` are stored, as far as the pass writes them.
        """
        ops = list[Op]()
        written = [kind for kind in layer_pass.writes if kind in kinds]
        for kind in self._off_device_at(written, layer):
            ops.append(self._op("store", kind, layer, "down", lag))
            if self.tiers[kind] == "nvme":
                ops.append(self._op("write", kind, layer, "write", lag))
        return ops


def _store_head_piece(move: UnstackedMove, tick: int, lag: int) -> list[Op]:
    """Return the store of the head's piece that was updated `lag` ticks earlier, if any."""
    num_pieces = move.counts[0]
    piece = num_pieces - 1 - (tick - lag)
    return [move.store_op(piece, lag)] if 0 <= piece < num_pieces else []
