"""The assignment that needs the least device memory at its peak with the host memory that there is:
it tells if any fits.

From the last layer to the first, an assignment's peak and host bytes (`choice_problem`) follow from
those of the layers above:

    peak[l] = device_bytes[l] + max(transient_bytes[l], peak[l+1])        host[l] = host_bytes[l] + host[l+1]

Both rise with what is above, so of the assignments of layers l .. L-1 that begin with the same
option and have as many segments, those with more of both lead to nothing better. What is left is a
front of (peak, host) for each option and number of segments, made layer after layer. This is exact;
a front has at most as many entries as there are sums of host bytes.
"""

from typing import NamedTuple

import numpy as np

from zerojax.choice.choice_problem import Problem


class _Front(NamedTuple):
    """Assignments of layers l .. L-1, each by its costs and by the entry of layer l+1 that it goes
    on with.

    All arrays are [N]: `segments`, `option` and `entry` say which entry of which front of layer
      l+1.
    """

    peak: np.ndarray
    host: np.ndarray
    segments: np.ndarray
    option: np.ndarray
    entry: np.ndarray

    def take(self, rows: np.ndarray) -> "_Front":
        return _Front(*(column[rows] for column in self))


_Fronts = dict[tuple[int, int], _Front]  # by (most segments, option of layer l)


def least_peak(problem: Problem) -> list[int] | None:
    """Return the assignment with the least peak of device bytes whose host bytes fit, or None if no
    host bytes do.

    It has at most `max_segments` segments. It fits if any does.

    Args:
      problem: of the layers.
    """
    most = min(problem.max_segments, problem.num_layers)
    options = range(len(problem.options))
    costs = problem.of("device_bytes"), problem.of("transient_bytes"), problem.of("host_bytes")
    start = _Front(*np.zeros((2, 1)), *np.zeros((3, 1), int))
    layers: list[_Fronts] = [{(s, p): start for s in range(1, most + 1) for p in options}]
    for above in range(problem.num_layers):  # layers above that are assigned
        budget = problem.host_budget_bytes - (problem.num_layers - 1 - above) * costs[2].min()
        layers.append(_layer_before(layers[-1], most, len(options), costs, budget))
    return _traced(layers, most, len(options))


def _layer_before(
    above: _Fronts, most: int, num_options: int, costs: tuple[np.ndarray, ...], budget: float
) -> _Fronts:
    """Return the fronts of layer l from those of layer l+1, without what has more host bytes than
    the budget.
    """
    device, transient, host = costs
    fronts: _Fronts = {}
    for s in range(1, most + 1):
        changed = [_pointed(above[s - 1, p], s - 1, p) for p in range(num_options)] if s > 1 else []
        common = [_undominated(_joined(changed))] if changed else []
        for p in range(num_options):
            joined = _joined([_pointed(above[s, p], s, p), *common])
            peak, host_bytes = (
                device[p] + np.maximum(transient[p], joined.peak),
                joined.host + host[p],
            )
            fits = host_bytes <= budget
            fronts[s, p] = _undominated(joined._replace(peak=peak, host=host_bytes).take(fits))
    return fronts


def _pointed(front: _Front, segments: int, option: int) -> _Front:
    """Return a front whose entries name themselves as what goes on."""
    size = len(front.peak)
    return _Front(
        front.peak, front.host, np.full(size, segments), np.full(size, option), np.arange(size)
    )


def _joined(fronts: list[_Front]) -> _Front:
    return _Front(*(np.concatenate(columns) for columns in zip(*fronts, strict=True)))


def _undominated(front: _Front) -> _Front:
    order = np.lexsort((front.host, front.peak))
    least = np.minimum.accumulate(front.host[order])
    is_less = np.ones(len(order), bool)
    is_less[1:] = least[1:] < least[:-1]
    return front.take(order[is_less])


def _traced(layers: list[_Fronts], most: int, num_options: int) -> list[int] | None:
    """Return the assignment of the least peak, of which `layers` are the fronts, last layer first
    after one of no layer.
    """
    firsts = [
        (front.peak[0], front.host[0], p)
        for p in range(num_options)
        if len((front := layers[-1][most, p]).peak)
    ]
    if not firsts:
        return None
    segments, option, entry = most, min(firsts)[2], 0
    assignment = []
    for fronts in reversed(layers[1:]):
        assignment.append(int(option))
        front = fronts[int(segments), int(option)]
        segments, option, entry = front.segments[entry], front.option[entry], front.entry[entry]
    return assignment
