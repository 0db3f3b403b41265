"""Rates, seconds and results that `zerojax.costs.timing` takes and returns, as data."""

import dataclasses
from collections.abc import Mapping

from host_offload.schedule import LANES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """Rates at which one device can use its host link and its disk, in bytes per second.

    Attributes:
      up: rate from host to device.
      down: rate from device to host.
      link_both: rate with both directions busy, summed.
      read: read rate of the disk; this device's part if several devices share the disk.
      write: write rate of the disk, shared in the same way.
      disk_both: rate with reads and writes both active, summed.
      shares_cores: whether the device is a CPU, whose cores also copy and run the host update.
    """

    up: float = float("inf")
    down: float = float("inf")
    link_both: float = float("inf")
    read: float = float("inf")
    write: float = float("inf")
    disk_both: float = float("inf")
    shares_cores: bool = False

    def times(self, *, link: float = 1.0, disk: float = 1.0) -> "Wires":
        """Return wires whose link rates and disk rates are multiplied by the given factors."""
        return dataclasses.replace(
            self,
            up=self.up * link,
            down=self.down * link,
            link_both=self.link_both * link,
            read=self.read * disk,
            write=self.write * disk,
            disk_both=self.disk_both * disk,
        )

    def sharing(self, moved: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each lane, in bytes per second.

        `moved` is the number of bytes that move in each lane during the same time.
        """
        rates = {"up": self.up, "down": self.down, "read": self.read, "write": self.write}
        wires = (("up", "down", self.link_both), ("read", "write", self.disk_both))
        for lane, opposite, both in wires:
            a = moved.get(lane, 0.0)
            b = moved.get(opposite, 0.0)
            if a and b and both < rates[lane] + rates[opposite]:
                rates[lane] = min(rates[lane], both * a / (a + b))
                rates[opposite] = min(rates[opposite], both * b / (a + b))
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Seconds of one layer on one device, over all its microbatches.

    Attributes:
      forward: seconds of forward compute.
      backward: seconds of backward compute, including recomputation.
      update: seconds of the optimizer on the device.
      gather: seconds of one gather of the parameters.
      reduce: seconds of reducing the gradients.
      regather: seconds of the gather after an update, at stages 1 and 2.
      host: seconds of the host update.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    regather: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation, by its verb and the name of its phase.

        Operations without an entry take no time.
        """
        seconds = {
            ("compute", "forward"): self.forward,
            ("compute", "backward"): self.backward,
            ("gather", "forward"): self.gather,
            ("gather", "backward"): self.gather,
            ("reduce", "backward"): self.reduce,
        }
        for phase in ("forward", "backward", "update"):
            seconds["update", phase] = self.update
            seconds["host_update", phase] = self.host
            seconds["regather", phase] = self.regather
        return seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnstackedWork:
    """Seconds of embedding and head on one device.

    Attributes:
      embed: seconds of the embedding's forward.
      head: seconds of the head's forward and backward.
      embed_backward: seconds of the embedding's backward.
      update: seconds of the optimizer on the device.
      gather: seconds of one gather of embedding or head; each is gathered twice.
      reduce: seconds of reducing the gradients.
      host: seconds of the host update.
    """

    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    update: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    host: float = 0.0

    def seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds of an operation, by its verb and the name of its phase."""
        return {
            ("compute", "embed"): self.embed,
            ("compute", "head"): self.head,
            ("compute", "embed_backward"): self.embed_backward,
            ("gather", "embed"): self.gather,
            ("gather", "head"): self.gather,
            ("gather", "embed_backward"): self.gather,
            ("reduce", "embed_backward"): self.reduce,
            ("update", "unstacked"): self.update,
            ("host_update", "unstacked"): self.host,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a lane.

    Attributes:
      lane: lane that does the work.
      label: description of the work.
      start: second of the step at which it begins.
      stop: second of the step at which it ends.
      layer: index of the layer in the model, or -1 if the work belongs to no layer.
    """

    lane: str
    label: str
    start: float
    stop: float
    layer: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """One part of a step.

    Attributes:
      name: name of the part.
      start: second of the step at which it begins.
      stop: second of the step at which it ends.
      bound_by: lane that bounds the part: it works, or is waited for, the longest.
    """

    name: str
    start: float
    stop: float
    bound_by: str

    @property
    def seconds(self) -> float:
        """Seconds from start to stop."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
      seconds: seconds of the step.
      busy: seconds that each lane works.
      exposed: seconds that the device's cores wait for each lane; for "compute", the seconds that
        they compute. The values sum to `seconds`.
      phases: parts of the step in order, with the lane that bounds each.
      spans: work of every lane.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    phases: tuple[PhaseTime, ...]
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds that each lane works while the cores do not wait for it."""
        # Where loops overlap (`_StepWalk.wait_for_wires`), the cores may wait longer than a lane
        # works.
        hidden = {lane: max(0.0, self.busy[lane] - self.exposed[lane]) for lane in LANES}
        return hidden | {"compute": 0.0}

    @property
    def bound_by(self) -> str:
        """The lane that works, or is waited for, the longest.

        With all other lanes infinitely fast, the step would take as long.
        """
        return max(LANES, key=lambda lane: max(self.busy[lane], self.exposed[lane]))

    def __str__(self) -> str:
        """Return busy, hidden and exposed seconds of each lane as a table."""
        rows = [f"{'':<10} {'busy s':>10} {'hidden s':>10} {'exposed s':>10}"]
        for lane in LANES:
            if self.busy[lane] or self.exposed[lane]:
                rows.append(
                    f"{lane:<10} {self.busy[lane]:>10.4f} {self.hidden[lane]:>10.4f} "
                    f"{self.exposed[lane]:>10.4f}"
                )
        phases = ", ".join(
            f"{p.name} {p.seconds:.4f} s ({p.bound_by})" for p in self.phases if p.seconds
        )
        return "\n".join([f"{self.seconds:.4f} s a step, predicted: {phases}", *rows])
