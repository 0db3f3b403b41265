"""A program works on one state, the one on its disk.

It refuses any other state, and a state that an interrupt left half updated.
"""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import os
import pickle
import signal
import threading
import time

import jax
import numpy as np
import pytest
import toys
from test_nvme_failures import build, losses_of

from host_offload.disk.errors import SwapError
from host_offload.disk.folder import SwapFolder
from zerojax.runtime.interrupts import interrupts_wait
from zerojax.state.train_state import as_arguments, as_leaves, is_stored

pytestmark = pytest.mark.xdist_group("nvme_states")  # tests share programs, so they share a process

BATCH = toys.batches(1)[0]
OTHER = (
    "is not the one on disk .*overwritten by a later init or step, or belongs to another program"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return `programs(name, **fields)`; programs are built once, and start again in each test."""
    made = {}

    def get(name, **fields):
        if name not in made:
            made[name] = build(tmp_path_factory.mktemp("swap"), **fields)
        return made[name]

    yield get
    for program in made.values():
        program.close()


@pytest.fixture
def ctrl_c():
    """Make interrupts, timeouts and the end of a job raise KeyboardInterrupt under any runner."""
    numbers = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def copy_of(state):
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def assert_refused(program, state, match=OTHER):
    calls = (
        lambda: program.step(state, BATCH),
        lambda: program.eval(state, BATCH),
        lambda: next(program.iter_params(state)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call()


def test_a_copy_of_an_earlier_state_is_refused(programs):
    program = programs("ours")
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    state = program.init(jax.random.key(0))
    old = copy_of(state)
    loss = float(
        program.eval(old, BATCH)
    )  # it is still the state on disk: only a step makes a new one
    assert len(list(program.iter_params(old))) == toys.LAYERS + 2
    assert float(program.eval(state, BATCH)) == loss
    found = []
    for batch in toys.batches(3):
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
        assert_refused(program, old)
        assert float(program.eval(copy_of(state), BATCH)) == float(program.eval(state, BATCH))
    assert found == expected


def test_a_state_of_another_program_is_refused(programs):
    """Both programs have made the same number of states, with the same number of steps."""
    program, other = programs("ours"), programs("another")
    mine, theirs = program.init(jax.random.key(0)), other.init(jax.random.key(1))
    for _ in range(2):
        assert_refused(program, theirs)
        assert_refused(other, mine)
        mine, theirs = program.step(mine, BATCH)[0], other.step(theirs, BATCH)[0]


def test_a_restored_state_is_refused(tmp_path):
    """The copy does not include what was on disk."""
    with build(tmp_path) as before:
        kept = jax.device_get(as_arguments(before.init(jax.random.key(0))))
    with build(tmp_path) as program:
        state = program.init(jax.random.key(1))
        restored = as_leaves(
            jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), kept, as_arguments(state))
        )
        assert_refused(program, restored)
        with pytest.raises(ValueError, match=OTHER):  # of every leaf
            program.step(dataclasses.replace(state, opt_state=restored.opt_state), BATCH)


def test_a_donated_state_is_told_to_every_call(programs):
    program = programs("ours")
    state = program.init(jax.random.key(0))
    pieces = program.iter_params(state)
    next(pieces)
    program.step(state, BATCH)
    assert_refused(program, state, match="donated to an earlier step")
    for read in (
        lambda: next(pieces),
        lambda: program.params(state),
        lambda: program.master_params(state),
    ):
        with pytest.raises(ValueError, match="donated to an earlier step"):
            read()


def test_an_error_before_a_step_runs_loses_nothing(programs):
    program = programs("ours")
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    state = program.init(jax.random.key(0))
    with pytest.raises(KeyError, match="weight"):
        program.step(state, {name: value for name, value in BATCH.items() if name != "weight"})
    assert losses_of(program, state)[0] == expected


@pytest.mark.by_default("4-step-2")
@pytest.mark.parametrize(
    ("devices", "name", "number"),
    [
        (1, "step", signal.SIGALRM),
        (1, "init", signal.SIGINT),
        (4, "step", signal.SIGINT),
        (4, "init", signal.SIGTERM),
    ],
)
def test_a_signal_in_the_middle_of_a_program_waits_for_its_end(
    programs, devices, name, number, monkeypatch, ctrl_c
):
    program = programs(f"on {devices}", devices=devices)
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    state = program.init(jax.random.key(0))
    old, calls = (
        copy_of(state),
        count_calls(program, monkeypatch, at=3, do=lambda: os.kill(os.getpid(), number)),
    )
    with pytest.raises(KeyboardInterrupt):
        program.step(state, BATCH) if name == "step" else program.init(jax.random.key(1))
    ended = len(calls)
    time.sleep(0.3)
    assert len(calls) == ended >= 3
    monkeypatch.undo()
    assert_refused(program, old)
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected


def count_calls(program, monkeypatch, at, do):
    """Call `act` in a callback; callbacks are slow from then on."""
    swap, calls = program.layout.disk.swap, []
    find_engine = swap.find_engine

    def counted(number):
        calls.append(number)
        if len(calls) == at:
            do()
        if len(calls) >= at:
            time.sleep(0.01)
        return find_engine(number)

    monkeypatch.setattr(swap, "find_engine", counted)
    return calls


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.by_default("4-the host's update")
@pytest.mark.parametrize("where", ["the disk", "the host's update"])
@pytest.mark.parametrize("devices", [1, 4])
def test_an_interrupt_inside_a_callback_is_raised_by_the_step(
    programs, devices, where, monkeypatch
):
    fields = {"update_on": "host", "grads": "pinned_host"} if where == "the host's update" else {}
    program = programs(f"{where} on {devices}", devices=devices, **fields)
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    state = program.init(jax.random.key(0))
    old = copy_of(state)
    if fields:
        monkeypatch.setattr(program._runner.host.host, "run_kernel", lambda *_, **__: interrupt())
    else:
        count_calls(program, monkeypatch, at=3, do=interrupt)
    with pytest.raises(KeyboardInterrupt):
        program.step(state, BATCH)
    monkeypatch.undo()
    with pytest.raises(
        (ValueError, RuntimeError), match=r"not the one on disk|state on the disk is lost"
    ):
        program.eval(old, BATCH)
    assert losses_of(program, program.init(jax.random.key(0)))[0] == expected


@pytest.mark.parametrize("call", ["eval", "init", "close"])
def test_a_step_that_an_exception_left_ends_before_anything_else(programs, call, monkeypatch):
    program = programs("ours")
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    state = program.init(jax.random.key(0))
    old, calls = copy_of(state), count_calls(program, monkeypatch, at=1, do=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "block_until_ready", lambda _: interrupt())
        with pytest.raises(KeyboardInterrupt):
            program.step(state, BATCH)
    left = len(calls)
    match call:
        case "eval":
            with pytest.raises(ValueError, match="none, since a step was interrupted"):
                program.eval(old, BATCH)
        case "close":
            program.close()
    state = program.init(jax.random.key(0))
    assert (
        len({number for number in calls[left:] if number}) == 2
    )  # both states' numbers arrived, and none was refused by mistake
    monkeypatch.undo()
    assert losses_of(program, state)[0] == expected


def test_a_second_interrupt_does_not_wait(ctrl_c):
    came = []

    @interrupts_wait()
    def call():
        for _ in range(2):
            came.append(signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        call()
    assert len(came) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_all_interrupts_wait_a_context_around_sees_both(ctrl_c):
    came = []

    @interrupts_wait(all_wait=True)
    def unbroken():
        for _ in range(3):
            came.append(signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        unbroken()
    with pytest.raises(KeyboardInterrupt):
        interrupts_wait()(lambda: (unbroken(), came.append("after")))()
    assert came == [None] * 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("where", ["the folder is made anew", "the program has just begun"])
def test_interrupts_in_a_burst_inside_of_init_are_interrupts_and_init_works_again(
    programs, monkeypatch, ctrl_c, where
):
    program, came, calls = programs("ours"), [], []
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    jitted = program._init.jitted

    def burst():
        for _ in range(3):
            came.append(signal.raise_signal(signal.SIGINT))

    if where == "the folder is made anew":
        program.swap.engine.fail(OSError(5, "of the disk"))
        rmdir = os.rmdir
        monkeypatch.setattr(
            os, "rmdir", lambda *args, **options: (burst(), rmdir(*args, **options))
        )
    else:
        calls = count_calls(program, monkeypatch, at=1, do=lambda: None)
        # JAX does not know of a program whose call was interrupted before it noted the effects.
        monkeypatch.setattr(jax, "effects_barrier", lambda: None)
        monkeypatch.setattr(program._init, "jitted", lambda *args: (jitted(*args), burst())[0])
    with pytest.raises(KeyboardInterrupt):
        program.init(jax.random.key(1))
    assert came
    monkeypatch.undo() if where == "the folder is made anew" else monkeypatch.setattr(
        program._init, "jitted", jitted
    )
    state = program.init(jax.random.key(0))
    assert where == "the folder is made anew" or len({number for number in calls if number}) == 2
    monkeypatch.undo()
    with pytest.raises(SwapError, match="in use by this process"):
        SwapFolder(program.config.swap_dir)
    assert losses_of(program, state)[0] == expected


def test_a_buffer_that_an_interrupt_lost_is_there_after_the_next_init(programs):
    program = programs("ours")
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    lost = program.swap.engine._lanes[0].records["params"].buffers
    for ring in (lost.reads, lost.writes):
        while ring.free:
            ring.take()
    lost.turns.acquire()
    state = program.init(jax.random.key(0))
    assert losses_of(program, state)[0] == expected


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt in JAX's garbage collection
@pytest.mark.parametrize("seed", range(2))
def test_bursts_of_interrupts_at_any_moment_of_init(programs, ctrl_c, seed):
    """200 bursts raise nothing but KeyboardInterrupt, and the next init works."""
    program, random = programs("ours"), np.random.default_rng(seed)
    expected, _ = losses_of(program, program.init(jax.random.key(0)), 1)
    is_inside, num_interrupted, errors = False, 0, collections.Counter()

    def handle(*_):
        if is_inside:
            raise KeyboardInterrupt

    def burst(wait, pauses):
        time.sleep(wait)
        for pause in pauses:
            if is_inside:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(pause)

    def fail():
        program.swap.engine.fail(OSError(5, "of the disk"))

    signal.signal(signal.SIGINT, handle)
    seconds = []
    for prepare in (
        lambda: None,
        fail,
    ):  # with the existing files, and with a new folder
        prepare()
        start = time.monotonic()
        program.init(jax.random.key(0))
        seconds.append(time.monotonic() - start)
    for number in range(200):
        if number % 2:
            fail()
        wait, pauses = random.random() * seconds[number % 2], random.choice([0, 2e-4, 2e-3], 5)
        thread = threading.Thread(target=burst, args=(wait, pauses))
        is_inside = True
        thread.start()
        try:
            try:
                program.init(jax.random.key(1))
            finally:  # which may be interrupted too
                is_inside = False
        except KeyboardInterrupt:
            is_inside = False
            num_interrupted += 1
        except Exception as error:
            errors[f"during: {error!r}"] += 1
        thread.join()
        try:
            assert losses_of(program, program.init(jax.random.key(0)), 1)[0] == expected
        except Exception as error:
            errors[f"after: {error!r}"] += 1
    assert not errors, f"{errors.total()} of 200: {errors}"
    assert num_interrupted > 50


def test_signals_that_waited_come_in_order_and_once(monkeypatch):
    came = []

    def handler(number, _):
        came.append(number)
        if number == signal.SIGUSR1:
            raise ZeroDivisionError

    @interrupts_wait()
    def call():
        for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM, real_time, signal.SIGUSR2):
            signal.raise_signal(number)
        assert came == []

    real_time = signal.SIGRTMIN + 1  # has no name
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, real_time)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(ZeroDivisionError):
            call()
        assert came == [signal.SIGALRM, signal.SIGUSR1, real_time, signal.SIGUSR2]
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


@pytest.mark.parametrize("call", ["step", "eval"])
def test_of_threads_that_use_one_state_each_waits_for_the_other(programs, call):
    """One of two concurrent steps is executed.

    The other caller gets an error that its state is gone, and nothing is lost.
    """
    program = programs("ours")
    expected, _ = losses_of(program, program.init(jax.random.key(0)))
    batches = toys.batches(3)
    barrier = threading.Barrier(2)

    def use(name, state):
        barrier.wait()
        return getattr(program, name)(state, batches[0])

    for _ in range(3):
        state = program.init(jax.random.key(0))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(use, name, state) for name in ("step", call)]
        refused = [str(error) for job in jobs if (error := job.exception()) is not None]
        made = [
            job.result()
            for job in jobs
            if job.exception() is None and isinstance(job.result(), tuple)
        ]
        assert all("donated to an earlier step" in error for error in refused)
        assert len(refused) == 1 or call == "eval"
        ((state, metrics),) = made
        losses = [float(metrics["loss"])]
        for batch in batches[1:]:
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses == expected


def test_a_leaf_on_disk_is_no_array_and_is_not_copied(programs):
    state = programs("ours").init(jax.random.key(0))
    for use in (np.asarray, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"is stored on disk.*program\.iter_params\(state\)"):
            use(jax.tree.leaves(state.params, is_leaf=is_stored)[0])
    with pytest.raises(TypeError, match="is stored on disk"):
        pickle.dumps(state)


def test_a_step_inside_of_jit_is_refused(programs):
    program = programs("ours")
    state = program.init(jax.random.key(0))
    for call in (program.step, program.eval):
        with pytest.raises(ValueError, match="compiled already"):
            jax.jit(call)(state, BATCH)
    program.step(state, BATCH)


def test_an_interrupt_comes_after_an_error(ctrl_c):
    @interrupts_wait()
    def call():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the program")

    with pytest.raises(KeyboardInterrupt) as raised:
        call()
    assert isinstance(raised.value.__context__, ValueError)


def test_interrupts_are_left_alone_where_python_does_not_handle_them(ctrl_c):
    failed = []

    def enter():
        with contextlib.suppress(BaseException), interrupts_wait():
            failed.append(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter()
    assert failed == [False, True]
