"""A good assignment within a second or two, without a solver.

The search starts from all pairs of options with every possible bound between them, such as "offload
the first layers, keep the last". From the best few pairs, a descent tries many ways of giving
neighbouring layers another option, applies the best change, and stops when no change is better.
Better means fewer bytes over the budgets, then fewer seconds (`choice_problem`). A change can move,
split or merge segments or give a segment another option, but never leaves more than `max_segments`.

A descent can end in an assignment that does not fit although another one would. Then `least_peak`
decides whether anything fits, and the descent restarts from its assignment. So the result fits if
any assignment fits.
"""

import itertools
import math
import time
from collections.abc import Iterable

import numpy as np

from zerojax.choice.choice_problem import (
    Choice,
    Problem,
    Solver,
    build_choice,
    compute_bytes,
    compute_seconds,
)
from zerojax.choice.least_bytes import least_peak

_STARTS = 4
_GRID = 16


def by_greedy(problem: Problem) -> Choice:
    """Return a good assignment of at most `max_segments` segments.

    It fits if any assignment fits. Otherwise the assignment with the least peak of device bytes is
    returned, with the missing bytes. If even host memory is too small for every assignment, the one
    with the fewest host bytes is returned.

    Args:
      problem: the layers, their options and budgets.
    """
    begin = time.perf_counter()
    assignments = [_descend(problem, start) for start in _starts(problem)]
    best = assignments[_best(problem, np.array(assignments))]
    if _excess(problem, best[None])[0] > 0:
        least = least_peak(problem)
        if least is None:
            least = [int(problem.of("host_bytes").argmin())] * problem.num_layers
        best = np.array(least)
        if _excess(problem, best[None])[0] == 0:
            best = _descend(problem, best)
    solver = Solver(
        text="greedy: descent from two segments",
        gap=math.inf,
        seconds=time.perf_counter() - begin,
    )
    return build_choice(problem, best.tolist(), solver)


def _starts(problem: Problem) -> list[np.ndarray]:
    """Return the best uniform assignment, and the best few with two different options.

    Each pair of options contributes at most one assignment, with the best bound between them.
    """
    L = problem.num_layers
    options = range(len(problem.options))
    uniform = np.array([[p] * L for p in options])
    starts = [uniform[_best(problem, uniform)]]
    if problem.max_segments == 1 or L == 1:
        return starts
    is_first = np.arange(L) < np.arange(1, L)[:, None]  # [bounds, L]
    pairs = [np.where(is_first, p, q) for p, q in itertools.permutations(options, 2)]
    best_pairs = [pair[_best(problem, pair)] for pair in pairs]
    while best_pairs and len(starts) <= _STARTS:
        starts.append(best_pairs.pop(_best(problem, np.array(best_pairs))))
    return starts


def _descend(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """Return the assignment after repeatedly applying the best change, until none is better."""
    while True:
        candidates = _neighbours(problem, assignment)
        best = candidates[_best(problem, candidates)]
        if (best == assignment).all():
            return assignment
        assignment = best


def _neighbours(problem: Problem, assignment: np.ndarray) -> np.ndarray:
    """Return the assignment and its neighbours: [N, L].

    In a neighbour, layers i .. j-1 take another option. One of i and j is the bound of a segment
    and the other is arbitrary, or both are on a grid.
    """
    L = problem.num_layers
    P = len(problem.options)
    bounds = {0, L, *(np.flatnonzero(np.diff(assignment)) + 1).tolist()}
    grid = bounds | set(range(0, L, -(-L // _GRID)))
    pairs = _ordered_pairs(bounds, range(L + 1)) | _ordered_pairs(grid, grid)
    first, last = np.array(sorted(pairs)).T[:, :, None]  # [N, 1] each
    layers = np.arange(L)
    is_changed = (first <= layers) & (layers < last)
    neighbours = [np.where(is_changed, option, assignment) for option in range(P)]
    changed = np.concatenate([assignment[None], *neighbours])
    num_segments = 1 + np.count_nonzero(np.diff(changed, axis=1), axis=1)
    return changed[num_segments <= problem.max_segments]


def _ordered_pairs(first: Iterable[int], second: Iterable[int]) -> set[tuple[int, int]]:
    """Return all pairs of different numbers from two sets, the smaller number first."""
    pairs = itertools.product(first, second)
    return {(min(a, b), max(a, b)) for a, b in pairs if a != b}


def _best(problem: Problem, candidates: np.ndarray) -> int:
    """Return the index of the fastest candidate among those with the least excess over the budgets.

    Ties go to the first candidate.
    """
    excess = _excess(problem, candidates)
    least = np.flatnonzero(excess == excess.min())
    return int(least[compute_seconds(problem, candidates[least]).argmin()])


def _excess(problem: Problem, candidates: np.ndarray) -> np.ndarray:
    """Return the bytes over the budgets of each candidate, device and host summed: [N]."""
    peak, host = compute_bytes(problem, candidates)
    device_excess = np.maximum(peak - problem.device_budget_bytes, 0)
    host_excess = np.maximum(host - problem.host_budget_bytes, 0)
    return device_excess + host_excess
