"""A phase as lanes of boxes, as a sentence about its moves, and as rows of a table."""

import itertools
from typing import NamedTuple

import numpy as np

from host_offload.schedule.ops import HEAD_PIECES, KINDS, LAYERS, UNSTACKED_PIECES, Op
from host_offload.schedule.phase import CALLBACK_MOVES, UNSTACKED_NAMES, Phase, is_main
from host_offload.schedule.timeline import Box, Lane, Strip

_LANES = {"fetch": "fetch", "load": "read", "gather": "gather", "store": "store"}
"""Lanes of a picture, by the verb of the operations that are drawn in it."""
_UNSTACKED_LANES = {"read": "fetch unstacked", "store": "store unstacked"}
"""Lanes of the unstacked leaves, by the layers' lane with the same verb."""


class _Row(NamedTuple):
    """A row of a table: ring slot and layers of one tick; -1 means none."""

    tick: int | str
    fetched: int = -1
    slot: int = -1
    taken: int = -1
    computed: int = -1
    stored: int = -1


# --- pictures -------------------------------------------------------------------------------------


def build_strip(phase: Phase) -> Strip:
    """Return a phase as lanes of boxes."""
    names = ("fetch", "read", "gather", "compute", "store")
    boxes: dict[str, list[Box]] = {name: [] for name in names}
    slots: list[list[Box]] = [[] for _ in phase.preload]
    unstacked: dict[str, list[Box]] = {name: [] for name in _UNSTACKED_LANES.values()}
    num_fetched = 0
    for loop in phase.loops:
        for tick, ops in loop:
            for op in ops:
                lane = _find_lane(op)
                if op.record.leaves in UNSTACKED_NAMES and lane in _UNSTACKED_LANES:
                    letter = op.record.leaves[0].upper()
                    box = Box(layer=letter, start=tick, stop=tick + 1, kinds=("opt_state",))
                    unstacked[_UNSTACKED_LANES[lane]].append(box)

            for (lane, layer), kinds in _kinds_by_lane(ops).items():
                boxes[lane].append(Box(layer=layer, start=tick, stop=tick + 1, kinds=kinds))
                if lane == "fetch" and slots and loop not in phase.first_loops:
                    # A record is taken as many ticks after its fetch as the ring has slots; the
                    # first records also wait for the first take.
                    stop = tick + len(slots) + (phase.first_take if tick < 0 else 0)
                    box = Box(layer=layer, start=tick, stop=stop, kinds=kinds)
                    slots[num_fetched % len(slots)].append(box)
                    num_fetched += 1

    boxes |= {f"slot {slot}": slot_boxes for slot, slot_boxes in enumerate(slots)}
    boxes |= unstacked
    return Strip(
        name=phase.name,
        note=describe_moves(phase),
        start=min(loop.start for loop in phase.loops),
        stop=max(loop.stop for loop in phase.loops),
        lanes=tuple(Lane(name=name, boxes=tuple(lane)) for name, lane in boxes.items()),
    )


