"""Seconds and bytes of a step whose equal layers keep, offload or recompute their activations.

An assignment gives each layer one of the options of `layer_choices`. Three lanes work in parallel,
each in its own order: the device computes, and the link moves bytes up to the device and down from
it. Layers are t = 0 .. L-1 in forward and in reverse order in backward, so l = L-1-k at tick k.
Uploads pass through a ring of d slots (`host_offload.schedule`):

    arrived[t]     = max(arrived[t-1], computed[t-d]) + up_forward_bytes / link_up
    computed[t]    = max(computed[t-1], arrived[t]) + forward_seconds
    stored[t]      = max(stored[t-1], computed[t])
                     + (host_bytes[t] + down_forward_bytes) / link_down

    B              = computed[L-1] + head_seconds
    fetched[k]     = max(fetched[k-1], begun[k-d], stored[l], computed[L-1])
                     + (host_bytes[l] + up_backward_bytes) / link_up
    begun[k]       = max(computed_b[k-1], fetched[k]),  with computed_b[-1] = B
    computed_b[k]  = begun[k] + backward_seconds + seconds[l]
    stored_b[k]    = max(stored_b[k-1], computed_b[k]) + down_backward_bytes / link_down
    total          = max(computed_b[L-1], stored_b[L-1])

A layer that stores nothing still waits for its turn: the backward loop starts after the forward
loop has stored everything.

During the backward of layer l, the device holds what layers 0 .. l keep, plus what layer l fetches
and recomputes. The end of forward holds no more than the backward of the last layer. From the last
layer to the first, therefore,

    peak[l] = device_bytes[l] + max(transient_bytes[l], peak[l+1]),   peak[L] = 0

and peak[0] is the peak over all ticks. Host memory holds the host_bytes of all layers at the end of
forward.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from zerojax.choice.layer_choices import LayerOption

_AMOUNTS = (
    "backward_seconds",
    "head_seconds",
    "device_budget_bytes",
    "host_budget_bytes",
    "up_forward_bytes",
    "down_forward_bytes",
    "up_backward_bytes",
    "down_backward_bytes",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Inputs of the choice: layers, options, rates and budgets.

    Bytes and rates are per device, in bytes and bytes per second; seconds are per step.

    Attributes:
      num_layers: L, number of equal layers.
      options: options that each layer chooses from.
      forward_seconds: seconds of a layer's forward, above 0.
      backward_seconds: seconds of a layer's backward, without recomputation.
      head_seconds: seconds between the last layer's forward and its backward.
      link_down: bytes per second from the device to host memory.
      link_up: bytes per second from host memory to the device.
      distance: d, number of slots in the prefetch ring, at least 1.
      device_budget_bytes: bytes of device memory available for activations.
      host_budget_bytes: bytes of host memory available for activations.
      up_forward_bytes: bytes per layer of params, or of all that an update in forward reads,
        loaded for its forward.
      down_forward_bytes: bytes per layer of opt_state and params that an update in forward stores.
      up_backward_bytes: bytes per layer of params and opt_state loaded for its backward.
      down_backward_bytes: bytes per layer of grads, opt_state and params stored after its backward.
      max_segments: largest number of segments (runs of neighbouring layers with one option), at
        least 1.

    Raises:
      ValueError: a count is below 1, there is no option, or an amount is negative or not finite.
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
    down_forward_bytes: float = 0
    up_backward_bytes: float = 0
    down_backward_bytes: float = 0
    max_segments: int = 4

    def __post_init__(self) -> None:
        """Check all counts and amounts."""
        if not self.options:
            raise ValueError(
                "options is empty: pass at least one option, such as the result of `layer_options`"
            )
        for name in ("num_layers", "distance", "max_segments"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is needed")
        for name in ("forward_seconds", "link_down", "link_up"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: a finite number above 0 is needed")
        for name in _AMOUNTS:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: a finite number, at least 0, is needed")

    def of(self, name: str) -> np.ndarray:
        """Return one cost of all options, such as "host_bytes": float64 [P]."""
        return np.array([getattr(option, name) for option in self.options], float)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Bytes that a tier lacks for a choice.

    Attributes:
      tier: name of the tier, "device" or "pinned_host".
      needed: bytes that the choice needs.
      had: bytes that the tier has.
    """

    tier: str
    needed: int
    had: int

    def __str__(self) -> str:
        """Return the tier, the needed bytes and the missing bytes as text."""
        return (
            f"{self.tier}: {self.needed} bytes are needed, "
            f"{self.needed - self.had} more than the {self.had} available"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """How a choice was found.

    Attributes:
      text: description of the search, and how it ended.
      gap: upper bound on the choice's excess over the least seconds, as a fraction of the
        choice's seconds; infinite if no bound is known.
      seconds: seconds that the search took.
    """

    text: str
    gap: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An option for each layer, and the resulting seconds and bytes.

    Attributes:
      assignment: index of each layer's option, first layer first.
      seconds: predicted seconds from the first layer's forward to the end of its backward.
      device_bytes: peak bytes of device memory over all ticks.
      host_bytes: bytes of host memory, summed over all layers.
      missing: tiers with too little memory for the choice; empty if it fits.
      solver: how the choice was found.
    """

    assignment: tuple[int, ...]
    seconds: float
    device_bytes: int
    host_bytes: int
    missing: tuple[Missing, ...]
    solver: Solver

    @property
    def fits(self) -> bool:
        """Whether every tier has enough memory."""
        return not self.missing

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Segments of neighbouring layers with one option, first layer first.

        Each is (num_layers, option index).
        """
        return tuple((len(list(run)), option) for option, run in itertools.groupby(self.assignment))


def forward_times(problem: Problem) -> list[float]:
    """Return computed[t] of every layer, in seconds, which is the same for all assignments."""
    d = problem.distance
    arrived = 0.0
    end = 0.0
    computed = list[float]()
    for t in range(problem.num_layers):
        slot_free = computed[t - d] if t >= d else 0.0
        arrived = max(arrived, slot_free) + problem.up_forward_bytes / problem.link_up
        end = max(end, arrived) + problem.forward_seconds
        computed.append(end)
    return computed


def predicted_seconds(problem: Problem, assignment: Sequence[int]) -> float:
    """Return the seconds of forward, head and backward, by the module's equations.

    Args:
      problem: the layers and their options.
      assignment: index of each layer's option, first layer first.

    Raises:
      ValueError: the assignment has a wrong number of layers or an invalid option index.
    """
    return float(compute_seconds(problem, _checked(problem, assignment))[0])


def compute_seconds(problem: Problem, assignments: np.ndarray) -> np.ndarray:
    """Return `predicted_seconds` of many assignments: int [N, L] -> float64 [N]."""
    L = problem.num_layers
    d = problem.distance
    host = problem.of("host_bytes")
    down = (host + problem.down_forward_bytes) / problem.link_down
    up = (host + problem.up_backward_bytes) / problem.link_up
    backward = problem.backward_seconds + problem.of("seconds")
    down_backward = problem.down_backward_bytes / problem.link_down
    by_layer = np.ascontiguousarray(assignments.T)  # [L, N]
    computed = forward_times(problem)
    num_assignments = len(assignments)
    stored = [np.zeros(num_assignments)]
    for t, option in enumerate(by_layer):
        stored.append(np.maximum(stored[-1], computed[t]) + down[option])

    fetched = np.full(num_assignments, computed[-1])
    computed_b = np.full(num_assignments, computed[-1] + problem.head_seconds)
    stored_b = np.zeros(num_assignments)
    begun = list[np.ndarray]()
    for k, option in enumerate(by_layer[::-1]):
        if k >= d:
            fetched = np.maximum(fetched, begun[k - d])
        fetched = np.maximum(fetched, stored[L - k]) + up[option]
        begun.append(np.maximum(computed_b, fetched))
        computed_b = begun[k] + backward[option]
        stored_b = np.maximum(stored_b, computed_b) + down_backward
    return np.maximum(computed_b, stored_b)


def compute_bytes(problem: Problem, assignments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the peak device bytes and the host bytes of many assignments: int [N, L] -> 2 x [N].

    Both results are float64.
    """
    device = problem.of("device_bytes")
    transient = problem.of("transient_bytes")
    peak = np.zeros(len(assignments))
    for option in assignments.T[::-1]:
        peak = device[option] + np.maximum(transient[option], peak)
    return peak, problem.of("host_bytes")[assignments].sum(axis=1)


def build_choice(problem: Problem, assignment: Sequence[int], solver: Solver) -> Choice:
    """Return an assignment as a `Choice`, with its seconds and bytes.

    Args:
      problem: the layers and their options.
      assignment: index of each layer's option, first layer first.
      solver: how the assignment was found.

    Raises:
      ValueError: the assignment has a wrong number of layers or an invalid option index.
    """
    assignments = _checked(problem, assignment)
    peaks, hosts = compute_bytes(problem, assignments)
    peak = int(peaks[0])
    host = int(hosts[0])
    tiers = (
        Missing(tier="device", needed=peak, had=int(problem.device_budget_bytes)),
        Missing(tier="pinned_host", needed=host, had=int(problem.host_budget_bytes)),
    )
    return Choice(
        assignment=tuple(int(option) for option in assignments[0]),
        seconds=float(compute_seconds(problem, assignments)[0]),
        device_bytes=peak,
        host_bytes=host,
        missing=tuple(tier for tier in tiers if tier.needed > tier.had),
        solver=solver,
    )


def uniform(problem: Problem) -> list[Choice]:
    """Return, for each option, the choice in which all layers take it, whether or not it fits."""
    solver = Solver(text="one option for all layers", gap=math.inf, seconds=0.0)
    return [
        build_choice(problem, [option] * problem.num_layers, solver)
        for option in range(len(problem.options))
    ]


def _checked(problem: Problem, assignment: Sequence[int]) -> np.ndarray:
    """Return a valid assignment as an array: int [1, L]."""
    if len(assignment) != problem.num_layers:
        raise ValueError(
            f"the assignment has {len(assignment)} layers, but the problem has {problem.num_layers}"
        )
    if wrong := [option for option in assignment if not 0 <= option < len(problem.options)]:
        raise ValueError(
            f"unknown option {wrong[0]}: the problem has {len(problem.options)} options, "
            "counted from 0"
        )
    return np.array([assignment], int)
