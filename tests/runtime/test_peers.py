"""Processes that differ raise an error or are ended.

Here the processes are threads, and their messages are in a dict.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zerojax.runtime import peers
from zerojax.runtime.peers import Calls, Peers


class Messages:
    """The part of JAX's coordination service that is used."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_lost = False

    def _check(self) -> None:
        if self.is_lost:
            raise RuntimeError("UNAVAILABLE: no service")

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._check()
        assert allow_overwrite
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        self._check()
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._check()
        return [(name, value) for name, value in list(self.values.items()) if name.startswith(key)]


class Together:
    """Some processes, and the actions of each."""

    def __init__(self, count: int) -> None:
        self.messages, self.ended = Messages(), [False] * count
        self.peers = [
            Peers(self.messages, range(count), me, lambda me=me: self._end(me))
            for me in range(count)
        ]
        self.calls: list[Calls] = []

    def _end(self, me: int) -> None:
        self.ended[me] = True

    def run(self, *work: Callable[[], Any]) -> list[Any]:
        """Return what each process's work returned or raised."""
        found: list[Any] = [None] * len(work)

        def one(me: int) -> None:
            try:
                found[me] = work[me]()
            except Exception as error:
                found[me] = error

        threads = [threading.Thread(target=one, args=(me,)) for me in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    def build(self, *parts: dict[str, list[str]]) -> list[Any]:
        return self.run(
            *(functools.partial(self.peers[me].program, part) for me, part in enumerate(parts))
        )

    def step(self, me: int, shape: str) -> bool:
        return self.calls[me].note("step", shape, lambda: [shape])

    def all_step(self, *shapes: str) -> list[Any]:
        return self.run(
            *(functools.partial(self.step, me, shape) for me, shape in enumerate(shapes))
        )

    def stop(self) -> None:
        for peer in self.peers:
            peer._stops = True
            peer._wake.set()


@pytest.fixture
def start(monkeypatch) -> Iterator[Callable[[int], Together]]:
    for name, seconds in (
        ("_INTERVAL", 0.01),
        ("_REST", 0.0),
        ("_GRACE", 0.05),
        ("_CLOSED_AFTER", 0.1),
    ):
        monkeypatch.setattr(peers, name, seconds)
    started: list[Together] = []

    def begin(count: int) -> Together:
        together = Together(count)
        started.append(together)
        together.calls = together.build(*[{"config": ["stage=3"]}] * count)
        return together

    yield begin
    for together in started:
        together.stop()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_equal_processes_go_on(start):
    together = start(3)
    assert all(isinstance(calls, Calls) for calls in together.calls)
    for shape in ("a", "b", "a", "a", "b"):
        firsts = together.all_step(shape, shape, shape)
        assert len(set(firsts)) == 1
    time.sleep(0.1)
    for peer in together.peers:
        peer.leave("ended")
    together.run(*(peer.await_others for peer in together.peers))
    assert not any(together.ended)


def test_a_difference_is_raised_in_all_and_can_be_mended(start):
    together = start(3)
    errors = together.build({"lr": ["0.1"]}, {"lr": ["0.1"]}, {"lr": ["0.3"]})
    assert all(type(error) is ValueError for error in errors)
    assert len(set(map(str, errors))) == 1
    words = "program 2, build_train_step differs between processes: lr: 0.1 in processes 0, 1; 0.3 in process 2"
    assert words in str(errors[0])
    again = together.build(*[{"lr": ["0.1"]}] * 3)
    assert all(isinstance(calls, Calls) for calls in again)
    assert not any(together.ended)


def test_two_new_shapes_are_an_error_in_both_each_time(start):
    together = start(2)
    for _ in range(2):
        errors = together.all_step("['x'] float32[4]", "['x'] float32[5]")
        assert all(type(error) is ValueError for error in errors)
        words = "step over ['x'] float32[4] in process 0, but program 1, step over ['x'] float32[5] in process 1"
        assert words in str(errors[0])
    assert together.all_step("a", "a") == [True, True]


def test_calls_that_differ_are_an_error_in_all_however_late_one_of_them_comes(start):
    together = start(3)
    late = lambda: (time.sleep(0.3), together.step(2, "b"))  # noqa: E731
    errors = together.run(
        lambda: together.step(0, "a"), lambda: together.calls[1].agree("init", {}), late
    )
    assert all(type(error) is ValueError for error in errors)
    assert "step in process 0" in str(errors[2])
    assert "init in process 1" in str(errors[2])
    assert together.all_step("a", "a", "a") == [True, True, True]


def test_lines_that_are_too_far_down_are_named_by_their_part(start, monkeypatch):
    together = start(2)
    monkeypatch.setattr(peers, "_MOST_DETAILS", 40)
    errors = together.build(*({"model": ["the same line"] * 9 + [last]} for last in "ab"))
    assert all(
        "differs between processes: model, in lines too far down to be shown" in str(error)
        for error in errors
    )


def test_a_new_shape_in_one_process_alone_ends_both(start):
    """Process 0 is in a collective; process 1 waits for it, and raises."""
    together = start(2)
    together.all_step("a", "a")
    found = together.all_step("a", "b")
    assert found[0] is False
    assert isinstance(found[1], RuntimeError)
    assert "step over a in process 0, but program 1, step over b in process 1" in str(found[1])
    until(lambda: together.ended[0])
    assert not together.ended[1]


def test_a_known_call_in_another_order_ends_both(start):
    together = start(2)
    for shape in "ab":
        together.all_step(shape, shape)
    assert together.all_step("a", "b") == [False, False]
    until(lambda: all(together.ended))


def test_other_numbers_in_a_state_end_both(start):
    together = start(2)
    together.all_step("a", "a")
    told = lambda *rates: together.run(  # noqa: E731
        *(
            functools.partial(together.calls[me].tell, "numbers put", [f"['rate'] = {r}"])
            for me, r in enumerate(rates)
        )
    )
    assert told(0.1, 0.1) == [None, None]
    assert together.all_step("a", "a") == [False, False]
    time.sleep(0.1)
    assert not any(together.ended)
    told(0.1, 0.2)
    until(lambda: all(together.ended))
    found = together.all_step("a", "a")
    assert all("numbers put: ['rate'] = 0.1 in process 0, but" in str(error) for error in found)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_process_that_left_is_named_before_the_next_call(start, leaver):
    together = start(2)
    together.all_step("a", "a")
    together.peers[leaver].leave("ended with ValueError (bad data)")
    thread = threading.Thread(target=together.peers[leaver].await_others)
    thread.start()
    other = 1 - leaver
    until(lambda: bool(together.peers[other]._news["gone"]))
    for _ in range(2):
        words = rf"process {leaver} ended with ValueError \(bad data\) after call 2, and this is"
        with pytest.raises(RuntimeError, match=words):
            together.step(other, "a")
    together.peers[other].leave("ended")
    together.peers[other].await_others()
    thread.join(10)
    assert not any(together.ended)


def test_a_step_without_the_others_is_ended(start):
    together = start(3)
    together.all_step("a", "a", "a")
    together.step(0, "a")
    together.step(2, "a")
    together.peers[1].leave("ended")
    together.peers[1].await_others()
    until(lambda: all(together.ended))


def test_a_process_that_waits_hears_of_one_that_left(start):
    together = start(2)
    together.peers[1].leave("ended")
    found = together.run(
        lambda: together.calls[0].agree("init", {"key": ["0"]}), together.peers[1].await_others
    )
    assert isinstance(found[0], RuntimeError)
    assert "process 1 ended" in str(found[0])


def test_a_closed_program_may_be_used_again_and_else_ends_the_others(start):
    together = start(2)
    together.all_step("a", "a")
    together.calls[1].close()
    together.step(0, "a")
    time.sleep(0.03)
    together.step(1, "a")
    time.sleep(0.2)
    assert not any(together.ended)
    together.calls[1].close()
    together.step(0, "a")
    until(lambda: together.ended[0])


def test_a_lost_service_is_an_error_where_a_process_waits(start, monkeypatch):
    together = start(2)
    together.messages.is_lost = True
    found = together.run(lambda: together.calls[1].agree("init", {}))
    assert isinstance(found[0], RuntimeError)
    assert "JAX's coordination service does not answer" in str(found[0])


def test_a_process_that_does_not_come_is_named(start, monkeypatch, caplog):
    together = start(2)
    monkeypatch.setattr(peers, "_WARN_AFTER", 0.01)
    monkeypatch.setattr(peers, "_WAIT_AT_MOST", 0.6)
    found = together.run(lambda: together.calls[0].agree("init", {}))
    assert isinstance(found[0], RuntimeError)
    late = "for process 1 (after call 1, program 1, build_train_step)"
    assert late in str(found[0])
    assert f"program 1, init waits {late}" in caplog.text
