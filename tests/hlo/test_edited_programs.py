"""Edited program texts are read, or refused with their line and the reason.

Time and memory stay bounded.
"""

import gzip
import pathlib
import random
import re
from collections.abc import Callable

import fuzz
import pytest

from zerojax import hlo

TEXTS = 5000
FOLDER = pathlib.Path(__file__).parent / "programs"
PROGRAMS = {
    path.name.split(".")[0]: gzip.decompress(path.read_bytes()).decode()
    for path in sorted(FOLDER.glob("*.txt.gz"))
}
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "17",
    "65536",
    "2147483648",
    "1000000000000000000",
    "9" * 400,
    "",
]
READERS: dict[str, Callable[[str], object]] = {
    "simulate": lambda text: hlo.simulate(text, streams="turns"),
    "host_traffic": lambda text: hlo.host_traffic(text, unknown_trips=1),
    "collective_bytes": lambda text: hlo.collective_bytes(text, unknown_trips=1),
    "peak_gathered_bytes": hlo.peak_gathered_bytes,
    "spans": hlo.spans,
    "num_products": hlo.num_products,
    "carried_arrays": hlo.carried_arrays,
    "unsafe_host_slices": lambda text: hlo.unsafe_host_slices(text, 1),
}


def edited(text: str, rng: random.Random) -> str:
    """Return a text with one to three edits."""
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(lines))
        line = lines[at]
        kind = rng.choice(
            [
                "drop",
                "number",
                "number",
                "swap",
                "bracket",
                "cut",
                "double",
                "name",
                "trips",
                "move",
            ]
        )
        if kind == "drop":
            del lines[at : at + rng.choice([1, 1, 5, 50])]
        elif kind == "number" and (found := list(re.finditer(r"\d+", line))):
            match = rng.choice(found)
            lines[at] = line[: match.start()] + rng.choice(NUMBERS) + line[match.end() :]
        elif kind == "swap" and len(names := re.findall(r"%[\w.\-]+", line)) > 1:
            one, other = rng.sample(names, 2)
            lines[at] = line.replace(one, "%\0").replace(other, one).replace("%\0", other)
        elif kind == "bracket" and (found := list(re.finditer(r"[(){}\[\]]", line))):
            match = rng.choice(found)
            lines[at] = line[: match.start()] + rng.choice(["", "(", "}"]) + line[match.end() :]
        elif kind == "cut":
            lines = "\n".join(lines)[: rng.randrange(len("\n".join(lines)) + 1)].split("\n")
        elif kind == "double":
            lines.insert(at, line)
        elif kind == "name" and (found := re.findall(r"%[\w.\-]+", line)):
            other = rng.choice(re.findall(r"%[\w.\-]+", rng.choice(lines)) or ["%none"])
            lines[at] = line.replace(rng.choice(found), other)
        elif kind == "trips":
            joined = "\n".join(lines)
            lines = re.sub(
                r'("known_trip_count":\{"n":")\d+', rf"\g<1>{rng.choice(NUMBERS)}", joined, count=1
            ).split("\n")
        elif kind == "move":
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
        if not lines:
            break
    return "\n".join(lines)


def check(seeds: range) -> None:
    names = ["cpu", "cpu", "h200x8", "h200x8", "h200_streamed"]  # the last one takes the longest

    def case(seed: int) -> Callable[[], str]:
        def read() -> str:
            rng = random.Random(seed)
            text = edited(PROGRAMS[rng.choice(names)], rng)
            try:
                READERS[rng.choice(["simulate", "simulate", *READERS])](text)
            except ValueError:
                return "refused"
            return "read"

        return read

    found = fuzz.run_all([(f"seed {seed}", case(seed)) for seed in seeds])
    assert min(found["refused"], found["read"]) > len(seeds) // 20
    print(f"{len(seeds)} texts of programs: {dict(found)}")


def test_edited_programs_are_read_or_refused():
    check(range(24))


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(10))
def test_all_edited_programs_are_read_or_refused(block):
    check(range(block * TEXTS // 10, (block + 1) * TEXTS // 10))


@pytest.mark.parametrize("name", ["cpu", "h200_streamed"])
def test_real_programs_are_read(name):
    text = PROGRAMS[name]
    assert hlo.num_products(text) > 0
    found = hlo.simulate(text)
    assert found.seconds > 0
    assert bool(found.notes) == (name == "cpu")
    assert ("compiled for a CPU" in str(found)) == (name == "cpu")


SMALL = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%n, %x)
}

%condition (q: (s32[], f32[4,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %a = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[4,8]{1,0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""


@pytest.mark.parametrize(("old", "new", "message"), [
    ("index=1", "index=7", r"line 6 of the program's text: x reads element 7 of p, which has 2"),
    ("tuple(%n, %x)", "tuple(%n, %y)", r"line 7 .*: next reads %y, which is not defined above it"),
    ("body=%body", "body=%gone", r"line 17 .*: loop calls computation gone, which is not in the text"),
    ("body=%body", "body=%main", r"line 17 .*: loop calls main, which calls it back: recursion is not valid HLO"),
    (', body=%body', "", r"line 17 .*: the loop loop needs one condition, one body"),
    ('"n":"4"', f'"n":"{"9" * 5000}"', r"line 17 .*: a number with 5,000 digits"),
    ('"n":"4"', '"n":"1000000000000000000"', r"line 17 .*: the loop loop runs 1e\+18 times; 0 to 1,000,000 are supported"),
    ("f32[4,8]{1,0} get", "f32[4,8]{1,1} get", r"line 6 .*: the layout \(1, 1\) of x does not permute its dims"),
    ("f32[4,8]{1,0} get", "f99[4,8]{1,0} get", r"line 6 .*: x has the unknown element type 'f99'"),
    ("f32[4,8]{1,0} get", "f32[4,8{1,0} get", r"line 6 .*: the shape of x is neither an array nor"),
    ("parameter(0)\n  %n", "parameter(x)\n  %n", r"line 4 .*: p is parameter\(x\): a number is needed"),
    ("  %n = s32[] get-tuple-element(%p), index=0", "  %n", r"line 5 .*: not an instruction: %n"),
    ("\n}\n\n%condition", "\n\n%condition", r"line 9 .*: computation body is not closed before condition begins"),
    ("ENTRY %main", "%main", r"the text has no ENTRY"),
    ("ROOT %next", "%next", r"line 7 .*: computation body has no ROOT"),
])  # fmt: skip
def test_texts_that_xla_does_not_write_are_refused_with_line_and_reason(old, new, message):
    hlo.simulate(SMALL)
    for read in (hlo.simulate, hlo.spans, hlo.host_slices):
        with pytest.raises(ValueError, match=message):
            read(SMALL.replace(old, new, 1))
