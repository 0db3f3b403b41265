"""A signal is noted and told after the step; what it did before comes back. Runs of several processes are in tests/e2e."""

import signal
import threading

import pytest

import zerojax as zj


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_told_and_its_handler_comes_back(number):
    before = signal.getsignal(number)
    with zj.Preemption() as preemption:
        assert not preemption.reached(1)
        signal.raise_signal(number)
        assert preemption.reached(2)
        assert preemption.reached(3)
    assert signal.getsignal(number) == before
    with preemption:
        assert not preemption.reached(1)


@pytest.fixture
def ctrl_c():
    """An interrupt raises KeyboardInterrupt, also where a shell runs the tests in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_impatient_interrupt_is_carried_out(ctrl_c):
    with zj.Preemption() as preemption:
        signal.raise_signal(signal.SIGINT)
        assert preemption.reached(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_threads_are_refused():
    found = []

    def enter():
        try:
            zj.Preemption().__enter__()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in found[0]
