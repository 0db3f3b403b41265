"""The assignment with the least peak of device memory within the host budget.

It decides whether any assignment fits. From the last layer to the first, an assignment's peak and
host bytes (`choice_problem`) follow from the values of the next layer:

    peak[l] = device_bytes[l] + max(transient_bytes[l], peak[l+1])
    host[l] = host_bytes[l] + host[l+1]

Both rise with the next layer's values. So among assignments of layers l .. L-1 that begin with the
same option and have the same number of segments, an assignment with more of both leads to nothing
better. That leaves a front of (peak, host) for each option and number of segments, built layer by
layer. The method is exact; a front has at most as many entries as there are sums of host bytes.
"""

import itertools
from typing import NamedTuple

import numpy as np

from zerojax.choice.choice_problem import Problem


class _Front(NamedTuple):
    """Assignments of layers l .. L-1, with their costs and their continuations in layer l+1.

    All arrays are [N]. `segments` and `option` select a front of layer l+1, `entry` a row of it.
    """

    peak: np.ndarray
    host: np.ndarray
    segments: np.ndarray
    option: np.ndarray
    entry: np.ndarray

    def take(self, rows: np.ndarray) -> "_Front":
        """Return some rows."""
        return _Front(*(column[rows] for column in self))


class _Costs(NamedTuple):
    """Bytes of each option, as in `LayerOption`. All arrays are [P]."""

    device: np.ndarray
    transient: np.ndarray
    host: np.ndarray


_Fronts = dict[tuple[int, int], _Front]  # by (most segments, option of layer l)


def least_peak(problem: Problem) -> list[int] | None:
    """Return the assignment with the least peak of device bytes whose host bytes fit, or None.

    It has at most `max_segments` segments, and fits if any assignment fits. The result is None if
    no assignment fits in host memory.

    Args:
      problem: the layers, their options and budgets.
    """
    num_layers = problem.num_layers
    most = min(problem.max_segments, num_layers)
    num_options = len(problem.options)
    costs = _Costs(
        device=problem.of("device_bytes"),
        transient=problem.of("transient_bytes"),
        host=problem.of("host_bytes"),
    )
    start = _Front(*np.zeros((2, 1)), *np.zeros((3, 1), int))
    keys = itertools.product(range(1, most + 1), range(num_options))
    layers: list[_Fronts] = [dict.fromkeys(keys, start)]
    for num_assigned in range(num_layers):
        num_left = num_layers - 1 - num_assigned
        budget = problem.host_budget_bytes - num_left * costs.host.min()
        layers.append(_layer_before(layers[-1], most, costs, budget))
    return _traced(layers, most, num_options)


def _layer_before(above: _Fronts, most: int, costs: _Costs, budget: float) -> _Fronts:
    """Return the fronts of layer l from the fronts of layer l+1.

    Entries with more host bytes than `budget` are dropped.
    """
    options = range(len(costs.device))
    fronts: _Fronts = {}
    for s in range(1, most + 1):
        common = list[_Front]()  # continuations in which layer l+1 begins another segment
        if s > 1:
            changed = [_pointed(above[s - 1, p], s - 1, p) for p in options]
            common = [_undominated(_joined(changed))]
        for p in options:
            joined = _joined([_pointed(above[s, p], s, p), *common])
            peak = costs.device[p] + np.maximum(costs.transient[p], joined.peak)
            host_bytes = joined.host + costs.host[p]
            fits = host_bytes <= budget
            fronts[s, p] = _undominated(joined._replace(peak=peak, host=host_bytes).take(fits))
    return fronts


def _pointed(front: _Front, segments: int, option: int) -> _Front:
    """Return a front whose entries point to themselves as their continuation."""
    size = len(front.peak)
    return _Front(
        front.peak, front.host, np.full(size, segments), np.full(size, option), np.arange(size)
    )


def _joined(fronts: list[_Front]) -> _Front:
    """Return the entries of several fronts as one."""
    return _Front(*(np.concatenate(columns) for columns in zip(*fronts, strict=True)))


def _undominated(front: _Front) -> _Front:
    """Return the undominated entries, by rising peak."""
    order = np.lexsort((front.host, front.peak))
    least = np.minimum.accumulate(front.host[order])
    is_less = np.ones(len(order), bool)
    is_less[1:] = least[1:] < least[:-1]
    return front.take(order[is_less])


def _traced(layers: list[_Fronts], most: int, num_options: int) -> list[int] | None:
    """Return the assignment with the least peak, or None if no assignment is left.

    Args:
      layers: fronts, starting with the empty front, then from the last layer to layer 0.
      most: largest number of segments.
      num_options: number of options of a layer.
    """
    best_entries = list[tuple[float, float, int]]()
    for p in range(num_options):
        front = layers[-1][most, p]
        if len(front.peak):
            best_entries.append((front.peak[0], front.host[0], p))
    if not best_entries:
        return None
    segments = most
    _, _, option = min(best_entries)
    entry = 0
    assignment = list[int]()
    for fronts in reversed(layers[1:]):
        assignment.append(int(option))
        front = fronts[int(segments), int(option)]
        segments = front.segments[entry]
        option = front.option[entry]
        entry = front.entry[entry]
    return assignment
