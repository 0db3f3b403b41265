"""Tests run on 8 simulated CPU devices; programs for GPUs are compiled, not run."""

import contextlib
import os
import pathlib
import sys

# Small programs take longer to compile than to run: leave LLVM's optimizations out, and XLA's in.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the compile-only GPU topology must not look for a driver

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("tests/helpers", "examples", "benchmarks")]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _disk_is_not_probed(monkeypatch):
    """Take default settings of a disk: programs from disk are built many times, and a probe takes a second."""
    from host_offload.disk.tuning import DEFAULT

    monkeypatch.setattr("zerojax.runtime.swap.tune", lambda _: DEFAULT)


@pytest.fixture
def quick_fusions():
    """Compile zerojax's programs for CPUs in half the time or less: fusions without MLIR, which round in another way.

    For claims that hold whatever the last bits are. Later versions of XLA have no such flag. A test that undoes what it
    patched does not undo this: programs are compiled late.
    """
    jit = jax.jit

    def quick(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        nested = caller == "zerojax.tiling.loops"  # options are those of the whole program
        if caller.startswith("zerojax.") and not nested and options.get("compiler_options") is None:
            options["compiler_options"] = {"xla_cpu_use_fusion_emitters": False}
        return jit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if jax.__version__.startswith("0.10."):
            patch.setattr(jax, "jit", quick)
        yield


@contextlib.contextmanager
def _quick_processes():
    jax.devices()  # this process has read its own flags by then
    with pytest.MonkeyPatch.context() as patch:
        if jax.__version__.startswith("0.10."):
            patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false")
        yield


@pytest.fixture
def quick_processes():
    """Let processes that a test starts compile as with `quick_fusions`."""
    with _quick_processes():
        yield


@pytest.fixture(scope="module")
def quick_processes_of_file():
    """Let processes that the tests of a file start do so; all of them."""
    with _quick_processes():
        yield


@pytest.fixture(scope="session")
def h200_compiler():
    """Skip where nothing can be compiled for an H200 that is not there; on Linux that is a failure."""
    from zerojax import aot

    try:
        aot.gpu_devices("h200", 1, 1)
    except RuntimeError as e:
        if sys.platform == "linux":
            raise
        pytest.skip(f"compiling for GPUs without one needs Linux and zerojax[aot]: {e}")
