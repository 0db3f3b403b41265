"""The statements that processes make about their calls, and how they differ.

This module is pure: nothing in it waits or sends. Every process must make the same calls in the
same order, because each call runs a program of all processes:

    number       1                   2       3               4               5
    process 0    build_train_step    init    step over S     step over S     eval over S
    process 1    build_train_step    init    step over S     step over S     the end of the process

A call has a label: its name and the shapes of its batch. A process states the number of its last
call and the numbers at which its label changed, so a thousand equal steps are one entry. Two
statements conflict if they have different labels at the same number. The end of a process is a
label too: a process that left early conflicts with a process that made a further call.

Some calls wait until the statements of all processes are compared, before anything runs. Their
statements also contain a digest of each part that the processes must have in common. If digests
differ, the processes also state the lines of the part.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

END = "the end of the process"
"""Label of a process that left."""
IN_DETAIL = ", in detail"
"""Ending of the label of a call that states the lines of parts."""
_MOST_LINES = 3  # lines of a part that an error shows
_MOST_CHARACTERS = 600  # characters of a line that an error shows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A statement of one process about itself.

    Attributes:
      process: index of the process.
      number: number of its last call, from 1; 0 before the first one.
      changes: the last changes of the label, as (number, label), ascending.
      parts: for a call that waits, a digest of each part, or the part's lines if `details` is set.
        None: the call does not wait.
      details: whether `parts` contains lines.
      closed: programs that the process closed after its last call.
      left: how the process ended, or "".
    """

    process: int
    number: int = 0
    changes: tuple[tuple[int, str], ...] = ()
    parts: Mapping[str, str] | None = None
    details: bool = False
    closed: tuple[str, ...] = ()
    left: str = ""

    def label_at(self, number: int) -> str | None:
        """Return the label of a call; None if it was not made, or is no longer known."""
        if number > self.number:
            return None
        return next((label for first, label in reversed(self.changes) if first <= number), None)

    def to_text(self) -> str:
        """Return the statement as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Statement":
        """Return the statement from a text that `to_text` made."""
        fields = json.loads(text)
        fields["changes"] = tuple((number, label) for number, label in fields["changes"])
        fields["closed"] = tuple(fields["closed"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A call in which processes differ.

    Attributes:
      number: number of the call.
      sentence: what each process does in it.
    """

    number: int
    sentence: str


def digest(lines: Iterable[str]) -> str:
    """Return a short digest of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def find_conflict(
    statements: Sequence[Statement], settled: Collection[int] = ()
) -> Conflict | None:
    """Return the first call that two processes make differently, or None.

    Args:
      statements: statements of all processes.
      settled: numbers of calls in which all processes waited and got an answer.
    """
    changes = itertools.chain(*(s.changes for s in statements))
    starts = sorted({number for number, _ in changes}.difference(settled))
    for number in starts:
        processes: dict[str, list[int]] = {}
        for s in statements:
            label = s.label_at(number)
            if label is not None:
                processes.setdefault(label, []).append(s.process)
        if len(processes) > 1:
            return Conflict(number, _sentence(number, processes, statements))
    return None


def find_closed(statements: Sequence[Statement]) -> Conflict | None:
    """Return a call of a program that another process has closed, or None.

    A closed program may be used again, so this is an error only if it persists.
    """
    for s in statements:
        number = s.number + 1
        if not s.closed or s.label_at(number) is not None:
            continue
        labels = {t.process: t.label_at(number) or "" for t in statements}
        for program in s.closed:
            callers = [p for p, label in labels.items() if label.startswith(f"{program}, ")]
            if callers:
                head = _head(next(filter(None, labels.values())))
                return Conflict(
                    number,
                    f"process {s.process} closed {program} after call {s.number}, and call "
                    f"{number} is {head} in {_named(callers)}",
                )
    return None


def all_wait(statements: Sequence[Statement], number: int) -> bool:
    """Return whether every process that has reached this call waits in it."""
    return all(
        s.number < number or (s.parts is not None and s.number == number) for s in statements
    )


def differing_parts(
    statements: Sequence[Statement], number: int
) -> dict[str, dict[str, list[int]]] | None:
    """Return the parts in which the processes that wait in a call differ.

    A process that has made the call without waiting agreed on it earlier.

    Args:
      statements: statements of all processes.
      number: number of the call.

    Returns:
      For each differing part by name, the processes by their value. None: a process has not reached
      the call.
    """
    if any(s.number < number for s in statements):
        return None
    waiting = [s for s in statements if s.parts is not None and s.number == number]
    differing: dict[str, dict[str, list[int]]] = {}
    names = itertools.chain(*(s.parts or () for s in waiting))
    for name in dict.fromkeys(names):
        by_value: dict[str, list[int]] = {}
        for s in waiting:
            by_value.setdefault((s.parts or {}).get(name, ""), []).append(s.process)
        if len(by_value) > 1:
            differing[name] = by_value
    return differing


def describe(
    number: int,
    differing: Mapping[str, Mapping[str, Sequence[int]]],
    statements: Sequence[Statement],
) -> str:
    """Return a sentence about the parts in which processes differ in a call.

    Args:
      number: number of the call.
      differing: processes by the lines of each part, by name.
      statements: statements of all processes.
    """
    labels = (s.label_at(number) for s in statements)
    label = next((label for label in labels if label is not None), "").removesuffix(IN_DETAIL)
    parts = "; ".join(_describe_part(name, by_lines) for name, by_lines in differing.items())
    return f"{label} differs between processes: {parts}"


def _describe_part(name: str, by_lines: Mapping[str, Sequence[int]]) -> str:
    common = set.intersection(*(set(text.splitlines()) for text in by_lines))
    sides = []
    for text, processes in by_lines.items():
        lines = [line for line in text.splitlines() if line not in common]
        shown = [_cut(line) for line in lines[:_MOST_LINES]]
        more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
        sides.append(f"{', '.join(shown) or 'nothing else'}{more} in {_named(processes)}")
    return f"{name}: {'; '.join(sides)}"


def _sentence(
    number: int, processes: Mapping[str, Sequence[int]], statements: Sequence[Statement]
) -> str:
    calls = [label for label in processes if label != END]
    heads = {_head(label) for label in calls}
    sides = []
    for label in calls:
        # Shapes are named if they differ.
        shown = _head(label) if len(heads) > 1 or len(calls) == 1 else _own_shapes(label, calls)
        sides.append(f"{_cut(shown)} in {_named(processes[label])}")
    reasons = {s.process: s.left for s in statements}
    sentence = f"call {number} is {', but '.join(sides)}"
    for process in processes.get(END, ()):
        sentence += f"; process {process} {reasons[process]} before it"
    return sentence


def _own_shapes(label: str, labels: Iterable[str]) -> str:
    """Return a label without the batch leaves that all labels share."""
    common = set.intersection(*(set(_shapes(other)) for other in labels))
    leaves = [leaf for leaf in _shapes(label) if leaf not in common]
    return f"{_head(label)} over {'; '.join(leaves) or 'no other leaf'}"


def _shapes(label: str) -> list[str]:
    """Return the shapes of the batch in a label, one for each leaf."""
    return label.partition(" over ")[2].split("; ")


def _head(label: str) -> str:
    """Return a label without the shapes of its batch."""
    return label.partition(" over ")[0]


def _cut(line: str) -> str:
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}.."


def _named(processes: Sequence[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = ", ".join(map(str, processes[:8]))
    return f"processes {shown}{'' if len(processes) <= 8 else f' and {len(processes) - 8} more'}"