def _kinds_by_lane(ops: tuple[Op, ...]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the kinds that a tick moves or holds, by lane and layer."""
    kinds: dict[tuple[str, int], dict[str, None]] = {}
    for op in ops:
        lane = _find_lane(op)
        if lane and op.record.leaves == LAYERS:
            kind = "compute" if lane == "compute" else op.record.kind
            kinds.setdefault((lane, op.number), {})[kind] = None
    return {box: tuple(names) for box, names in kinds.items()}


def _find_lane(op: Op) -> str:
    """Return the lane of a picture in which an operation is drawn, or ""."""
    if is_main(op):
        return "compute"
    if op.record.kind not in (*KINDS, "gathered"):
        return ""
    return _LANES.get(op.verb, "")


# --- a sentence about the moves -------------------------------------------------------------------


def describe_moves(phase: Phase) -> str:
    """Return the text after a phase's name in a heading: the kinds that move, and other moves."""
    moves = {"fetches": phase.fetches, "reads": phase.reads, "writes": phase.writes}
    texts = [f"{verb} {', '.join(kinds)}" for verb, kinds in moves.items() if kinds]
    if phase.stores_late:
        ticks = "a tick" if phase.stores_late == 1 else f"{phase.stores_late} ticks"
        texts[-1] += f" {ticks} late"
    texts += _describe_unstacked(phase)
    texts += _describe_updates(phase)
    return f": {'; '.join(texts) or 'nothing moves'}"


def _describe_unstacked(phase: Phase) -> list[str]:
    """Return when unstacked leaves are fetched and stored during a phase."""
    texts = list[str]()
    for leaves, name in UNSTACKED_NAMES.items():
        loaded = phase.list_ticks(leaves, "load")
        stored = phase.list_ticks(leaves, "store")
        if not loaded:
            continue
        if leaves == HEAD_PIECES:
            texts.append(f"{len(loaded)} {name}: one a tick")
            continue
        if leaves == UNSTACKED_PIECES:
            texts.append(f"{name}: after the last store")
            continue
        fetch_time = _describe_tick(phase, loaded[0])
        store_time = _describe_tick(phase, stored[-1])
        if fetch_time == store_time:
            texts.append(f"{name}: {fetch_time}")
        else:
            texts.append(f"{name}: fetched {fetch_time}, stored {store_time}")
    return texts


def _describe_tick(phase: Phase, tick: int) -> str:
    if tick < 0:
        return "before the loop"
    return f"tick {tick}" if tick < len(phase.layer) else "after the loop"


def _describe_updates(phase: Phase) -> list[str]:
    """Return what callbacks move, or that the optimizer updates leaf by leaf."""
    loops = (*phase.loops, *(phase.leaves.loops if phase.leaves else ()))
    ops = list(itertools.chain.from_iterable(loop.ops for loop in loops))
    called = dict.fromkeys(op.record.kind for op in ops if op.record.kind in CALLBACK_MOVES)
    if called:
        return [f"callbacks move {', '.join(CALLBACK_MOVES[kind] for kind in called)}"]
    if not phase.leaves:
        return []

    stored = list[Op]()
    for op in ops:
        if op.record.leaves != LAYERS and (op.verb, op.record.kind) == ("store", "opt_state"):
            stored.append(op)
    if not stored:
        return []
    num_leaves = len({op.record.leaves for op in stored})
    num_cut = len({op.record.leaves for op in stored if op.lag})
    in_pieces = f", {num_cut} of {num_leaves} in pieces of rows" if num_cut else ""
    return [f"opt_state is read and written leaf by leaf{in_pieces}"]


# --- tables ---------------------------------------------------------------------------------------


def table_rows(phase: Phase) -> list[str]:
    """Return the lines of a table: phase, tick, and layers fetched, taken, computed, stored."""
    rows = list[_Row]()
    if phase.first >= 0:
        fetched = phase.first if phase.fetches else -1
        rows.append(_Row("before", fetched=fetched, taken=phase.first))
    for slot, layer in enumerate(phase.preload):
        rows.append(_Row("before", fetched=layer, slot=slot))
    # A fetch fills the slot that the take in its tick has emptied, so both slots are equal
    # unless one is -1.
    slots = np.maximum(phase.use_slot, phase.fetch_slot)
    for tick, layer in enumerate(phase.layer):
        rows.append(
            _Row(
                tick,
                fetched=phase.fetch[tick],
                slot=slots[tick],
                taken=phase.consume[tick],
                computed=layer,
                stored=phase.store[tick],
            )
        )
    rows += [_Row("after", stored=layer) for layer in phase.drain]
    return [_format_row(phase.name, row) for row in rows]


def _format_row(name: str, row: _Row) -> str:
    cells = [f"{layer if layer >= 0 else '-':>7}" for layer in row[1:]]
    return " ".join([f"{name:<8} {row.tick:>6}", *cells])
