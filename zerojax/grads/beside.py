"""Overlap a function's matrix products with transfers and collectives that are needed only later.

XLA's scheduler starts a collective or a copy as late as the first use of its result allows. A
result that only the next layer needs would start where this layer ends, and overlap nothing. So a
barrier ties the result to a product of this layer, and the work overlaps the products before that
product.

Some work must be done in turns, such as reading one group of arrays while another is written, and
then the reverse. Such work is started turn by turn: the products are cut into as many parts of
equal FLOPs as there are turns. With three turns a, b and c:

    | start a | products | wait for a, start b | products | wait for b, start c | products |

The function is evaluated equation by equation, so that a barrier can be put in front of any
equation.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax.jaxprs import Instruction, count_flops, evaluate, trace

SHARE_OF_WAIT = 3 / 5
"""Share of FLOPs after which a product waits for the work.

Work tied to the last product might start only just before it.
"""

Turn = Callable[[Any, Any], tuple[Any, Any]]
"""(operands of a product, work so far) -> the same two: a barrier between them, then new work."""


def beside(
    function: Callable[..., Any], args: tuple[Any, ...], work: Any, turns: Sequence[Turn] = ()
) -> tuple[Any, Any]:
    """Return `function(*args)`, and `work` after all turns.

    Args:
      function: function whose products overlap the work.
      args: arguments of the function.
      work: pytree of the results of the started work.
      turns: turns to take; each is taken before a product, after its share of FLOPs. Without turns,
        a product after `SHARE_OF_WAIT` of the FLOPs waits for the work.
    """
    if not turns and not jax.tree.leaves(work):
        return function(*args), work
    program, out = trace(function, *args)
    slots: dict[int, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    # XLA drops equations whose results are not read, such as the last product of a forward pass
    # that is recomputed for its gradients. Turns before such a product would have no products
    # between them.
    live = program.live(program.outputs, is_root=lambda i: bool(i.eqn.effects))
    turns_before = _place_turns(live, turns)
    new_results: list[int] = []  # results of the function since the last turn
    for number, i in enumerate(live):
        for turn in turns_before.pop(number, ()):
            # The product waits for the turn because its operands pass the same barrier. So do
            # results of the function: otherwise XLA would move products that nothing waits for,
            # such as weight gradients, after the last turn.
            tied = [*i.reads, *(new_results if turns else ())]
            operands, work = turn({slot: slots[slot] for slot in tied}, work)
            slots.update(operands)
            new_results.clear()
        evaluate([i], slots)
        for slot in i.outs:
            if program.last_read.get(slot, -1) == len(program.instructions):
                new_results.append(slot)
    # for a function without products
    for turn in itertools.chain(*turns_before.values()):
        _, work = turn({}, work)
    return jax.tree.unflatten(jax.tree.structure(out), program.results(slots)), work


def wait(operands: Any, work: Any) -> tuple[Any, Any]:
    """Tie a product to all of the work: a turn that starts nothing.

    Args:
      operands: operands of the product.
      work: pytree of the results of the started work.
    """
    return jax.lax.optimization_barrier((operands, work))


def _place_turns(
    instructions: Sequence[Instruction], turns: Sequence[Turn]
) -> dict[int, list[Turn]]:
    """Return the turns before each instruction; the turns without a product are at -1."""
    products: list[int] = []
    flops: list[float] = []
    for number, i in enumerate(instructions):
        flops_of_instruction = count_flops(i.eqn)
        if flops_of_instruction:
            products.append(number)
            flops.append(flops_of_instruction)
    if not products:
        return {-1: list(turns)}
    if not turns:
        return {products[_find_waiting_product(flops)]: [wait]}
    begins = equal_parts(flops, len(turns) + 1)
    turns_before: dict[int, list[Turn]] = {}
    for number, turn in enumerate(turns):
        # With fewer parts than turns, the last turns are taken before the last product.
        position = begins[number] if number < len(begins) else len(products) - 1
        turns_before.setdefault(products[position], []).append(turn)
    return turns_before


def _find_waiting_product(flops: Sequence[float]) -> int:
    """Return the first product with `SHARE_OF_WAIT` of the FLOPs before it, or the last product."""
    threshold = SHARE_OF_WAIT * sum(flops)
    flops_before = 0.0
    for number, flops_of_product in enumerate(flops):
        if flops_before >= threshold:
            return number
        flops_before += flops_of_product
    return len(flops) - 1


def equal_parts(sizes: Sequence[float], num_parts: int) -> list[int]:
    """Return where the parts of a sequence begin, without the first part's beginning.

    The parts minimize the sum of the squares of their sizes. There are fewer parts if there are
    fewer than `num_parts` sizes.

    Args:
      sizes: sizes of the elements, in order.
      num_parts: maximum number of parts.
    """
    sums = [0.0, *itertools.accumulate(sizes)]
    # best[n]: (sum of squares, beginnings) of the first n sizes, in the parts so far.
    best: list[tuple[float, list[int]]] = [(total**2, [0]) for total in sums]
    for num_before in range(1, min(num_parts, len(sizes))):
        shorter = best
        best = []
        for end in range(len(sums)):
            candidates = [(math.inf, list[int]())]
            for begin in range(num_before, end):
                squares, begins = shorter[begin]
                candidates.append((squares + (sums[end] - sums[begin]) ** 2, [*begins, begin]))
            best.append(min(candidates))
    _, begins = best[-1]
    return begins[1:]
