"""A step of equal layers whose activations are kept, offloaded or recomputed: its seconds and bytes
for an assignment.

An assignment gives each layer one of the options of `layer_choices`. Three things work beside each
other, each in its own order: the device computes, the link's two ways move bytes up to the device
and down from it. Layers t = 0 .. L-1 in forward, their reverse in backward, l = L-1-k at tick k; a
ring of d slots is before what goes up (`host_offload.schedule`):

    arrived[t]     = max(arrived[t-1], computed[t-d]) + up_forward_bytes / link_up
    computed[t]    = max(computed[t-1], arrived[t]) + forward_seconds
    stored[t]      = max(stored[t-1], computed[t]) + host_bytes[t] / link_down

    B              = computed[L-1] + head_seconds
    fetched[k]     = max(fetched[k-1], taken[k-d], stored[l], computed[L-1]) + (host_bytes[l] + up_backward_bytes) / link_up
    taken[k]       = max(computed_b[k-1], fetched[k]),  with computed_b[-1] = B
    computed_b[k]  = taken[k] + backward_seconds + seconds[l]
    stored_b[k]    = max(stored_b[k-1], computed_b[k]) + down_backward_bytes / link_down
    total          = max(computed_b[L-1], stored_b[L-1])

A layer that stores nothing still waits for its turn: a loop of backward begins when the loop of
  forward has stored everything.
At the backward of layer l the device holds what layers 0 .. l keep, and what layer l fetches and
makes again; the end of forward holds no more than the backward of its last layer. So, from the last
layer to the first,

    peak[l] = device_bytes[l] + max(transient_bytes[l], peak[l+1]),   peak[L] = 0

and peak[0] is the most at any tick. Host memory holds the host_bytes of all layers at the end of
forward.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zerojax.choice.layer_choices import LayerOption

_AMOUNTS = (
    "backward_seconds",
    "head_seconds",
    "device_budget_bytes",
    "host_budget_bytes",
    "up_forward_bytes",
    "up_backward_bytes",
    "down_backward_bytes",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a choice among options depends on. Bytes and rates are those of one device, seconds
    those of one step.

    Attributes:
      num_layers: L, equal layers.
      options: of a layer.
      forward_seconds: of a layer, above 0.
      backward_seconds: of a layer, without what is recomputed.
      head_seconds: between the last layer's forward and its backward.
      link_down: bytes a second from the device to host memory.
      link_up: bytes a second from host memory to the device.
      distance: d, the ring's slots, at least 1.
      device_budget_bytes: of device memory for activations.
      host_budget_bytes: of host memory for activations.
      up_forward_bytes: of a layer's params, that go up for its forward.
      up_backward_bytes: of a layer's params and opt_state, that go up for its backward.
      down_backward_bytes: of a layer's grads, opt_state and params, that go down after its
        backward.
      max_segments: runs of neighbouring layers with one option each, at most; at least 1.

    Raises:
      ValueError: a count below 1, no option, or an amount that is negative or not finite.
    """

    num_layers: int
    options: tuple[LayerOption, ...]
    forward_seconds: float
    backward_seconds: float
    head_seconds: float = 0.0
    link_down: float
    link_up: float
    distance: int = 1
    device_budget_bytes: float
    host_budget_bytes: float = 0
    up_forward_bytes: float = 0
    up_backward_bytes: float = 0
    down_backward_bytes: float = 0
    max_segments: int = 4

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(
                "options is empty: a layer needs at least one, as `layer_options` returns them"
            )
        for name in ("num_layers", "distance", "max_segments"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("forward_seconds", "link_down", "link_up"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name}={getattr(self, name)}: a finite number above 0 is needed")
        for name in _AMOUNTS:
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(
                    f"{name}={getattr(self, name)}: a finite number, at least 0, is needed"
                )

    def of(self, name: str) -> np.ndarray:
        """Return one cost of the options, such as "host_bytes", by option: [P], float64."""
        return np.array([getattr(option, name) for option in self.options], float)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Bytes that a tier lacks for a choice: of `needed`, the tier has `had`."""

    tier: str
    needed: int
    had: int

    def __str__(self) -> str:
        return f"{self.tier}: {self.needed} bytes are needed, {self.needed - self.had} more than the {self.had} there are"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """How a choice was found.

    Attributes:
      text: what found it, and how its search ended.
      gap: how far, at most, `seconds` are above the least, as a share of them; infinite where no
        bound is known.
      seconds: of the search.
    """

    text: str
    gap: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An option for each layer, and what it costs.

    Attributes:
      assignment: index of the option, by layer.
      seconds: predicted, from the first layer's forward to the end of the last one's backward.
      device_bytes: the most at any tick.
      host_bytes: of all layers.
      missing: the tiers that have too little memory for it; empty where it fits.
      solver: how it was found.
    """

    assignment: tuple[int, ...]
    seconds: float
    device_bytes: int
    host_bytes: int
    missing: tuple[Missing, ...]
    solver: Solver

    @property
    def fits(self) -> bool:
        """Whether no tier lacks memory."""
        return not self.missing

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Runs of neighbouring layers with one option, first layer first: (num_layers, option
        index) of each.
        """
        return tuple((len(list(run)), option) for option, run in itertools.groupby(self.assignment))


def forward_times(problem: Problem) -> list[float]:
    """Return computed[t] of every layer: the same for all assignments."""
    arrived, computed = 0.0, []
    for t in range(problem.num_layers):
        free = computed[t - problem.distance] if t >= problem.distance else 0.0
        arrived = max(arrived, free) + problem.up_forward_bytes / problem.link_up
        computed.append(max(computed[-1] if computed else 0.0, arrived) + problem.forward_seconds)
    return computed


def predicted_seconds(problem: Problem, assignment: Sequence[int]) -> float:
    """Return the seconds of forward, head and backward, by the module's equations.

    Args:
      problem: of the layers.
      assignment: index of the option, by layer.

    Raises:
      ValueError: not as many layers as the problem has, or an option that it has not.
    """
    return float(seconds_of(problem, _checked(problem, assignment))[0])


def seconds_of(problem: Problem, assignments: np.ndarray) -> np.ndarray:
    """Return `predicted_seconds` of many assignments at once: int [N, L] -> float64 [N]."""
    L, d = problem.num_layers, problem.distance
    host = problem.of("host_bytes")
    down, up = host / problem.link_down, (host + problem.up_backward_bytes) / problem.link_up
    again, after = (
        problem.backward_seconds + problem.of("seconds"),
        problem.down_backward_bytes / problem.link_down,
    )
    by_layer = np.ascontiguousarray(assignments.T)  # [L, N]
    computed = forward_times(problem)
    stored: list[Any] = [np.zeros(len(assignments))]
    for t, option in enumerate(by_layer):
        stored.append(np.maximum(stored[-1], computed[t]) + down[option])
    fetched: Any = computed[-1]
    computed_b: Any = computed[-1] + problem.head_seconds
    stored_b: Any = 0.0
    taken: list[Any] = []
    for k, option in enumerate(by_layer[::-1]):
        free = taken[k - d] if k >= d else 0.0
        fetched = np.maximum(np.maximum(fetched, free), stored[L - k]) + up[option]
        taken.append(np.maximum(computed_b, fetched))
        computed_b = taken[k] + again[option]
        stored_b = np.maximum(stored_b, computed_b) + after
    return np.maximum(computed_b, stored_b)


def bytes_of(problem: Problem, assignments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the peak of device bytes and the host bytes of many assignments: int [N, L] -> two of
    float64 [N].
    """
    device, transient = problem.of("device_bytes"), problem.of("transient_bytes")
    peak = np.zeros(len(assignments))
    for option in assignments.T[::-1]:
        peak = device[option] + np.maximum(transient[option], peak)
    return peak, problem.of("host_bytes")[assignments].sum(axis=1)


def choice_of(problem: Problem, assignment: Sequence[int], solver: Solver) -> Choice:
    """Return an assignment as a choice, with its seconds and bytes; arguments and errors as of
    `predicted_seconds`.
    """
    at = _checked(problem, assignment)
    peak, host = (int(values[0]) for values in bytes_of(problem, at))
    budgets = (
        ("device", peak, int(problem.device_budget_bytes)),
        ("pinned_host", host, int(problem.host_budget_bytes)),
    )
    return Choice(
        assignment=tuple(int(option) for option in at[0]),
        seconds=float(seconds_of(problem, at)[0]),
        device_bytes=peak,
        host_bytes=host,
        missing=tuple(
            Missing(tier=tier, needed=needed, had=had)
            for tier, needed, had in budgets
            if needed > had
        ),
        solver=solver,
    )


def uniform(problem: Problem) -> list[Choice]:
    """Return, by option, the choice in which all layers take it, whether it fits or not."""
    solver = Solver(text="one option for all layers", gap=math.inf, seconds=0.0)
    return [
        choice_of(problem, [option] * problem.num_layers, solver)
        for option in range(len(problem.options))
    ]


def _checked(problem: Problem, assignment: Sequence[int]) -> np.ndarray:
    if len(assignment) != problem.num_layers:
        raise ValueError(
            f"an assignment of {len(assignment)} layers: the problem has {problem.num_layers}"
        )
    if wrong := [option for option in assignment if not 0 <= option < len(problem.options)]:
        raise ValueError(f"option {wrong[0]}: the problem has {len(problem.options)}, from 0")
    return np.array([assignment], int)
