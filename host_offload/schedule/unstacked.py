"""Operations on unstacked leaves: the parameters of embedding and head, outside of the layers.

An unstacked leaf is updated in one tick, or in pieces, one per tick. Each piece is then stored
while the next is loaded.

Some unstacked leaves are updated during a phase over the layers, where their loads and stores
overlap with the layers' (`UnstackedMove`, `host_offload.schedule.phase_writer`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from host_offload.schedule.ops import HostUpdate, Loop, Op, Record, size_in_lane
from host_offload.schedule.phase import Phase


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

    def update_ops(self, number: int, in_new_memory: bool) -> list[Op]:
        """Return the load and the update of a record, group or piece.

        Args:
          number: index of the record, group or piece.
          in_new_memory: whether the updated record needs memory in addition to the loaded record.
        """
        record = Record("opt_state", self.leaves)
        size = self._stored_bytes(number)
        loaded = self.loaded[self._index(number)] if self.loaded else size
        return [
            Op("load", record, number, "up", loaded),
            Op("update", record, number, "compute", size if in_new_memory else 0),
        ]

    def store_op(self, number: int, lag: int = 1) -> Op:
        """Return the store of a record, group or piece, `lag` ticks after its update."""
        record = Record("opt_state", self.leaves)
        return Op("store", record, number, "down", self._stored_bytes(number), lag)

    def _stored_bytes(self, number: int) -> int:
        return self.num_bytes[self._index(number)]

    def _index(self, number: int) -> int:
        """Return the index of a record's size; a single size applies to all."""
        return number if len(self.num_bytes) > 1 else 0


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


def build_unstacked(
    leaves: Sequence[UnstackedLeaf],
    master: bool,
    host: HostUpdate | None = None,
    gathered_bytes: Mapping[str, int] | None = None,
) -> dict[str, Phase]:
    """Return the operations on unstacked leaves, as phases by name in the order in which they run.

        embed           load and gather the parameters, once a step; compute the first layer's input
        head            compute the loss and its derivative
        embed_backward  compute the embedding's derivative; reduce all these gradients
        unstacked       update: leaf by leaf on the device, all leaves in one tick on the host;
                        leaves that are updated during another phase are left out

    If the host updates in forward, `embed` takes parameters that are stored off the device from the
    host's update, and `embed_backward` hands over the gradients.

    Args:
      leaves: unstacked leaves, in the order in which they are loaded and updated.
      master: whether parameters have float32 masters, stored and moved with opt_state.
      host: how callbacks update records on the host; None: the device updates them.
      gathered_bytes: bytes per device of the gathered parameters of "embed" and "head"; 0 if they
        are not gathered.
    """
    in_forward = host is not None and host.in_forward
    loads = list[Op]()
    handed = list[Op]()
    for leaf in leaves:
        if leaf.frozen or not in_forward:
            loads += _move_ops(leaf, ["frozen" if leaf.frozen else "params"], "fetch")
            continue
        if leaf.tiers.get("params", "device") != "device":
            # They stay on the device as the host has made them, until the end of backward.
            loads.append(_op("load", "made", leaf, "up"))
        handed.append(_op("store", "handed", leaf, "down"))

    sizes = gathered_bytes or {}
    gather_embed = Op("gather", Record("gathered", "embed"), 0, "network", sizes.get("embed", 0))
    gather_head = Op("gather", Record("gathered", "head"), 0, "network", sizes.get("head", 0))
    compute_embed = Op("compute", Record("layer", "embed"), 0, "compute")
    compute_head = Op("compute", Record("layer", "head"), 0, "compute")
    reduce = Op("reduce", Record("grads", "unstacked"), 0, "network")
    ops = {
        "embed": [*loads, gather_embed, compute_embed],
        # The head is gathered again for its derivative.
        "head": [gather_head, gather_head, compute_head],
        "embed_backward": [gather_embed, compute_embed, reduce, *handed],
    }

    loops = {name: [Loop(0, 1, 1, tuple(phase_ops))] for name, phase_ops in ops.items()}
    updated = [leaf for leaf in leaves if not (leaf.frozen or leaf.is_beside)]
    loops["unstacked"] = _update_loops(updated, master, host)
    return {name: Phase(name=name, loops=tuple(loops[name])) for name in loops}


