"""Layers that differ: which layers keep, offload or recompute what, given a config's other choices.

A context is a config without its activations. The memory that it leaves is the budget of a
`Problem`, whose options are those of one layer (`zerojax.choice.layer_choices`) and whose link also
carries the context's own moves. The choice among options is exact (`zerojax.choice.choice`), and
becomes segments:

    keep all values        zj.Segment(n, activations="save")
    keep none              zj.Segment(n, activations="remat"), or "pinned_host" if the layer's input
                           is offloaded
    keep some              the same, with saved_names and offloaded_names

Contexts are examined best first: all with the quick search of `by_greedy`, then the best one with
the solver.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from host_offload.schedule import Schedule
from zerojax.choice import Choice, LayerOption, Problem, by_greedy, by_milp, layer_options
from zerojax.config import Segment, ZeroConfig
from zerojax.costs import StackWork, saved_activations
from zerojax.planner.candidates import FRACTION, MIN_GAIN, Bound, Candidate, Space, named_fields
from zerojax.planner.search import Search

MAX_SEGMENTS = 4
_MOST_CONTEXTS = 16
_MOST_ROUNDS = 4
_FRACTIONS = (0.25, 0.5, 0.75)
_UNBOUNDED = 1e18  # bytes per second of an unknown link, because the solver needs finite numbers


@dataclasses.dataclass(frozen=True)
class _Context:
    """A config without its activations, and the choice among activations.

    Attributes:
      config: config, with activations="remat".
      tiles: number of tiles of the layers' MLPs.
      problem: problem of the choice.
      choice: choice found by the quick search.
    """

    config: ZeroConfig
    tiles: int
    problem: Problem
    choice: Choice


def mix(search: Search, *, seconds: float = 20.0) -> None:
    """Add the fastest config with different layers to a search's results.

    It is added if it fits and is faster than all configs found so far.

    Args:
      search: search that has run.
      seconds: time limit of the solver, in seconds.
    """
    options = list_options(search.space)
    if not options:
        return
    contexts = [c for c in _contexts(search, options) if c.choice.fits]
    if not contexts:
        return
    best = contexts[0]
    for context in contexts:
        before = _least_seconds(search)
        fits = search.consider(_config(context, context.choice), context.tiles)
        if fits and search.found[0].seconds < before:
            best = context
    choice = by_milp(best.problem, seconds=seconds)
    search.tally.solver = f"{choice.solver.text}, {choice.solver.seconds:.1f} s"
    if math.isfinite(choice.solver.gap):
        search.tally.solver += f", at most {choice.solver.gap:.2%} above the least"
    if choice.fits and choice.assignment != best.choice.assignment:
        search.consider(_config(best, choice), best.tiles)
    _leave_room(search, best, choice if choice.fits else best.choice)


def _least_seconds(search: Search) -> float:
    """Return the seconds of the fastest config found so far; infinity without one."""
    return search.found[0].seconds if search.found else math.inf


def _leave_room(search: Search, context: _Context, choice: Choice) -> None:
    """Choose again with less memory while the program of a choice takes more than is available.

    By its estimate, a choice fills the memory to the byte.
    """
    if search.exact is None:
        return
    problem = context.problem
    for _ in range(_MOST_ROUNDS):
        config = _config(context, choice)
        is_first = bool(search.found) and search.found[0].config == config
        lacks = search.lacks_of_program(config, context.tiles) if is_first else []
        if not lacks:
            return
        search.leave_out(config, context.tiles)
        over = max(lack.needed - lack.had for lack in lacks)
        if over > problem.device_budget_bytes:
            return
        problem = dataclasses.replace(
            problem, device_budget_bytes=problem.device_budget_bytes - over
        )
        choice = by_greedy(problem)
        if not choice.fits:
            return
        search.consider(_config(context, choice), context.tiles)


def with_options(space: Space) -> Space:
    """Return a space in which all layers may also follow one option of `list_options`."""
    options = list_options(space)
    modes = (
        Segment(1, activations="save"),
        Segment(1, activations="remat"),
        Segment(1, activations="pinned_host"),
    )
    return dataclasses.replace(
        space, options=tuple(o for o in options if _segment(1, o, options) not in modes)
    )


def list_options(space: Space) -> tuple[LayerOption, ...]:
    """Return the options of a layer, with the costs that an estimate will have.

    Without host memory, only options that offload nothing are returned. A choice fills the memory
    to the byte, so its costs must equal those of its config's estimate. There are no options if the
    activations are fixed, if the values of a layer are unknown, or if there are several stacks.
    """
    stacks = space.workload.stacks
    is_fixed = bool({"activations", "saved_names", "offloaded_names"} & space.fixed.keys())
    if is_fixed or len(stacks) != 1 or not space.workload.is_layered or not stacks[0].values:
        return ()
    (stack,) = stacks
    options = layer_options(stack.values, stack.x_bytes)
    offloads = "pinned_host" in space.tiers and not space.shares_cores
    return tuple(
        _as_estimated(stack, option, options)
        for option in options
        if offloads or not option.host_bytes
    )


def _as_estimated(
    stack: StackWork, option: LayerOption, options: Sequence[LayerOption]
) -> LayerOption:
    """Return an option with the bytes and seconds of its estimate."""
    saved = saved_activations(stack, _segment(1, option, options))
    return dataclasses.replace(
        option,
        device_bytes=saved.device_bytes,
        host_bytes=saved.away_bytes,
        seconds=saved.backward - stack.backward["save"],
    )


def _contexts(search: Search, options: Sequence[LayerOption]) -> list[_Context]:
    """Return contexts that may beat the configs found, each with a quick choice, the best first."""
    space = search.space
    bound = Bound(search.space)
    best = _least_seconds(search)
    known = set[tuple[Any, ...]]()
    contexts = list[_Context]()
    # Bounds are computed for segments, which stream: a layer is gathered once for all microbatches,
    # and recomputes what it must.
    segments = {"activations": ()}
    plain = dataclasses.replace(space, options=(), fixed={**space.fixed, "activations": "remat"})
    candidates = [
        candidate._replace(seconds=bound.seconds({**candidate.fields, **segments}))
        for candidate in _with_fractions(space, plain)
    ]
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.complexity)):
        least = candidate.seconds
        if least >= best * (1 - MIN_GAIN) or len(contexts) == _MOST_CONTEXTS:
            break
        # A schedule that fetches activations needs slots, regardless of its other fetches.
        config = space.config(candidate.fields)
        if config is None or config.prefetch_distance < 1:
            continue
        key = tuple(v for k, v in candidate.fields.items() if k != "prefetch_distance")
        if key in known:
            continue
        known.add(key)
        problem = _problem(search, config, candidate.tiles, options)
        if problem is not None:
            contexts.append(_Context(config, candidate.tiles, problem, by_greedy(problem)))
    return sorted(contexts, key=lambda c: c.choice.seconds + _seconds_outside(search, c))


def _with_fractions(space: Space, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield candidates, replacing a fraction that is still to be found by each of several.

    A smaller fraction leaves more memory for activations.
    """
    for candidate in candidates:
        fractions = (candidate.fields[FRACTION],)
        if space.leaves_fraction(candidate.fields):
            fractions = _FRACTIONS
        for fraction in fractions:
            yield candidate._replace(fields={**candidate.fields, FRACTION: fraction})


