"""The session's table of states: every call from every state follows the table.

The docstring shows that table.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import zerojax as zj
from host_offload.disk.errors import SwapError
from zerojax.runtime import swap
from zerojax.runtime.swap import TRANSITIONS, SwapSession, SwapState
from zerojax.state.disk_layout import DiskLayout
from zerojax.state.train_state import OnDisk

SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


def new_session(folder):
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    layout = DiskLayout(zj.ZeroConfig(stage=3, params="nvme", swap_dir=str(folder)), mesh)
    layout.declare("params.0", 1, ["w"], [SHAPE], [()])
    return SwapSession(layout)


def leaf_of(session):
    """Return a leaf of the state on disk."""
    return OnDisk(jnp.full(1, session.generation), SHAPE.shape, SHAPE.dtype)


def lose(session):
    """Abort a step in the middle."""
    leaf = leaf_of(session)
    session.begin(leaf, ())
    leaf.token.delete()
    with pytest.raises(ValueError, match="none, since a step was interrupted"):
        session.begin(OnDisk(jnp.ones(1, jnp.int32), SHAPE.shape, SHAPE.dtype), ())


def test_a_session_without_a_state_refuses_another_ones(tmp_path):
    session = new_session(tmp_path)
    session.claim()
    other = OnDisk(jnp.ones(1, jnp.int32), SHAPE.shape, SHAPE.dtype)
    with pytest.raises(ValueError, match=r"has made no state, .* restore a checkpoint, or"):
        session.begin(other, ())
    session.close()


WAYS = {
    SwapState.UNCLAIMED: (),
    SwapState.CLAIMED: (SwapSession.claim,),
    SwapState.OPEN: (SwapSession.open,),
    SwapState.RUNNING: (SwapSession.open, lambda session: session.begin(leaf_of(session), ())),
    SwapState.LOST: (SwapSession.open, lose),
    SwapState.CLOSED: (SwapSession.open, SwapSession.close),
}


@pytest.fixture
def session_in(tmp_path):
    """Return `session_in(state)`."""
    with contextlib.ExitStack() as stack:

        def make(state):
            session = new_session(tmp_path)
            stack.callback(session.close)
            for step in WAYS[state]:
                step(session)
            assert session.state is state
            return session

        yield make


def call(session, name, path):
    """Make a call that reads nothing from disk."""
    match name:
        case "begin":
            session.begin((), ())
        case "snapshot":
            with session.snapshot((), ()) as (snapshot, stores):
                assert stores == []
            snapshot.close()
        case "trace":
            with session.trace(path):
                pass
        case _:
            getattr(session, name)()


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("state", SwapState, ids=lambda state: state.name)
def test_swap_session_every_call_from_every_state_does_what_the_table_says(
    session_in, state, name, tmp_path
):
    session, is_gone = session_in(state), state in (SwapState.UNCLAIMED, SwapState.CLOSED)
    if state in TRANSITIONS[name]:
        call(session, name, tmp_path / "trace.json")
        after = TRANSITIONS[name][state]
        assert session.state is (SwapState.OPEN if after is None else after)
    else:
        with pytest.raises(
            RuntimeError if is_gone else AssertionError,
            match="is closed" if is_gone else "no program has begun",
        ):
            call(session, name, tmp_path / "trace.json")
        assert session.state is state
    has_folder = session.state not in (SwapState.UNCLAIMED, SwapState.CLOSED)
    assert has_folder == (tmp_path / "zerojax-swap-0").is_dir() == (session.swap.engine is not None)


def test_swap_session_docstring_shows_the_table():
    lines = [f"{'state':<11}" + "".join(f"{name:<{width(name)}}" for name in TRANSITIONS)]
    for state in SwapState:
        lines.append(
            f"{state.name:<11}"
            + "".join(f"{shown(name, state):<{width(name)}}" for name in TRANSITIONS)
        )
    assert swap.__doc__ is not None
    assert "\n".join(f"    {line.rstrip()}" for line in lines) in swap.__doc__


def shown(name, state):
    after = TRANSITIONS[name].get(state, "-")
    return "same" if after is state else "back" if after is None else getattr(after, "name", after)


def width(name):
    return 2 + max(len(name), *(len(shown(name, state)) for state in SwapState))


@pytest.mark.parametrize("state", [SwapState.CLAIMED, SwapState.LOST], ids=lambda state: state.name)
def test_swap_session_without_a_state_on_disk_runs_what_reads_none_and_refuses_the_rest(
    session_in, state
):
    session = session_in(state)
    leaf = OnDisk(jnp.ones(1, jnp.int32), SHAPE.shape, SHAPE.dtype)
    with pytest.raises(ValueError, match="is not the one on disk"):
        session.begin(leaf, ())
    with pytest.raises(ValueError, match="is not the one on disk"), session.snapshot(leaf, ()):
        pass
    assert session.state is state
    session.begin((), ())
    session.finish()
    assert session.state is state


@pytest.mark.parametrize("name", ["begin", "snapshot", "finish"])
def test_swap_session_that_finds_an_error_of_the_engine_has_lost_the_state(
    session_in, name, tmp_path
):
    session = session_in(SwapState.RUNNING if name == "finish" else SwapState.OPEN)
    session.engine.fail(OSError(5, "of a write that ends late"))
    with pytest.raises(SwapError, match="the state on the disk is lost"):
        call(session, name, tmp_path)
    assert session.state is SwapState.LOST
    with pytest.raises(SwapError, match="the state on the disk is lost"):
        session.begin((), ())
    session.open()
    assert session.state is SwapState.OPEN


def test_swap_session_of_a_program_left_that_was_no_step_has_its_state_still(session_in):
    session = session_in(SwapState.RUNNING)
    session.begin(leaf_of(session), ())
    session.finish(is_step=True)
    assert session.state is SwapState.OPEN
    session.begin(leaf_of(session), ())


def test_swap_session_that_cannot_claim_is_closed_and_one_that_cannot_open_is_claimed(
    session_in, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr("zerojax.runtime.swap.available_bytes", lambda: 1)
        session = new_session(tmp_path)
        with pytest.raises(RuntimeError, match="lower prefetch_distance"):
            session.claim()
        assert session.state is SwapState.CLOSED
    session.claim()
    with monkeypatch.context() as patched:
        patched.setattr("zerojax.runtime.swap.available_bytes", lambda: 1)
        with pytest.raises(RuntimeError, match="lower prefetch_distance"):
            session.open()
    assert session.state is SwapState.CLAIMED
    session.close()
    assert not (tmp_path / "zerojax-swap-0").exists()
