"""Python's switch interval is short while a program calls back, and is restored afterwards."""

import sys

import jax
import pytest
import toys

import zerojax as zj
from zerojax.program.runner import Runner
from zerojax.runtime import quick_switches, switching


@pytest.fixture(autouse=True)
def _interval_stays():
    before = sys.getswitchinterval()
    yield
    left = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    assert left == before


def test_the_interval_is_short_inside_and_as_before_outside():
    before = sys.getswitchinterval()
    with quick_switches():
        assert sys.getswitchinterval() == pytest.approx(switching.SECONDS, abs=2e-6)
        with quick_switches():  # a second program
            assert sys.getswitchinterval() == pytest.approx(switching.SECONDS, abs=2e-6)
        assert sys.getswitchinterval() == pytest.approx(switching.SECONDS, abs=2e-6)
    assert sys.getswitchinterval() == before
    with pytest.raises(ZeroDivisionError), quick_switches():
        raise ZeroDivisionError


def test_a_shorter_interval_and_one_that_is_set_meanwhile_stay():
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    short = sys.getswitchinterval()
    with quick_switches():
        assert sys.getswitchinterval() == short
    assert sys.getswitchinterval() == short
    sys.setswitchinterval(before)
    with quick_switches():
        sys.setswitchinterval(2e-3)
    assert sys.getswitchinterval() == pytest.approx(2e-3, abs=2e-6)
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("opt_state", "is_short"), [("nvme", True), ("pinned_host", False)])
def test_a_step_that_calls_back_has_it(monkeypatch, tmp_path, opt_state, is_short):
    seen, call = [], Runner.call

    def watched(self, program, *args):
        seen.append(sys.getswitchinterval())
        return call(self, program, *args)

    monkeypatch.setattr(Runner, "call", watched)
    config = zj.ZeroConfig(opt_state=opt_state, swap_dir=str(tmp_path))
    with zj.build_train_step(
        toys.layered(), toys.optimizer(), config, zj.make_mesh(devices=jax.devices()[:1])
    ) as program:
        jax.block_until_ready(program.step(program.init(jax.random.key(0)), toys.batches(1)[0]))
    assert seen
    assert {interval <= switching.SECONDS * 1.01 for interval in seen} == {is_short}