def _update_loops(
    leaves: Sequence[UnstackedLeaf], master: bool, host: HostUpdate | None
) -> list[Loop]:
    """Return the loops that update leaves: leaf by leaf on the device, in one tick on the host."""
    # Without masters the parameters themselves are updated.
    reads = ["opt_state"] if master else ["params", "opt_state"]
    writes = ["params", "opt_state"]
    if host is not None:
        ops = [op for leaf in leaves for op in _host_update_ops(leaf, host, reads, writes)]
        return [Loop(0, 1, 1, tuple(ops))]

    loops = list[Loop]()
    for leaf in leaves:
        loads = _move_ops(leaf, reads, "load")
        stores = _move_ops(leaf, writes, "store")
        new_bytes = sum(op.num_bytes for op in stores if op.verb == "store")
        update = Op("update", Record("opt_state", leaf.name), 0, "compute", new_bytes)
        start = loops[-1].stop if loops else 0
        loops += loop_over_pieces([*loads, update], stores, leaf.num_pieces, start)
    return loops


def _host_update_ops(
    leaf: UnstackedLeaf, host: HostUpdate, reads: Sequence[str], writes: Sequence[str]
) -> list[Op]:
    """Return the callbacks' operations that update a leaf on the host.

    The update reads the kinds in `reads` and writes the kinds in `writes`.
    """
    on_disk = [kind for kind in writes if leaf.tiers.get(kind) == "nvme"]
    handed = [_op("store", "handed", leaf, "down")]
    if host.takes_weights:
        handed.append(_op("store", "weights", leaf, "down"))
    lag = -1 if host.is_delayed or host.in_forward else 0
    update = Op("host_update", Record("opt_state", leaf.name), 0, "host", 0, lag)
    new_params = [_op("load", "made", leaf, "up")] if host.gives_params else []
    if host.in_forward:
        is_stored = leaf.tiers.get("params", "device") == "device"
        return [update, *new_params] if is_stored else [update]
    if host.is_delayed:
        return [*handed, update, *new_params]
    disk_reads = [_op("host_read", kind, leaf, "read") for kind in reads if kind in on_disk]
    disk_writes = [_op("host_write", kind, leaf, "write") for kind in on_disk]
    return [*handed, *disk_reads, update, *disk_writes, *new_params]


def _op(verb: str, kind: str, leaf: UnstackedLeaf, lane: str) -> Op:
    """Return an operation on a leaf's record of a kind."""
    return Op(verb, Record(kind, leaf.name), 0, lane, size_in_lane(lane, kind, leaf.sizes))


def _move_ops(leaf: UnstackedLeaf, kinds: Sequence[str], verb: str) -> list[Op]:
    """Return the operations that load or store a leaf's records of some kinds.

    Records on disk are read before they are loaded, and written after they are stored.
    """
    link_lane, disk_lane = ("down", "write") if verb == "store" else ("up", "read")
    ops = list[Op]()
    for kind in kinds:
        tier = leaf.tiers.get(kind, "device")
        if tier == "device":
            continue
        record = Record(kind, leaf.name)
        over_link = Op(verb, record, 0, link_lane, leaf.sizes[kind])
        if tier != "nvme":
            ops.append(over_link)
            continue
        disk_bytes = size_in_lane(disk_lane, kind, leaf.sizes)
        on_disk = Op(disk_lane, record, 0, disk_lane, disk_bytes)
        ops += [over_link, on_disk] if verb == "store" else [on_disk, over_link]
    return ops


def loop_over_pieces(
    loads: Sequence[Op], stores: Sequence[Op], num_pieces: int, tick: int
) -> Iterator[Loop]:
    """Yield the loops that update a leaf.

    With several pieces, each piece is stored while the next is loaded.

    Args:
      loads: operations that load and update the full leaf.
      stores: operations that store the full leaf.
      num_pieces: number of pieces.
      tick: first tick.
    """
    if num_pieces == 1:
        yield Loop(tick, 1, 1, (*loads, *stores))
        return
    load_first = [op._replace(num_bytes=op.num_bytes // num_pieces) for op in loads]
    store_first = [op._replace(num_bytes=op.num_bytes // num_pieces, lag=1) for op in stores]
    load_next = [op._replace(number=1) for op in load_first]
    store_last = [op._replace(number=num_pieces - 1) for op in store_first]
    yield Loop(tick, 1, 1, tuple(load_first))
    yield Loop(tick + 1, num_pieces - 1, 1, (*load_next, *store_first))
    yield Loop(tick + num_pieces, 1, 1, tuple(store_last))
