"""Choice among keep, offload and recompute for each layer: optimal within a gap, or infeasible.

    values of a block ----------> options of a layer ------------> an option for each layer,
                     layer_choices                     this module    in few segments

`choice_problem` predicts the seconds and bytes of an assignment. `by_greedy` finds a good
assignment that fits, if any fits. `by_milp` bounds it from below with the linear relaxation of
`choice_program`, which needs no search. If the gap is still too large, HiGHS (Huangfu and Hall,
doi:10.1007/s12532-017-0130-5) searches for an assignment faster than the greedy one. Its result is
evaluated by the equations, must fit to the byte, and must be faster. So the solver's rounding never
reaches a result, and a solver that runs out of time leaves a good choice with a proven gap.
"""

import dataclasses
import time

from zerojax.choice.choice_greedy import by_greedy as by_greedy
from zerojax.choice.choice_problem import Choice as Choice
from zerojax.choice.choice_problem import Missing as Missing
from zerojax.choice.choice_problem import Problem as Problem
from zerojax.choice.choice_problem import Solver as Solver
from zerojax.choice.choice_problem import build_choice
from zerojax.choice.choice_problem import predicted_seconds as predicted_seconds
from zerojax.choice.choice_problem import uniform as uniform


def by_milp(problem: Problem, *, gap: float = 1e-3, seconds: float = 20.0) -> Choice:
    """Return the fastest assignment that fits, with at most `max_segments` segments.

    The result is the better of the solver's assignment and `by_greedy`'s, so it is good even if the
    solver runs out of time. The solver is skipped if `by_greedy` is within the gap of the linear
    relaxation, which takes a fraction of a second to solve. It is also skipped if nothing fits:
    then the result is `by_greedy`'s, with the missing bytes. The result's `solver` records the
    proven gap.

    Args:
      problem: the layers, their options and budgets.
      gap: largest acceptable excess over the least seconds, as a fraction of the result's seconds.
      seconds: time limit of the solver's search, in seconds, without the greedy search before it.
    """
    greedy = by_greedy(problem)
    if not greedy.fits:
        return greedy
    begin = time.perf_counter() - greedy.solver.seconds
    # Imported here because scipy's solvers add 0.3 s, which every import of zerojax would pay.
    from zerojax.choice.choice_program import ChoiceProgram

    program = ChoiceProgram(problem)
    bound = program.relaxed_seconds()
    if greedy.seconds - bound <= gap * greedy.seconds:
        return _with_solver(
            greedy,
            "a greedy search, without milp: the bound of the linear relaxation is within the gap",
            bound,
            begin,
        )
    result, assignment = program.solved(at_most=greedy.seconds, gap=gap, seconds=seconds)
    bound = max(bound, (result.mip_dual_bound or 0.0) * problem.forward_seconds)
    text = f"milp: {str(result.message).rstrip('.')}"
    if assignment is not None:
        solved = build_choice(problem, assignment, greedy.solver)
        is_allowed = solved.fits and len(solved.segments) <= problem.max_segments
        if is_allowed and solved.seconds < greedy.seconds:
            return _with_solver(solved, text, bound, begin)
    return _with_solver(
        greedy,
        f"a greedy search; milp found nothing faster ({text.removeprefix('milp: ')})",
        bound,
        begin,
    )


def _with_solver(choice: Choice, text: str, bound: float, begin: float) -> Choice:
    """Return a choice with its proven gap to a lower bound, and the seconds since `begin`."""
    gap = max(0.0, (choice.seconds - bound) / choice.seconds)
    return dataclasses.replace(
        choice, solver=Solver(text=text, gap=gap, seconds=time.perf_counter() - begin)
    )
