"""Tests run on 8 simulated CPU devices; programs for GPUs are compiled, not run."""

import importlib.metadata
import os
import pathlib
import sys

# Small programs take longer to compile than to run: leave LLVM's optimizations out, and XLA's in. Fusions without MLIR compile
# in half the time, and round in another way; later versions of XLA have no such flag.
HAS_FUSION_FLAG = importlib.metadata.version("jax").startswith("0.10.")
FLAGS = ["--xla_backend_optimization_level=0", *(["--xla_cpu_use_fusion_emitters=false"] if HAS_FUSION_FLAG else [])]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
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
def default_fusions():
    """Compile zerojax's programs as users do, fusions with MLIR and all: for claims about the last bits."""
    jit = jax.jit

    def as_users_do(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        nested = caller == "zerojax.tiling.loops"  # options are those of the whole program
        if caller.startswith("zerojax.") and not nested and options.get("compiler_options") is None:
            options["compiler_options"] = {"xla_cpu_use_fusion_emitters": True}
        return jit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if HAS_FUSION_FLAG:
            patch.setattr(jax, "jit", as_users_do)
        yield


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items):
    """Leave the cases that `by_default` does not name to `-m exhaustive`."""
    cases = {}
    for item in items:
        if (marker := item.get_closest_marker("by_default")) is not None:
            cases.setdefault((item.path, item.originalname), (marker, []))[1].append(item)
    for (path, name), (marker, found) in cases.items():
        ids = {item.callspec.id for item in found}
        if len(ids) > 1 and (unknown := set(marker.args) - ids):
            raise pytest.UsageError(f"{path}: {name} has no cases {sorted(unknown)}: they are {sorted(ids)}")
        for item in found:
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.exhaustive)


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
