"""An error in one of several processes is raised in all of them.

If there are two kinds of errors, all processes raise the more severe kind.
"""

import threading

import jax
import pytest

import zerojax as zj
from zerojax.runtime.processes import AllProcesses


@pytest.fixture
def together(monkeypatch):
    """Return `run(errors)`, which returns what each of two processes raises.

    The processes are threads here, and their work raises these errors.
    """
    here, barrier, numbers = threading.local(), threading.Barrier(2), {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)

    def least(self, number):
        numbers[here.index] = number
        barrier.wait(10)
        return min(numbers.values())

    monkeypatch.setattr(AllProcesses, "_is_alone", False)
    monkeypatch.setattr(AllProcesses, "least", least)
    mesh = zj.make_mesh(devices=jax.devices()[:1])

    def run(errors, lesser):
        raised = {}

        def work(index):
            here.index = index

            def fail():
                if errors[index] is not None:
                    raise errors[index]

            try:
                AllProcesses(mesh, "reading", RuntimeError, lesser).do(fail)
                raised[index] = None
            except Exception as error:
                raised[index] = error

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return raised[0], raised[1]

    return run


def told(process):
    return f"reading of process {process} failed"


def test_what_fails_in_one_process_is_raised_in_both(together):
    assert together((None, None), None) == (None, None)
    error = OSError("refused")
    first, second = together((None, error), None)
    assert isinstance(first, RuntimeError)
    assert told(1) in str(first)
    assert second is error


def test_a_lesser_error_gives_way(together):
    lost, refused = ValueError("lost"), OSError("refused")
    first, second = together((lost, None), ValueError)
    assert first is lost
    assert isinstance(second, ValueError)
    assert told(0) in str(second)
    first, second = together((lost, refused), ValueError)
    assert isinstance(first, RuntimeError)
    assert told(1) in str(first)
    assert second is refused
    other = ValueError("lost too")
    assert together((lost, other), ValueError) == (lost, other)
