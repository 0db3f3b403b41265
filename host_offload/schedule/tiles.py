"""The schedule of a step whose layers hold stacks of tiles: loops over tiles inside of the ticks of
the loops over layers.

A **group** is the part of each layer that is kept in T tiles, which are used together, such as the
weights of an MLP. A record of a group is one tile. There are L x T of them, and that of tile k of
layer l has the number l T + k. No device ever holds more of a layer's group than the tiles that are
computed, gathered or in the ring. The rest of a layer is one record, as always.

    phase     tick of the layers' loop                    loop over a group's tiles
    forward   take the layer's record; compute, and       T ticks in each: take, fetch, compute tile k
    backward  where the block uses a group, run its loop  T ticks in each, last tile first: the same, and store or update
    update    one record                                  a loop of its own after that of the layers, L T ticks

The ring of a group is filled when its loop begins, and empty when it ends: tiles are fetched ahead
within a layer. A group's loop may run twice in a tick of backward, where something computed from
its result has to be computed again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from host_offload.schedule.build import HostUpdate, advise, build_schedule
from host_offload.schedule.ops import KINDS, Loop, Op, Record
from host_offload.schedule.schedule import Phase, Schedule

_SHOWN = 8  # ticks of a loop over tiles that a table shows at its begin, and at its end


def tiles_kind(kind: str, group: str) -> str:
    """Return the name of the records of a kind that are a group's tiles."""
    return f"{kind}.tiles.{group}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TileLoops:
    """The loops over one group.

    Attributes:
      name: of the group.
      num_tiles: T.
      inner: a schedule whose "layers" are the tiles of one layer; its forward and backward run.
      flat: one whose "layers" are the tiles of all layers, by number; its update runs, if it has
        one.
    """

    name: str
    num_tiles: int
    inner: Schedule
    flat: Schedule

    def phase(self, name: str) -> Phase:
        """Return the loop over tiles of a phase: T ticks in forward and backward, L T in update."""
        return (self.flat if name == "update" else self.inner).phase(name)

    def kind(self, kind: str) -> str:
        """Return the name of this group's records of a kind."""
        return tiles_kind(kind, self.name)

    def plan(self, phase: str) -> str:
        """Return the key of this group's arrays of a phase among those of the schedule."""
        return f"{phase}/{self.name}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TiledSchedule(Schedule):
    """A schedule, and the loops over tiles inside of it.

    Attributes:
      tiles: of each group.
    """

    tiles: tuple[TileLoops, ...] = ()

    def with_tiles(self, runs: Mapping[str, Sequence[tuple[str, str]]]) -> "TiledSchedule":
        """Return the schedule with the loops over tiles that each tick of a phase runs.

        Args:
          runs: phase -> (group, which of its phases) of each loop, in order.
        """
        of_group = {loops.name: loops for loops in self.tiles}

        def with_runs(phase: Phase) -> Phase:
            inner = [
                (name, of_group[name].phase(which)) for name, which in runs.get(phase.name, ())
            ]
            return dataclasses.replace(
                phase, loops=tuple(_with_inner(loop, inner) for loop in phase.loops)
            )

        return dataclasses.replace(self, phases=tuple(map(with_runs, self.phases)))

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight on a device in each tick of the layers' loops, and of update's
        loops over tiles.

        A tick counts the largest of its loops over tiles: they run one after the other.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        total = super().in_flight()
        updates = {
            loops.plan("update"): loops.phase("update") for loops in self.tiles if "update" in total
        }
        return total | {name: phase.in_flight() for name, phase in updates.items()}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight in any tick."""
        return max(int(total.max()) for total in self.in_flight().values())

    def title(self) -> str:
        groups = ", ".join(f"{loops.num_tiles} tiles of {loops.name}" for loops in self.tiles)
        return f"{super().title()}; a layer is one record and {groups}"

    def __str__(self) -> str:
        text = [super().__str__()]
        for loops in self.tiles:
            for phase in self.phases:
                where = "after the layers" if phase.name == "update" else "in each tick"
                inside = loops.phase(phase.name)
                rows = inside.rows()
                more = len(rows) - 2 * _SHOWN
                # The line that stands for the others takes the place of one.
                if more > 1:
                    rows = [
                        *rows[:_SHOWN],
                        f"{'':<8} {'...':>6} {more} more ticks",
                        *rows[-_SHOWN:],
                    ]
                text += [f"{loops.plan(phase.name)}, {where}{inside.note()}", *rows]
        return "\n".join(text)


def _with_inner(loop: Loop, inner: Sequence[tuple[str, Phase]]) -> Loop:
    """Return a loop whose trips run loops over tiles, each (group, phase), before they use the rest
    of the layer.
    """
    layer = next((op.number for op in loop.ops if op.verb == "compute"), None)
    if layer is None:
        return loop
    ops = [op for op in loop.ops if op.inner is None]
    # After what the tick takes, and before what it reads to update the layer.
    at = next((n + 1 for n, op in enumerate(ops) if op.record.kind == "gathered"), 0)
    tiles = [
        Op("tiles", Record("tiles", name), layer, "compute", inner=phase) for name, phase in inner
    ]
    return dataclasses.replace(loop, ops=(*ops[:at], *tiles, *ops[at:]))


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
    """Build the schedule of a step whose layers hold tiles.

    Args:
      num_layers: L.
      distance: ticks between the fetch of a record, layer or tile, and its use.
      groups: T by name of each group.
      group_bytes: bytes of one tile of each group on one device, by kind, as `record_bytes`.
      tiers: as `host_offload.build_schedule`.
      update: likewise.
      master: likewise.
      record_bytes: bytes of a layer's one record, tiles excluded.
      budget_bytes: the most bytes that may be in flight on a device.
      host: likewise.
      regathers: likewise.
      first_layer: likewise.

    Raises:
      ValueError: as `host_offload.build_schedule`.
    """
    # Activations are saved for a layer, never for a tile.
    of_tiles = {kind: tier for kind, tier in tiers.items() if kind != "activations"}

    def build(distance: int, gather_ahead: bool) -> TiledSchedule:
        make = partial(
            build_schedule,
            distance=distance,
            update=update,
            master=master,
            host=host,
            regathers=regathers,
        )
        layers = make(num_layers, tiers=tiers, record_bytes=record_bytes, first_layer=first_layer)
        tiles = []
        for (name, count), size in zip(groups.items(), group_bytes, strict=True):
            make_tiles = partial(make, tiers=of_tiles, record_bytes=size)
            inner, flat = (
                make_tiles(count),
                make_tiles(num_layers * count, first_layer=first_layer * count),
            )
            tiles.append(TileLoops(name=name, num_tiles=count, inner=inner, flat=flat))
        names = [loops.name for loops in tiles]
        runs = {
            "forward": [(name, "forward") for name in names],
            "backward": [(name, "backward") for name in names[::-1]],
        }
        fields = {field.name: getattr(layers, field.name) for field in dataclasses.fields(Schedule)}
        # `advise` passes it, but a step with tiles never gathers ahead.
        del gather_ahead
        return TiledSchedule(**fields, tiles=tuple(tiles)).with_tiles(runs)

    assert set(of_tiles) <= set(KINDS)
    schedule = build(distance, False)
    if budget_bytes is not None and schedule.peak_bytes > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes}: prefetch_distance={distance} puts {schedule.peak_bytes} bytes in flight on a "
            f"device, {schedule.peak_bytes - budget_bytes} more; "
            + advise(build, distance, (False,), budget_bytes)
        )
    return schedule
