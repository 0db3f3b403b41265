"""Phases of a train step as data: the layer that each tick fetches, takes, computes and stores.

A step over L equal layers is two or three passes, its **phases**, of L **ticks** each. One tick
computes one layer. If the layers are a part of a stack, they keep their numbers in the stack, which
start at `first_layer`; here it is 0:

    forward   0 .. L-1   the layer's output from its input
    backward  L-1 .. 0   its gradients; the layer is recomputed
    update    0 .. L-1   its parameters, once all gradients are known (their norm may scale them)

With update="in_backward" a backward tick also updates its layer, and there is no third phase. With
update="in_forward" a forward tick first updates its layer, with the gradients of the step before.

Records (the params, frozen params, grads, opt_state or activations of one layer) whose tier is not
"device" move while the step runs. `host_offload.schedule.phase_writer` writes each phase as a list
of operations (`host_offload.schedule.ops`), which the compiled step follows, so the order is data
and not code. Tick t of a loop does, in this order:

    take     consume[t], out of ring slot use_slot[t];
             forward and backward gather it: W[D_fsdp, F] -> W[D, F]
    fetch    fetch[t], into fetch_slot[t]; that slot has just been emptied,
             so fetch_slot[t] = use_slot[t]
    compute  layer[t], on the record that was taken
    store    store[t] = layer[t], the results of this tick

The **ring** has `distance` = d slots. Take number c empties slot c mod d, and the fetch in the same
tick refills that slot with the record of take c + d. So a record is taken exactly d ticks after its
fetch, the fetch can overlap with the computation of d ticks, and no slot is overwritten before it
is taken. The first d records are fetched before tick 0 (`preload`), the last d ticks fetch nothing,
and a loop leaves its ring empty. With fewer takes than d, all records are preloaded. With d = 0
there is no ring: fetch[t] is the record that tick t itself takes and waits for.

Without `gather_ahead` a tick takes the layer that it computes: consume = layer, only one layer is
gathered at a time, and the tick waits for its gather. With `gather_ahead` tick t takes and gathers
layer[t+1] while it computes layer[t]: two layers are gathered, `first` = layer[0] is taken before
tick 0, and the last tick takes nothing.

Dependencies: a computation waits for its take, a take for the fetch d ticks earlier, and a fetch
for the take from its slot. A fetch never waits for a store of its own loop: a loop reads a record
before it writes it, and never reads a record that it has written. The writes of an earlier loop are
complete before a later loop begins.

    phase     reads ahead (`fetches`)      reads in the tick  writes (`writes`)
                                           (`reads`)
    forward   params, frozen                                  activations
      or      grads, opt_state, params*,                      activations, opt_state, params
              frozen
    backward  params, frozen, activations                     grads
      or      params, frozen, activations  opt_state          opt_state, params
    update    grads, opt_state, params*                       opt_state, params

The second row of forward is for update="in_forward", the second row of backward for
update="in_backward". Only kinds off the device count. params*:
only if parameters have no float32 masters, because then the parameters themselves are updated. The
optimizer state of layers 0 .. device_layers-1 may stay on the device (a fractional offload): the
update phase visits these layers last, and fetches nothing for them unless another kind is off the
device. Forward visits them first. If it fetches no other kind, its first ticks take nothing, and
the ring waits, filled with the first layers whose state is off the device. In backward the
optimizer state is read in the tick that uses it: that copy overlaps with the tick's own derivative,
and so takes no slot.

**Late stores.** Updated records may be stored some ticks late. With a lag of 1, tick t stores the
records that tick t - 1 updated, store[t] = layer[t-1]: the stores use the opposite direction of the
link to the tick's loads, and in backward overlap with the tick's products. The first tick then
stores nothing, and the record of the last tick is stored after the loop (`drain`). An update phase
with late stores has no ring: each tick loads the record that it updates.

**Unstacked leaves** are updated during a phase with late stores. The gradients of leaves that
only the head uses are complete before backward, whose first tick stores nothing else: these leaves
are loaded before the loop and stored in that tick. If they are larger than a record, each of the
first ticks loads and updates one piece, and the next tick stores it. The gradients of the remaining
leaves are complete after the last tick: these leaves are loaded while the last tick's record is
drained, in groups, and each group is stored while the next is loaded. Leaves larger than a record
follow in pieces: one piece is stored while the next is loaded.

An update on the host stores gradients, and loads new parameters, by callbacks in the ticks that
compute the gradients.

All ticks count equally here. A schedule bounds layers and bytes; seconds have to be measured.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from host_offload.schedule.ops import KINDS, ON_DISK
from host_offload.schedule.phase import Phase
from host_offload.schedule.phase_text import build_strip, describe_moves, table_rows
from host_offload.schedule.timeline import Strip, draw_html, draw_svg, draw_text

UPDATES = ("after_backward", "in_backward", "in_forward")
# The valid keys of `record_bytes`.
SIZES = (
    "gathered",
    "derivative",
    "handed",
    "weights",
    "made",
    *KINDS,
    *(kind + ON_DISK for kind in KINDS),
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """The phases of one train step, as the module's docstring describes them.

    Attributes:
      num_layers: number of layers, L.
      distance: ticks between the fetch of a record and its use.
      update: "after_backward", "in_backward" or "in_forward".
      gather_ahead: whether the next layer is gathered while the current layer computes.
      master: whether parameters have float32 masters, stored and moved with opt_state.
      tiers: tier of every kind.
      device_layers: number of the first layer whose opt_state is in its tier; the opt_state of
        lower layers is on the device.
      phases: phases in the order in which they run.
      record_bytes: bytes of one layer per device by kind, with the additional keys of
        `build_schedule`; None if unknown.
      stream: the arrays between layers and their sharding, as shown in the table, such as
        "x[B_(data, fsdp), T_tensor, H]"; or "".
      first_layer: number of the lowest layer; a run within a stack has layers first_layer ..
        first_layer + L - 1.
    """

    num_layers: int
    distance: int
    update: str
    gather_ahead: bool
    master: bool
    tiers: Mapping[str, str]
    device_layers: int
    phases: tuple[Phase, ...]
    record_bytes: Mapping[str, int] | None
    stream: str = ""
    first_layer: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with dicts in place of mapping proxies."""
        sizes = None if self.record_bytes is None else dict(self.record_bytes)
        # A mapping proxy cannot be pickled.
        return {**vars(self), "tiers": dict(self.tiers), "record_bytes": sizes}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the pickled state, with mapping proxies in place of dicts."""
        sizes = state["record_bytes"]
        proxies = {
            "tiers": MappingProxyType(state["tiers"]),
            "record_bytes": sizes and MappingProxyType(sizes),
        }
        self.__dict__.update({**state, **proxies})

    def phase(self, name: str) -> Phase:
        """Return the phase with a name.

        Args:
          name: name of the phase, such as "forward".

        Raises:
          ValueError: this schedule has no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        names = ", ".join(phase.name for phase in self.phases)
        raise ValueError(
            f"phase {name!r}: a schedule with update={self.update!r} has the phases {names}"
        )

    @property
    def num_slots(self) -> int:
        """The number of slots in a ring: `distance`, or 0 if no phase has a ring."""
        return self.distance if any(len(phase.preload) for phase in self.phases) else 0

    @property
    def peak_layers(self) -> int:
        """The most layers in any tick that are computed, gathered, in the ring, or in flight."""
        return max(int(_layers(phase).max()) for phase in self.phases)

    def in_flight(self) -> dict[str, np.ndarray]:
        """Return the bytes in flight per device in each tick: phase name -> int64[T].

        They are the sum of

          - the ring with all its slots, and the record that arrives while the record that it
            replaces is in use;
          - the gathered layer, and with gather_ahead the next one, and the records that were taken
            for this layer a tick ago and that its gather has not used up (activations; params that
            the tick updates);
          - the records that the tick reads, and its results: new records, and activations that are
            stored in another tier;
          - in backward the layer's gradient, both unsharded and as stored, whatever the tier of
            gradients;
          - space for a record that is stored a tick late, and unstacked leaves in their ticks.

        Arrays that stay on the device, the temporaries of a layer's own computation, and the ticks
        before 0 are not counted.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        if self.record_bytes is None:
            raise ValueError(
                "this schedule holds no bytes: use program.operations(batch) for a program's "
                "bytes, or pass record_bytes to build_schedule"
            )
        return {phase.name: phase.in_flight() for phase in self.phases}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in flight per device in any tick of these loops over layers.

        A program's schedule knows neither the batch nor the embedding and the head;
        `StepPlan.peak_bytes` counts them too.

        Raises:
          ValueError: the schedule was built without record_bytes.
        """
        self.in_flight()  # raises ValueError without record_bytes
        return max(phase.peak_bytes for phase in self.phases)

    def title(self) -> str:
        """Return the title of a table or picture."""
        ahead = ", gather_ahead" if self.gather_ahead else ""
        size = f" ({self.peak_bytes:,} bytes)" if self.record_bytes else ""
        layers = "1 layer" if self.num_layers == 1 else f"{self.num_layers} layers"
        return (
            f"{layers}, distance {self.distance}{ahead}, at most {self.peak_layers} in flight{size}"
        )

    def __str__(self) -> str:
        """Return the title, a note for each phase, and a table with one row per tick."""
        lines = [self.title()]
        if self.stream:
            lines.append(f"between layers: {self.stream}")
        lines += [phase.name + describe_moves(phase) for phase in self.phases]
        lines.append(
            f"{'phase':<8} {'tick':>6} {'fetch':>7} {'slot':>7} {'take':>7} {'compute':>7} "
            f"{'store':>7}"
        )
        for phase in self.phases:
            lines += table_rows(phase)
        return "\n".join(lines)

    def strips(self) -> list[Strip]:
        """Return every phase as lanes of boxes."""
        return [build_strip(phase) for phase in self.phases]

    def timeline(self, width: int = 80) -> str:
        """Return the phases as text: one row per lane, one column per tick.

        The lanes are fetch, read, gather, compute, store and the ring slots. Every tick is one
        column wide, however long it takes. Idle lanes are omitted, and so are the middle ticks of a
        phase that does not fit.

        Args:
          width: characters per line.
        """
        return draw_text(self.title(), self.strips(), width)

    def timeline_svg(self) -> str:
        """Return all lanes of `timeline` as an SVG document, with a coloured box for each layer.

        The colour shows the kind. Every tick is drawn with the same width, however long it takes.
        """
        return draw_svg(self.title(), self.strips())

    def timeline_html(self) -> str:
        """Return a standalone HTML file with the SVG and the table."""
        return draw_html(self.title(), self.strips(), str(self))


def _layers(phase: Phase) -> np.ndarray:
    """Return the number of layers in each tick: computed, gathered ahead, or in the ring."""
    takes = phase.use_slot >= 0
    fetches = phase.fetch_slot >= 0
    # After each tick: the preloaded records, plus the fetches minus the takes so far.
    ring = len(phase.preload) + np.cumsum(fetches * 1 - takes)
    gathered_ahead = (phase.first >= 0) & (phase.consume >= 0)
    return 1 + ring + gathered_ahead
