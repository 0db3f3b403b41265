"""The schedule of a step whose layers hold stacks of tiles.

Loops over tiles run inside the ticks of the loops over layers. A **group** is the part of each
layer that is kept in T tiles which are used together, such as the weights of an MLP. A record of a
group is one tile. There are L x T tiles, and tile k of layer l has the number l T + k. A device
never holds more of a layer's group than the tiles that are computed, gathered or in the ring. The
rest of a layer is one record, as in a schedule without tiles.

    phase     tick of the layers' loop             loop over a group's tiles
    forward   take the layer's record; compute     T ticks per layer: take, fetch, compute tile k;
                                                   with update="in_forward" update it first
    backward  run a group's loop where it is used  T ticks per layer, last tile first: take, fetch,
                                                   compute, and store or update
    update    one record                           L T ticks, after the loop over the layers

The ring of a group is filled when its loop begins, and empty when it ends: tiles are fetched ahead
within a layer. A group's loop may run twice in a tick of backward, if a value computed from its
result must be recomputed. The first of these loops is called "read": it computes forward and only
reads parameters, as an evaluation does.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from host_offload.schedule.build import advise, build_schedule
from host_offload.schedule.ops import KINDS, HostUpdate, Loop, Op, Record
from host_offload.schedule.phase import Phase
from host_offload.schedule.phase_text import describe_moves, table_rows
from host_offload.schedule.schedule import Schedule

_SHOWN = 8  # ticks of a loop over tiles that a table shows at each end


def tiles_kind(kind: str, group: str) -> str:
    """Return the name of the records that hold one kind of a group's tiles.

    Args:
      kind: kind of the records, in KINDS.
      group: name of the group.
    """
    return f"{kind}.tiles.{group}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TileLoops:
    """The loops over one group's tiles.

    Attributes:
      name: name of the group.
      num_tiles: T, tiles per layer.
      inner: schedule whose "layers" are the tiles of one layer; provides forward and backward.
      reading: the same for loops that only read parameters; provides "read". It differs from
        `inner` if forward updates.
      flat: schedule whose "layers" are the tiles of all layers, by number; provides update, if any.
    """

    name: str
    num_tiles: int
    inner: Schedule
    reading: Schedule
    flat: Schedule

    def phase(self, name: str) -> Phase:
        """Return a loop over tiles: T ticks in forward, read and backward, L T in update."""
        if name == "read":
            return self.reading.phase("forward")
        return (self.flat if name == "update" else self.inner).phase(name)

    def kind(self, kind: str) -> str:
        """Return the name of the records that hold one kind of this group's tiles."""
        return tiles_kind(kind, self.name)

    def plan(self, phase: str) -> str:
        """Return the key of this group's arrays of a phase among the schedule's arrays."""
        return f"{phase}/{self.name}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TiledSchedule(Schedule):
    """A schedule with loops over tiles inside it.

    Attributes:
      tiles: loops of each group.
    """

    tiles: tuple[TileLoops, ...] = ()

    def with_tiles(self, runs: Mapping[str, Sequence[tuple[str, str]]]) -> "TiledSchedule":
        """Return the schedule with the loops over tiles that each tick of a phase runs.

        Args:
          runs: for each phase, the (group, phase of the group) of each loop over tiles, in order.
        """
        loops_by_name = {loops.name: loops for loops in self.tiles}
        phases = list[Phase]()
        for phase in self.phases:
            inner = [
                (group, loops_by_name[group].phase(group_phase))
                for group, group_phase in runs.get(phase.name, ())
            ]
            loops = tuple(_with_inner(loop, inner) for loop in phase.loops)
            phases.append(dataclasses.replace(phase, loops=loops))
        return dataclasses.replace(self, phases=tuple(phases))

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight per device in each tick, by loop name: int64 arrays.

        The loops are the layers' phases, and update's loops over tiles. A tick of a layer counts
        the largest of its loops over tiles, because they run one after another.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        total = super().in_flight()
        if "update" in total:
            for loops in self.tiles:
                total[loops.plan("update")] = loops.phase("update").in_flight()
        return total

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any tick.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        return max(int(total.max()) for total in self.in_flight().values())

    def title(self) -> str:
        """Return the title of a table or picture."""
        groups = ", ".join(f"{loops.num_tiles} tiles of {loops.name}" for loops in self.tiles)
        return f"{super().title()}; a layer is one record and {groups}"

    def __str__(self) -> str:
        """Return the table of the layers' loops, and the tables of the loops over tiles."""
        lines = [super().__str__()]
        for loops in self.tiles:
            for phase in self.phases:
                time = "after the layers" if phase.name == "update" else "in each tick"
                tile_phase = loops.phase(phase.name)
                lines.append(f"{loops.plan(phase.name)}, {time}{describe_moves(tile_phase)}")
                lines += _shorten(table_rows(tile_phase))
        return "\n".join(lines)


