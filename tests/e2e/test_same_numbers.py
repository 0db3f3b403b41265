"""benchmarks/same_numbers.py detects numbers that differ by a bit.

It also detects programs that differ by more than their names.
"""

import copy

import pytest
import same_cases
import same_numbers

BEFORE = {
    "about": {"zerojax": "before", "jax": "1"},
    "trained: a": {
        "metrics": [{"loss": "0x1.8p+0"}, {"loss": "0x1.4p+0"}],
        "params": {"w": "ab", "b": "cd"},
    },
    "compiled: b": {"bytes": {"temp": 8}, "memory": ["8"], "text": "12"},
}


def changed(*path, value):
    """Return BEFORE with one entry changed; None removes it."""
    after = copy.deepcopy(BEFORE)
    inner = after
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return after


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trained: a", "metrics", 1, "loss"), "0x1.4000000000001p+0"),
        (("trained: a", "params", "b"), None),
        (("trained: a",), {"failed": "ValueError: no"}),
        (("compiled: b", "bytes", "temp"), 9),
        (("compiled: b",), None),
    ],
)
def test_a_number_that_differs_is_told(path, value, capsys):
    assert not same_numbers.compare(BEFORE, changed(*path, value=value))
    told = capsys.readouterr().out
    assert "DIFFERENT numbers" in told
    assert "/".join(map(str, path)) in told


def test_other_places_and_texts_are_no_difference(capsys):
    assert same_numbers.compare(BEFORE, changed("about", "zerojax", value="after"))
    assert "HLO texts: 0 of 1 differ" in capsys.readouterr().out
    assert same_numbers.compare(BEFORE, changed("compiled: b", "text", value="34"))
    assert "HLO texts: 1 of 1 differ" in capsys.readouterr().out


def test_nothing_compared_or_failed_is_not_alike():
    assert not same_numbers.compare({"about": {}}, {"about": {}})
    failed = {"about": {}, "trained: a": {"failed": "ValueError: no"}}
    assert not same_numbers.compare(failed, failed)


HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "before.py"

%body (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="step/{x}" stack_frame_id=1}
  ROOT %add.2 = f32[8]{0} add(%x.1, %x.1)
}
"""


def test_text_without_names_is_that_of_the_program():
    names = [
        ("jit_step", "jit_other"),
        ("before.py", "after.py"),
        ("x.1", "y.7"),
        ("add.2", "sum"),
        ("step/{x}", "other"),
    ]
    renamed = HLO
    for old, new in names:
        assert old in renamed
        renamed = renamed.replace(old, new)
    assert same_cases.nameless(renamed) == same_cases.nameless(HLO)
    for old, new in (
        ("f32[8]", "f32[4]"),
        (" add(", " multiply("),
        ("(%x.1, %x.1)", "(%x.1, %add.2)"),
    ):
        assert same_cases.nameless(HLO.replace(old, new)) != same_cases.nameless(HLO)
