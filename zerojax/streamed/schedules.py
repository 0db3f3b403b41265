"""The schedule of a streamed step: which record of each run of layers moves at which tick.

It also says which unstacked leaves (`unstacked`) move during these ticks. These leaves are updated
during backward as far as their gradients are known. Leaves that the head completes are updated
before backward's first tick (`early_unstacked`); large ones in pieces, one piece per tick
(`head_pieces`). The remaining unstacked leaves are updated after backward's last tick; large ones
in pieces (`chunked_unstacked`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from host_offload.schedule import (
    HEAD,
    HEAD_PIECES,
    LATE_UNSTACKED,
    UNSTACKED_PIECES,
    Schedule,
    UnstackedMove,
    build_schedule,
    build_tiled_schedule,
)
from zerojax.activations import MODES
from zerojax.config import ZeroConfig
from zerojax.optim import Pieces, RecordUpdate
from zerojax.sharding import STAGES, num_zero_shards
from zerojax.state import (
    LayerRange,
    Layout,
    RecordSpec,
    StateRecords,
    host_update,
    loaded_bytes,
    record_bytes,
    stored_bytes,
)


def plan_schedules(
    records: StateRecords,
    runs: Sequence[LayerRange],
    cut: Mapping[int, int],
    pieces: Mapping[int, Pieces],
    grads: Sequence[RecordSpec],
    distance: int,
    gather_ahead: bool,
    kept: Mapping[str, Mapping[str, int]],
    config: ZeroConfig,
) -> dict[str, Schedule]:
    """Return the schedule of the loops over each run of layers, by its name.

    Args:
      records: how the state is stored.
      runs: the runs of layers.
      cut: number of pieces of each leaf that is updated in pieces after the layers.
      pieces: the result of `head_pieces`.
      grads: how each trainable leaf's gradient is stored from backward to update.
      distance: prefetch distance, in ticks.
      gather_ahead: whether the next layer is gathered while the current one computes.
      kept: bytes that one layer of each run saves off the device for backward, by the run's name,
        with the keys "activations" and "activations_on_disk"; empty or without a run if its bytes
        are not known yet.
      config: config of the step.
    """
    schedules = dict[str, Schedule]()
    for run in runs:
        stack = run.stack
        sizes = record_bytes(
            records, stack.blocks, stack.frozen_blocks, _stored_grads(grads, stack.blocks)
        )
        schedules[run.name] = run_schedule(
            config,
            build_facts(records, run),
            {**sizes, **kept.get(run.name, {})},
            tile_bytes=[
                record_bytes(
                    records, group.leaves, group.frozen, _stored_grads(grads, group.leaves)
                )
                for group in stack.groups
            ],
            unstacked=_unstacked_beside(records, runs, run, cut, pieces),
            distance=distance,
            gather_ahead=gather_ahead,
        )
    return schedules


def _stored_grads(grads: Sequence[RecordSpec], leaf_ids: Sequence[int]) -> RecordSpec | None:
    """Return how a record's gradients are stored; None if it has no trainable leaves."""
    return grads[leaf_ids[0]] if leaf_ids else None


STORE_LAG = 1
"""Ticks from the update of a record to its store, if records are stored late.

The device holds this many records that wait to be stored.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Inputs of a run's schedule, in addition to the config and the bytes of its records.

    Attributes:
      num_layers: number of layers in the run.
      first_layer: index of the run's first layer in its stack.
      device_layers: number of layers of the stack whose optimizer state stays on the device.
      activations: tier of a layer's saved activations that are off the device, or "device".
      frozen: tier of frozen parameters; "device" if there are none.
      is_trained: whether a layer has trainable leaves.
      num_arrays: number of arrays in a record of optimizer state, including masters.
      num_tiles: number of tiles T of each group whose records are tiles, by the group's name.
      has_master: whether parameters have float32 masters.
      both_ways: whether copy engines move data in both directions of the link at the same time.
      is_split: whether the state is sharded over more than one device.
    """

    num_layers: int
    first_layer: int = 0
    device_layers: int = 0
    activations: str = "device"
    frozen: str = "device"
    is_trained: bool = True
    num_arrays: int = 3
    num_tiles: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_master: bool = True
    both_ways: bool = True
    is_split: bool = True

    def tiers(self, config: ZeroConfig) -> dict[str, str]:
        """Return the tier of each kind of record.

        A kind without arrays counts as "device", so nothing is fetched.
        """
        kinds = ("params", "grads", "opt_state")
        trained = {kind: getattr(config, kind) if self.is_trained else "device" for kind in kinds}
        return trained | {"activations": self.activations, "frozen": self.frozen}

    def stores_late(self, config: ZeroConfig) -> int:
        """Return how many ticks after its update a record is stored, while another is loaded.

        0 means that a record is stored in its own tick. Late stores have several conditions:

        - Only copy engines move data in both directions at the same time.
        - One array of a record is loaded while another is stored, so a record needs two arrays.
        - Records on disk are moved by the engine, which has its own order.
        - Parameters that are fetched in the tick that takes them are read before its products, so
          no product overlaps their store.
        - Without masters, an update would also have to load the parameters if they are off the
          device.
        """
        tiers = self.tiers(config)
        if config.update == "in_backward":
            possible = config.prefetch_distance > 0 or tiers["params"] == "device"
        else:
            possible = self.has_master or tiers["params"] == "device"
        is_late = (
            possible
            and config.update != "in_forward"
            and self.both_ways
            and config.update_on != "host"
            and tiers["opt_state"] == "pinned_host"
            and "nvme" not in tiers.values()
            and not self.device_layers
            and not self.num_tiles
            and self.num_layers > 1
            and self.num_arrays > 1
        )
        return min(STORE_LAG, self.num_layers) if is_late else 0


