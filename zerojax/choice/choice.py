"""The choice among keep, offload and recompute for each layer of a step: exact within a gap, or
said to be impossible.

    values of a block ----------> options of a layer ------------> an option for each layer, in few
    segments
                     layer_choices                     this module

`choice_problem` predicts the seconds and bytes of an assignment. `by_greedy` finds a good one that
fits if any does. `by_milp` bounds it from below by the program of `choice_program` without
integers, which takes no search. Where that leaves more than the gap, HiGHS (Huangfu and Hall,
doi:10.1007/s12532-017-0130-5) searches below the greedy seconds. What it finds is evaluated by the
equations, and has to fit to the byte and to be faster. So no rounding of the solver reaches a
result, and a solver that runs out of time leaves a good choice, with the gap that is proven.
"""

import dataclasses
import time

from zerojax.choice.choice_greedy import by_greedy as by_greedy
from zerojax.choice.choice_problem import Choice as Choice
from zerojax.choice.choice_problem import Missing as Missing
from zerojax.choice.choice_problem import Problem as Problem
from zerojax.choice.choice_problem import Solver as Solver
from zerojax.choice.choice_problem import choice_of
from zerojax.choice.choice_problem import predicted_seconds as predicted_seconds
from zerojax.choice.choice_problem import uniform as uniform


def by_milp(problem: Problem, *, gap: float = 1e-3, seconds: float = 20.0) -> Choice:
    """Return the assignment of the fewest seconds that fits, with at most `max_segments` segments.

    It is the better one of the solver's and `by_greedy`'s, so it is a good one where the solver
    runs out of time. The solver is not called where `by_greedy` is within the gap of the program
    without its integers, which takes a fraction of a second; nor where nothing fits: then it is
    `by_greedy`'s, with what is missing. `solver` tells, of each, the gap that is proven.

    Args:
      problem: of the layers.
      gap: how far the seconds may be above the least, as a share of them.
      seconds: of the solver's search, at most; what comes before takes its own.
    """
    greedy = by_greedy(problem)
    if not greedy.fits:
        return greedy
    begin = time.perf_counter() - greedy.solver.seconds
    # Here, not above: scipy's solvers take 0.3 s to import, in every process that imports zerojax.
    from zerojax.choice.choice_program import ChoiceProgram

    program = ChoiceProgram(problem)
    bound = program.relaxed_seconds()
    if greedy.seconds - bound <= gap * greedy.seconds:
        return _told(
            greedy,
            "a greedy search, and no milp, as the bound of a linear program is within the gap",
            bound,
            begin,
        )
    result, assignment = program.solved(at_most=greedy.seconds, gap=gap, seconds=seconds)
    bound = max(bound, (result.mip_dual_bound or 0.0) * problem.forward_seconds)
    text = f"milp: {str(result.message).rstrip('.')}"
    if assignment is not None:
        found = choice_of(problem, assignment, greedy.solver)
        if (
            found.fits
            and len(found.segments) <= problem.max_segments
            and found.seconds < greedy.seconds
        ):
            return _told(found, text, bound, begin)
    return _told(
        greedy,
        f"a greedy search, than which milp found none faster ({text.removeprefix('milp: ')})",
        bound,
        begin,
    )


def _told(choice: Choice, text: str, bound: float, begin: float) -> Choice:
    gap = max(0.0, (choice.seconds - bound) / choice.seconds)
    return dataclasses.replace(
        choice, solver=Solver(text=text, gap=gap, seconds=time.perf_counter() - begin)
    )
