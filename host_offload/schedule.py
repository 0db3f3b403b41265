"""Which layer is fetched, computed and released at each tick of a train step: a pure function, printable as a table.

One tick computes one layer. The forward pass visits layers 0 .. L-1, the backward pass L-1 .. 0; each tick needs its layer's
parameters whole (gathered), so a layer is fetched twice a step. `fetch[t]` names the layer whose gather is issued during
tick t, which is the layer needed `distance` ticks later; -1 means none. The loops of a step read these arrays, so an order is
data and not code.

The resident step gathers a layer in the tick that uses it: distance 0, one gathered layer live.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The ticks of one train step.

    Attributes:
      num_layers: L.
      distance: ticks between the fetch of a layer and its use.
      phase: str[ticks], "forward" or "backward".
      compute: int32[ticks], the layer computed.
      fetch: int32[ticks], the layer whose fetch starts, or -1.
      preload: int32[distance or fewer], layers fetched before tick 0.
    """

    num_layers: int
    distance: int
    phase: np.ndarray
    compute: np.ndarray
    fetch: np.ndarray
    preload: np.ndarray

    @property
    def peak_layers(self) -> int:
        """Return the largest number of layers that are whole, or on their way, during one tick."""
        fetched = len(self.preload) + np.cumsum(self.fetch >= 0)
        released = np.arange(len(self.compute))
        return int((fetched - released).max())

    def __str__(self) -> str:
        head = f"{self.num_layers} layers, distance {self.distance}, at most {self.peak_layers} whole at a time"
        rows = [f"{'tick':>5} {'phase':<9} {'fetch':>6} {'compute':>8} {'release':>8}"]
        rows += [f"{'':>5} {'before':<9} {layer:>6} {'':>8} {'':>8}" for layer in self.preload]
        for tick, (phase, fetch, layer) in enumerate(zip(self.phase, self.fetch, self.compute, strict=True)):
            rows.append(f"{tick:>5} {phase:<9} {fetch if fetch >= 0 else '-':>6} {layer:>8} {layer:>8}")
        return "\n".join([head, *rows])


def build_schedule(num_layers: int, distance: int = 0) -> Schedule:
    """Build the schedule of a forward and a backward pass over `num_layers` layers.

    Raises:
      ValueError: no layers, or a negative distance.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers}: at least 1 is needed")
    if distance < 0:
        raise ValueError(f"distance={distance}: 0 or more is needed")
    forward = np.arange(num_layers, dtype=np.int32)
    compute = np.concatenate([forward, forward[::-1]])
    nothing = np.full(min(distance, len(compute)), -1, np.int32)
    return Schedule(
        num_layers=num_layers,
        distance=distance,
        phase=np.repeat(["forward", "backward"], num_layers),
        compute=compute,
        fetch=np.concatenate([compute[distance:], nothing]),
        preload=compute[:distance],
    )