def run_schedule(
    config: ZeroConfig,
    facts: RunFacts,
    record_bytes: Mapping[str, int],
    *,
    tile_bytes: Sequence[Mapping[str, int]] = (),
    unstacked: Sequence[UnstackedMove] = (),
    distance: int | None = None,
    gather_ahead: bool | None = None,
) -> Schedule:
    """Return the schedule of the loops over a run of layers.

    Args:
      config: config of the step.
      facts: facts of the run.
      record_bytes: bytes of one layer's records, as in `host_offload.schedule.build_schedule`.
      tile_bytes: bytes of the records of one tile, for each group of tiles.
      unstacked: unstacked leaves that are updated during this run, if its records are stored late.
      distance: prefetch distance, in ticks; None uses the config's.
      gather_ahead: whether the next layer is gathered ahead; None uses the config's.
    """
    options: dict[str, Any] = {
        "tiers": facts.tiers(config),
        "update": config.update or "after_backward",
        "master": facts.has_master,
        "host": host_update(config, facts.has_master),
        "regathers": facts.is_split
        and STAGES[config.stage].opt_state
        and not STAGES[config.stage].params,
        "record_bytes": record_bytes,
        "first_layer": facts.first_layer,
    }
    distance = config.prefetch_distance if distance is None else distance
    if facts.num_tiles:
        return build_tiled_schedule(
            facts.num_layers, distance, groups=facts.num_tiles, group_bytes=tile_bytes, **options
        )
    return build_schedule(
        facts.num_layers,
        distance,
        gather_ahead=config.gather_ahead if gather_ahead is None else gather_ahead,
        device_layers=min(facts.device_layers, facts.first_layer + facts.num_layers),
        stores_late=facts.stores_late(config),
        unstacked=unstacked,
        **options,
    )


def build_facts(records: StateRecords, run: LayerRange) -> RunFacts:
    """Return the facts of a run of layers of a program."""
    layout = records.layout
    stack = run.stack
    segment = run.segment
    # Values that the user's names keep in host memory are fetched with their layer, like a layer's
    # input in host memory. If the input is off the device anyway, its tier decides how the bytes
    # are counted.
    if segment.offloaded_names and segment.activations in MODES:
        activations = "pinned_host"
    else:
        activations = segment.activations
    return RunFacts(
        num_layers=run.num_layers,
        first_layer=run.first,
        device_layers=stack.device_layers,
        activations="device" if activations in MODES else activations,
        frozen=layout.frozen_tier if layout.frozen and any(stack.frozen_parts) else "device",
        is_trained=not layout.frozen or any(stack.parts),
        num_arrays=len(records.opt_records(stack.blocks)),
        num_tiles={group.name: group.num_tiles for group in stack.groups},
        has_master=layout.has_master,
        both_ways=records.both_ways,
        is_split=num_zero_shards(records.mesh) > 1,
    )


def _stores_late(records: StateRecords, run: LayerRange) -> int:
    return build_facts(records, run).stores_late(records.layout.config)


