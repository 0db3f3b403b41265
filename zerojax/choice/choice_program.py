"""Choice among keep, offload and recompute, layer by layer, as a mixed integer program.

`choice_problem` gives a step's seconds and bytes as sums and maxima. With binaries x[l, p] (layer l
takes option p), minimizing the total is a linear program in the binaries and the times, in which
inequalities replace each maximum. A cost of layer l, such as seconds[l], is the sum over p of
seconds_p x[l, p]:

    sum over p of x[l, p] = 1
    stored[t]      >= stored[t-1] + (host_bytes[t] + down_forward_bytes) / link_down
                                                                         and from computed[t]
    fetched[k]     >= fetched[k-1] + (host_bytes[l] + up_backward_bytes) / link_up
                                                                         and from begun[k-d], and
                                                                         fetched[0] from stored[L-1]
    computed_b[k]  >= computed_b[k-1] + backward_seconds + seconds[l]    and from fetched[k]
    stored_b[k]    >= stored_b[k-1] + down_backward_bytes / link_down    and from computed_b[k]
    total          >= computed_b[L-1], stored_b[L-1]
    device budget  >= sum over m <= l of device_bytes[m], + transient_bytes[l]
                                                                         for each layer l
    host budget    >= sum over l of host_bytes[l]
    rise[l, p]     >= x[l, p] - x[l-1, p],   sum of all rises <= max_segments - 1

Forward's computed[t] is the same for all assignments. A layer whose option differs from the layer
before contributes one rise of 1. Checkmate (arXiv:1910.02653) has a similar program over the values
of a graph at each time step. Here the options of a layer are known in advance (`layer_choices`), so
the program is over layers.

HiGHS satisfies a row to within 1e-6, so times are scaled to a layer's forward and bytes to the
largest option.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, milp
from scipy.sparse import csr_array

from zerojax.choice.choice_problem import Problem, forward_times

_TOLERANCE = 1e-6
_Terms = list[tuple[int, float]]  # (column, factor): a sum over the program's variables


class _Row(NamedTuple):
    """An inequality: lower <= the sum of the terms <= upper."""

    terms: _Terms
    lower: float
    upper: float


class ChoiceProgram:
    """Variables (columns) and inequalities (rows) of the program.

    Times are in units of a layer's forward, and bytes in units of the largest option.
    """

    def __init__(self, problem: Problem) -> None:
        """Build the program.

        Args:
          problem: the layers, their options and budgets.
        """
        self._problem = problem
        self._unit = problem.forward_seconds
        L = problem.num_layers
        P = len(problem.options)
        self._num_columns = 0
        self._x = self._columns(L * P).reshape(L, P)
        self._rise = self._columns((L - 1) * P).reshape(L - 1, P)
        self._stored = self._columns(L)
        self._fetched = self._columns(L)
        self._computed = self._columns(L)
        self._stored_b = self._columns(L)
        self._total = int(self._columns(1)[0])
        self._rows = list[_Row]()
        self._add_choice()
        self._add_forward()
        self._add_backward()
        self._add_bytes()
        if problem.max_segments < L:
            self._add_segments()

    def relaxed_seconds(self) -> float:
        """Return the least seconds of the linear relaxation, a lower bound that needs no search.

        In the relaxation, a layer may take a fraction of each option.
        """
        result = self._minimized(np.inf)
        return 0.0 if result.x is None else result.fun * self._unit

    def solved(
        self, *, at_most: float, gap: float, seconds: float
    ) -> tuple[OptimizeResult, list[int] | None]:
        """Return HiGHS's result, and the assignment that it found, or None.

        Args:
          at_most: seconds of the step above which assignments are not searched.
          gap: largest acceptable excess over the least seconds, as a fraction.
          seconds: time limit of the search, in seconds.
        """
        is_binary = np.isin(np.arange(self._num_columns), self._x)
        options = {"time_limit": seconds, "mip_rel_gap": gap}
        result = self._minimized(
            at_most / self._unit * (1 + _TOLERANCE), integrality=is_binary, options=options
        )
        if result.x is None:
            return result, None
        return result, result.x[self._x].argmax(axis=1).tolist()

    def _minimized(self, most: float, **arguments: Any) -> OptimizeResult:
        """Return HiGHS's result for the least total, which is at most `most`."""
        upper = np.full(self._num_columns, np.inf)
        upper[self._x] = 1.0
        upper[self._total] = most
        cost = np.eye(1, self._num_columns, self._total)[0]
        return milp(cost, bounds=(0.0, upper), constraints=self._constraint(), **arguments)

    def _constraint(self) -> tuple[csr_array, list[float], list[float]]:
        """Return all rows as a sparse matrix, with their lower and upper bounds."""
        rows = list[int]()
        columns = list[int]()
        factors = list[float]()
        for number, row in enumerate(self._rows):
            for column, factor in row.terms:
                rows.append(number)
                columns.append(column)
                factors.append(factor)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), self._num_columns))
        lower = [row.lower for row in self._rows]
        upper = [row.upper for row in self._rows]
        return matrix, lower, upper

    def _columns(self, count: int) -> np.ndarray:
        """Add variables, and return their columns."""
        first = self._num_columns
        self._num_columns += count
        return np.arange(first, first + count)

    def _between(self, terms: _Terms, lower: float = -np.inf, upper: float = np.inf) -> None:
        """Add the row: `lower` <= the sum of `terms` <= `upper`."""
        self._rows.append(_Row(terms, lower, upper))

    def _after(self, column: int, before: _Terms, duration: _Terms, constant: float = 0.0) -> None:
        """Add the row: time of `column` >= `before` + `duration` + `constant`.

        All are in units of a layer's forward.
        """
        self._between([(int(column), 1.0), *_minus(before), *_minus(duration)], lower=constant)

    def _cost(self, layer: int, costs: Iterable[float]) -> _Terms:
        """Return a layer's cost as a sum over its options; options without a cost are left out."""
        columns = self._x[layer]
        return [(int(c), float(cost)) for c, cost in zip(columns, costs, strict=True) if cost]

    def _summed_cost(self, layers: Iterable[int], costs: np.ndarray) -> _Terms:
        """Return the sum of several layers' costs."""
        terms = _Terms()
        for layer in layers:
            terms += self._cost(layer, costs)
        return terms

    def _add_choice(self) -> None:
        """Each layer takes one option."""
        for columns in self._x:
            self._between([(int(column), 1.0) for column in columns], 1.0, 1.0)

    def _add_forward(self) -> None:
        """Add the times of forward's stores."""
        down = self._problem.of("host_bytes") / self._problem.link_down / self._unit
        base_down = self._problem.down_forward_bytes / self._problem.link_down / self._unit
        for t, computed in enumerate(forward_times(self._problem)):
            storing = self._cost(t, down)
            self._after(self._stored[t], [], storing, computed / self._unit + base_down)
            if t:
                self._after(self._stored[t], [(self._stored[t - 1], 1.0)], storing, base_down)

    def _add_backward(self) -> None:
        """Add the times of backward.

        Only the first fetch waits for stores, for all of them; later fetches wait for the first.
        """
        p = self._problem
        L = p.num_layers
        d = p.distance
        forward = forward_times(p)[-1] / self._unit
        up = p.of("host_bytes") / p.link_up / self._unit
        recompute = p.of("seconds") / self._unit
        base_up = p.up_backward_bytes / p.link_up / self._unit
        base = p.backward_seconds / self._unit
        base_down = p.down_backward_bytes / p.link_down / self._unit
        for k in range(L):
            fetching = self._cost(L - 1 - k, up)
            computing = self._cost(L - 1 - k, recompute)
            fetched = self._fetched[k]
            computed = self._computed[k]
            stored_b = self._stored_b[k]
            if k == 0:
                self._after(fetched, [], fetching, forward + base_up)
                self._after(computed, [], computing, forward + p.head_seconds / self._unit + base)
            else:
                self._after(computed, [(self._computed[k - 1], 1.0)], computing, base)
                self._after(stored_b, [(self._stored_b[k - 1], 1.0)], [], base_down)
            before = self._fetched[k - 1] if k else self._stored[L - 1]
            self._after(fetched, [(before, 1.0)], fetching, base_up)
            if k >= d:
                # begun[k-d], as the end of that layer's backward less its duration
                recomputing = self._cost(L - 1 - (k - d), recompute)
                begun = [(self._computed[k - d], 1.0), *_minus(recomputing)]
                self._after(fetched, begun, fetching, base_up - base)
            self._after(computed, [(fetched, 1.0)], computing, base)
            self._after(stored_b, [(computed, 1.0)], [], base_down)
        self._after(self._total, [(self._stored_b[L - 1], 1.0)], [])

    def _add_bytes(self) -> None:
        """Add the budgets of device and host memory."""
        p = self._problem
        device = p.of("device_bytes")
        transient = p.of("transient_bytes")
        host = p.of("host_bytes")
        unit = max(1.0, (device + transient).max(), host.max())
        # If no layer's transient bytes exceed the total of the next layer, the last layer has the
        # peak, and one row is enough.
        is_last = transient.max() <= (device + transient).min()
        first = p.num_layers - 1 if is_last else 0
        for layer in range(first, p.num_layers):
            held = self._summed_cost(range(layer), device / unit)
            held += self._cost(layer, (device + transient) / unit)
            self._between(held, upper=p.device_budget_bytes / unit)
        total = self._summed_cost(range(p.num_layers), host / unit)
        self._between(total, upper=p.host_budget_bytes / unit)

    def _add_segments(self) -> None:
        """Limit the number of segments."""
        num_layers, num_options = self._x.shape
        for layer in range(1, num_layers):
            for option in range(num_options):
                rise = int(self._rise[layer - 1, option])
                now = int(self._x[layer, option])
                before = int(self._x[layer - 1, option])
                self._between([(rise, 1.0), (now, -1.0), (before, 1.0)], lower=0.0)
        self._between(
            [(int(rise), 1.0) for rise in self._rise.ravel()],
            upper=self._problem.max_segments - 1.0,
        )


def _minus(terms: _Terms) -> _Terms:
    return [(column, -factor) for column, factor in terms]
