"""Statements of processes are compared call by call.

The error names the first difference and the processes concerned.
"""

from zerojax.runtime.statements import (
    END,
    Statement,
    all_wait,
    describe,
    differing_parts,
    digest,
    find_closed,
    find_conflict,
)

BUILD, INIT = "program 1, build_train_step", "program 1, init"
STEP = "program 1, step over ['tokens'] int32[4,8]; ['weight'] float32[]"
LONGER = "program 1, step over ['tokens'] int32[4,9]; ['weight'] float32[]"
EVAL = "program 1, eval over ['tokens'] int32[4,8]; ['weight'] float32[]"
FIRST = ((1, BUILD), (2, INIT), (3, STEP))


def said(process, number, changes=FIRST, **fields):
    return Statement(process=process, number=number, changes=changes, **fields)


def test_a_statement_survives_its_text():
    statement = said(1, 9, parts={"key": "0"}, details=True, closed=("program 1",), left="ended")
    assert Statement.from_text(statement.to_text()) == statement
    assert Statement.from_text(Statement(process=0).to_text()) == Statement(process=0)


def test_a_label_holds_until_it_changes():
    statement = said(0, 9, ((3, STEP), (7, EVAL), (8, STEP)))
    labels = [statement.label_at(number) for number in range(1, 11)]
    assert labels == [None, None, STEP, STEP, STEP, STEP, EVAL, STEP, STEP, None]


def test_processes_at_different_places_of_one_order_do_not_conflict():
    assert (
        find_conflict([said(0, 900), said(1, 3), said(2, 2, FIRST[:2]), Statement(process=3)])
        is None
    )
    # what a process no longer remembers is not a difference
    assert find_conflict([said(0, 900), said(1, 900, ((500, STEP),))]) is None


def test_another_call_is_found_where_it_was_made():
    found = find_conflict([said(0, 20), said(1, 20), said(2, 12, (*FIRST, (12, EVAL)))])
    assert found is not None
    assert found.number == 12
    assert (
        found.sentence
        == "call 12 is program 1, step in processes 0, 1, but program 1, eval in process 2"
    )


def test_another_shape_is_found_and_only_its_leaf_is_named():
    statements = [said(0, 12), said(1, 12, (*FIRST, (12, LONGER)), parts={})]
    found = find_conflict(statements)
    assert found is not None
    assert found.sentence == (
        "call 12 is program 1, step over ['tokens'] int32[4,8] in process 0, "
        "but program 1, step over ['tokens'] int32[4,9] in process 1"
    )
    assert not all_wait(statements, 12)
    assert find_conflict([said(0, 11), statements[1]]) is None  # process 0 has not got there
    assert find_conflict(statements, settled={12}) is None


def test_a_process_that_left_conflicts_with_a_further_call_alone():
    left = said(1, 12, (*FIRST, (12, END)), left="ended with ValueError (bad data)")
    assert find_conflict([said(0, 11), left]) is None
    found = find_conflict([said(0, 12), left])
    assert found is not None
    assert (
        found.sentence
        == "call 12 is program 1, step in process 0; process 1 ended with ValueError (bad data) before it"
    )
    assert find_conflict([said(0, 12, (*FIRST, (12, END)), left="ended"), left]) is None


def test_a_closed_program_is_missed_only_by_its_own_calls():
    closed = said(1, 11, closed=("program 1",))
    assert find_closed([said(0, 11), closed]) is None
    assert find_closed([said(0, 12, (*FIRST, (12, "program 10, step over x"))), closed]) is None
    found = find_closed([said(0, 12), closed])
    assert found is not None
    assert found.number == 12
    assert found.sentence.startswith(
        "process 1 closed program 1 after call 11, and call 12 is program 1, step"
    )


def test_parts_are_compared_when_all_have_come():
    first, second = (
        said(0, 2, FIRST[:2], parts={"key": "a", "x": "1"}),
        said(1, 2, FIRST[:2], parts={"key": "b", "x": "1"}),
    )
    assert differing_parts([first, second], 2) == {"key": {"a": [0], "b": [1]}}
    assert differing_parts([first, said(1, 1, FIRST[:1])], 2) is None
    assert differing_parts([first, said(1, 7)], 2) == {}  # which agreed on this call before
    assert all_wait([first, second], 2)
    assert all_wait([first, said(1, 1, FIRST[:1])], 2)  # so far
    assert not all_wait([first, said(1, 2, FIRST[:2])], 2)
    assert digest(["a", "b"]) != digest(["ab"])


def test_a_difference_is_told_in_the_lines_that_differ():
    statements = [said(0, 2, FIRST[:2]), said(1, 2, FIRST[:2])]
    lines = {"config": {"stage=3\nclip_norm=1.0": [0, 2], "stage=3\nclip_norm=None": [1]}}
    assert describe(2, lines, statements) == (
        "program 1, init differs between processes: config: clip_norm=1.0 in processes 0, 2; clip_norm=None in process 1"
    )
    many = {"model": {"\n".join(f"leaf {i}" for i in range(9)): [0], "": [1]}}
    assert describe(2, many, statements).endswith(
        "leaf 0, leaf 1, leaf 2 and 6 more in process 0; nothing else in process 1"
    )