def _unstacked_beside(
    records: StateRecords,
    runs: Sequence[LayerRange],
    run: LayerRange,
    cut: Mapping[int, int],
    pieces: Mapping[int, Pieces],
) -> list[UnstackedMove]:
    """Return the unstacked leaves that are updated during one of the runs, if it stores late."""
    layout = records.layout
    moved: list[UnstackedMove] = []

    def add(leaves: str, groups: Sequence[Sequence[int]], counts: Sequence[int] = ()) -> None:
        stored = list[int]()
        loaded = list[int]()
        for leaf_ids, count in zip(groups, counts or [1] * len(groups), strict=True):
            stored.append(sum(stored_bytes(records, (i,)) // count for i in leaf_ids))
            loaded.append(sum(loaded_bytes(records, (i,)) // count for i in leaf_ids))
        moved.append(UnstackedMove(leaves, tuple(stored), tuple(counts), tuple(loaded)))

    # Backward begins with the last run, which stores the leaves that the head completed.
    early = early_unstacked(records, runs)
    if run is runs[-1] and early:
        add(HEAD, [early])
    if run is runs[-1] and pieces:
        add(HEAD_PIECES, [list(pieces)], [next(iter(pieces.values())).count])
    # Backward ends with the first run, and an update ends with the last run.
    others = [i for i in layout.unstacked if i not in (*early, *cut, *pieces)]
    if run is runs[0 if layout.config.update == "in_backward" else -1]:
        if others:
            add(LATE_UNSTACKED, unstacked_groups(layout, others, run.stack.blocks))
        if cut:
            add(UNSTACKED_PIECES, [[i] for i in cut], list(cut.values()))
    return moved


def unstacked_groups(
    layout: Layout, unstacked: Sequence[int], blocks: Sequence[int]
) -> list[list[int]]:
    """Bin leaves, largest first, into groups no larger than a layer's record.

    A single leaf may be larger.

    Args:
      layout: layout of the leaves.
      unstacked: indices of unstacked leaves.
      blocks: indices of the leaves of a layer's record.
    """
    sizes = {i: math.prod(layout.leaves[i].record_shape) for i in (*unstacked, *blocks)}
    most = sum(sizes[i] for i in blocks)
    groups = list[list[int]]()
    filled = 0
    for i in sorted(unstacked, key=lambda i: -sizes[i]):
        if not groups or filled + sizes[i] > most:
            groups = [*groups, []]
            filled = 0
        groups[-1].append(i)
        filled += sizes[i]
    return groups


def early_unstacked(records: StateRecords, runs: Sequence[LayerRange]) -> tuple[int, ...]:
    """Return leaves that only the head uses, together no larger than a layer's record.

    Their gradients are complete before the layers' backward. In the first tick of an update in
    backward with late stores, no layer's record waits to be stored.

    Args:
      records: how the state is stored.
      runs: the runs of layers, in order.

    Returns:
      Indices of the leaves; empty unless the last run updates in backward and stores late.
    """
    layout = records.layout
    if layout.config.update != "in_backward" or not _stores_late(records, runs[-1]):
        return ()
    most = stored_bytes(records, layout.stacks[-1].blocks)
    early = list[int]()
    for i in _head_leaves(layout):
        if stored_bytes(records, (*early, i)) <= most:
            early.append(i)
    return tuple(early)


def head_pieces(
    records: StateRecords, runs: Sequence[LayerRange], update: RecordUpdate | None
) -> dict[int, Pieces]:
    """Return how the leaves that only the head uses, except `early_unstacked`, are cut into pieces.

    All have the same number of pieces. Each of the first ticks of backward updates one piece during
    its layer, and the next tick stores it. So there are at most as many pieces as layers, and no
    piece is larger than a layer's record.

    Args:
      records: how the state is stored.
      runs: the runs of layers, in order.
      update: the update by records, or None.

    Returns:
      The pieces of each leaf, by its index; empty unless the last run updates in backward and
      stores late.
    """
    early = early_unstacked(records, runs)
    if (
        update is None
        or records.layout.config.update != "in_backward"
        or not _stores_late(records, runs[-1])
    ):
        return {}
    most = stored_bytes(records, runs[-1].stack.blocks)
    cut = dict[int, Pieces]()
    for i in sorted(
        set(_head_leaves(records.layout)) - set(early), key=lambda i: -stored_bytes(records, (i,))
    ):
        pieces = update.pieces(i, runs[-1].num_layers)
        if pieces is None or stored_bytes(records, (i,)) > most * pieces.count:
            continue
        if all(cut_leaf.count == pieces.count for cut_leaf in cut.values()):
            cut[i] = pieces
    return cut


def _head_leaves(layout: Layout) -> list[int]:
    """Return the trainable leaves that only the head uses."""
    tree = jax.tree.unflatten(jax.tree.structure(layout.abstract_params), range(len(layout.leaves)))
    return jax.tree.leaves(tree["head"])


def chunked_unstacked(
    records: StateRecords,
    runs: Sequence[LayerRange],
    update: RecordUpdate | None,
    pieces: Mapping[int, Pieces],
) -> dict[int, int]:
    """Return the number of pieces of each leaf that is updated in pieces after the layers.

    The last layer's record is stored before these leaves, and the first piece is then loaded alone.
    A leaf as large as that record is loaded in full while it is stored. A larger leaf would keep
    the link idle, so it is cut.

    Args:
      records: how the state is stored.
      runs: the runs of layers, in order.
      update: the update by records, or None.
      pieces: leaves that backward updates in pieces (`head_pieces`); these are not cut here.

    Returns:
      The number of pieces, by the leaf's index.
    """
    layout = records.layout
    in_backward = records.layout.config.update == "in_backward"
    run = runs[0 if in_backward else -1]
    if update is None or layout.config.update_on == "host" or not _stores_late(records, run):
        return {}
    most = stored_bytes(records, run.stack.blocks)
    cut = dict[int, int]()
    early = early_unstacked(records, runs)
    for i in layout.unstacked:
        if i in (*early, *pieces):
            continue
        leaf_pieces = update.pieces(i)
        if leaf_pieces is None:
            continue
        if stored_bytes(records, (i,)) * (1 - 1 / leaf_pieces.count) > most:
            cut[i] = leaf_pieces.count
    return cut