def _shorten(rows: list[str]) -> list[str]:
    """Return the rows of both ends of a loop, with a line in place of the omitted ticks."""
    num_omitted = len(rows) - 2 * _SHOWN
    # The line in place of the omitted ticks replaces at least two lines.
    if num_omitted <= 1:
        return rows
    omission = f"{'':<8} {'...':>6} {num_omitted} more ticks"
    return [*rows[:_SHOWN], omission, *rows[-_SHOWN:]]


def _with_inner(loop: Loop, inner: Sequence[tuple[str, Phase]]) -> Loop:
    """Return a loop whose iterations run loops over tiles before they use the rest of the layer.

    `inner` holds (group, phase) of each loop over tiles.
    """
    layer = next((op.number for op in loop.ops if op.verb == "compute"), None)
    if layer is None:
        return loop
    ops = [op for op in loop.ops if op.inner is None]
    # After the records that the tick takes, and before the records that it reads for the update.
    after_takes = next((n + 1 for n, op in enumerate(ops) if op.record.kind == "gathered"), 0)
    tiles = [
        Op("tiles", Record("tiles", name), layer, "compute", inner=phase) for name, phase in inner
    ]
    return dataclasses.replace(loop, ops=(*ops[:after_takes], *tiles, *ops[after_takes:]))


def build_tiled_schedule(
    num_layers: int,
    distance: int = 0,
    *,
    groups: Mapping[str, int],
    group_bytes: Sequence[Mapping[str, int]],
    tiers: Mapping[str, str],
    update: str = "after_backward",
    master: bool = True,
    record_bytes: Mapping[str, int],
    budget_bytes: int | None = None,
    host: HostUpdate | None = None,
    regathers: bool = False,
    first_layer: int = 0,
) -> TiledSchedule:
    """Return the schedule of a step whose layers hold tiles.

    Args:
      num_layers: number of layers, L.
      distance: ticks between the fetch of a record (a layer's or a tile's) and its use.
      groups: number of tiles per layer, T, by group name.
      group_bytes: for each group, bytes of one tile per device by kind, as in `record_bytes`.
      tiers: tier by kind, as in `host_offload.build_schedule`.
      update: when the optimizer runs, as in `host_offload.build_schedule`.
      master: whether parameters have float32 masters, stored and moved with opt_state.
      record_bytes: bytes of a layer's record without its tiles, per device by kind, as in
        `host_offload.build_schedule`.
      budget_bytes: most bytes in flight per device; None for no limit.
      host: how callbacks update records on the host; None: the device updates them.
      regathers: whether devices update shards of replicated parameters and gather them afterwards.
      first_layer: number of the first layer in its stack, if the layers are a part of a stack.

    Raises:
      ValueError: a size is invalid, a name is unknown, or more bytes are in flight than the budget.
    """
    # Activations are saved per layer, never per tile.
    tile_tiers = {kind: tier for kind, tier in tiers.items() if kind != "activations"}
    assert set(tile_tiers) <= set(KINDS)

    build_records = partial(
        build_schedule, update=update, master=master, host=host, regathers=regathers
    )

    def build(distance: int, gather_ahead: bool) -> TiledSchedule:
        # `advise` passes this argument, but a step with tiles never gathers ahead.
        del gather_ahead
        layers = build_records(
            num_layers, distance, tiers=tiers, record_bytes=record_bytes, first_layer=first_layer
        )
        tiles = []
        for (name, num_tiles), tile_bytes in zip(groups.items(), group_bytes, strict=True):
            build_tiles = partial(
                build_records, distance=distance, tiers=tile_tiers, record_bytes=tile_bytes
            )
            inner = build_tiles(num_tiles)
            reading = inner
            if update == "in_forward":
                reading = build_tiles(num_tiles, update="after_backward")
            flat = build_tiles(num_layers * num_tiles, first_layer=first_layer * num_tiles)
            tiles.append(
                TileLoops(name=name, num_tiles=num_tiles, inner=inner, reading=reading, flat=flat)
            )
        return _add_tiles(layers, tiles)

    schedule = build(distance, False)
    if budget_bytes is not None and schedule.peak_bytes > budget_bytes:
        raise _over_budget(schedule, build, budget_bytes)
    return schedule


def _over_budget(
    schedule: TiledSchedule, build: Callable[[int, bool], TiledSchedule], budget_bytes: int
) -> ValueError:
    """Return the error for a schedule that exceeds its budget, with a change that makes it fit."""
    peak_bytes = schedule.peak_bytes
    return ValueError(
        f"budget_bytes={budget_bytes}: prefetch_distance={schedule.distance} puts "
        f"{peak_bytes} bytes in flight on a device, {peak_bytes - budget_bytes} more; "
        + advise(build, schedule.distance, (False,), budget_bytes)
    )


def _add_tiles(layers: Schedule, tiles: Sequence[TileLoops]) -> TiledSchedule:
    """Return a schedule whose ticks run the loops over tiles, in backward last to first."""
    names = [loops.name for loops in tiles]
    runs = {
        "forward": [(name, "forward") for name in names],
        "backward": [(name, "backward") for name in names[::-1]],
    }
    fields = {field.name: getattr(layers, field.name) for field in dataclasses.fields(Schedule)}
    return TiledSchedule(**fields, tiles=tuple(tiles)).with_tiles(runs)
