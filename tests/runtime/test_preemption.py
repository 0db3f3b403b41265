"""A signal is recorded, and reported after the step; its previous handler is restored.

Runs of several processes are in tests/e2e.
"""

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
    """Make an interrupt raise KeyboardInterrupt.

    A shell that runs the tests in the background ignores the signal otherwise.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_impatient_interrupt_is_carried_out(ctrl_c):
    with zj.Preemption() as preemption:
        signal.raise_signal(signal.SIGINT)
        assert preemption.reached(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class Service:
    """A stand-in for JAX's coordination service.

    It chooses the number after the largest one with which it was asked.
    """

    def __init__(self):
        self.last, self.chosen = 0, None

    def reached(self, number):
        assert number > self.last
        self.last = number
        return number == self.chosen

    def preempt(self):
        self.chosen = self.last + 1


@pytest.mark.parametrize("steps", [(41, 42), (10, 20)], ids=["resumed", "every tenth"])
def test_of_several_processes_the_next_call_is_told_whatever_its_step(monkeypatch, steps):
    service = Service()
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", service.reached
    )
    with zj.Preemption() as preemption:
        service.preempt()  # before the first step, while the program compiles
        assert preemption.reached(steps[0])
        assert preemption.reached(steps[1])
    service.preempt()  # before it is entered, while a state is restored
    with zj.Preemption() as preemption:
        assert preemption.reached(steps[0])
    with zj.Preemption() as preemption:
        assert not preemption.reached(steps[0])
        service.preempt()
        assert preemption.reached(steps[1])


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