def _seconds_outside(search: Search, context: _Context) -> float:
    """Return the seconds of a context's step outside of forward and backward."""
    time = search.estimate(context.config, context.tiles).time
    return sum(p.seconds for p in time.phases if p.name in ("embed", "update", "end"))


def _problem(
    search: Search, config: ZeroConfig, tiles: int, options: Sequence[LayerOption]
) -> Problem | None:
    """Return the choice among options in a context, or None if even its states do not fit."""
    (stack,) = search.space.workload.stacks
    limits = search.limits
    streamed = (Segment(stack.num_layers, activations="remat"),)  # layers that differ always stream
    context = dataclasses.replace(config, num_microbatches=1, activations=streamed)
    of_config = search.estimate(context, tiles)
    needed = of_config.needed("device")
    needed_host = of_config.needed("pinned_host")
    kept = of_config.bytes["device"].get("activations", 0)
    device = limits.device - (needed - kept)
    host = limits.of("pinned_host") - needed_host
    if limits.both is not None:
        device = min(device, limits.both - needed - needed_host)
    if device < 0 or host < 0:
        return None

    (schedule,) = of_config.steps.stacks.values()
    (work,) = of_config.layers
    forward = work.forward
    if config.update == "in_forward":
        forward += work.update
    wires = of_config.wires
    return Problem(
        num_layers=stack.num_layers,
        options=tuple(options),
        forward_seconds=max(forward, 1e-12),
        backward_seconds=stack.backward["save"],
        head_seconds=of_config.unstacked.head,
        link_down=min(wires.down, wires.link_both / 2, _UNBOUNDED),
        link_up=min(wires.up, wires.link_both / 2, _UNBOUNDED),
        distance=max(1, config.prefetch_distance),
        device_budget_bytes=device,
        host_budget_bytes=host,
        up_forward_bytes=_moved_in_tick(schedule, "forward", "up"),
        down_forward_bytes=_moved_in_tick(schedule, "forward", "down"),
        up_backward_bytes=_moved_in_tick(schedule, "backward", "up"),
        down_backward_bytes=_moved_in_tick(schedule, "backward", "down"),
        max_segments=MAX_SEGMENTS,
    )


def _moved_in_tick(schedule: Schedule, name: str, lane: str) -> float:
    """Return the most bytes that a tick of a phase moves, without activations.

    Activations are left out because they are to be chosen.
    """
    most = 0
    for phase in schedule.phases:
        if phase.name != name:
            continue
        for loop in phase.main:
            ops = [op for op in loop.ops if op.lane == lane and op.record.kind != "activations"]
            most = max(most, sum(op.num_bytes for op in ops))
    return float(most)


def _config(context: _Context, choice: Choice) -> ZeroConfig:
    """Return a context's config with a choice's segments, or with its only segment's fields."""
    options = context.problem.options
    segments = [_segment(n, options[option], options) for n, option in choice.segments]
    if len(segments) > 1:
        return dataclasses.replace(context.config, activations=tuple(segments))
    segment = segments[0]
    return dataclasses.replace(
        context.config,
        activations=segment.activations,
        saved_names=segment.saved_names,
        offloaded_names=segment.offloaded_names,
    )


def _segment(num_layers: int, option: LayerOption, options: Sequence[LayerOption]) -> Segment:
    """Return layers that follow an option; an option that keeps all values is the mode "save"."""
    keeps_most = len(option.keep) == max(len(candidate.keep) for candidate in options)
    offloads = bool(option.offload) or option.input_offloaded
    if keeps_most and not offloads and not option.seconds:
        return Segment(num_layers=num_layers, activations="save")
    return Segment(num_layers=num_layers, **named_fields(option))
