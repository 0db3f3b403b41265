"""Tests run on 8 simulated CPU devices; programs for GPUs are compiled, not run."""

import os
import pathlib
import sys

# Small programs take longer to compile than to run: leave LLVM's optimizations out, and XLA's in.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX starts: the compile-only GPU topology must not look for a driver

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "streamed"), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def quick_fusions(monkeypatch):
    """Compile steps for CPUs in half the time, where last bits do not count: fusions without MLIR, which round otherwise.

    Later versions of XLA have no such flag.
    """
    from zerojax import step

    options = step.compiler_options
    quick = {"xla_cpu_use_fusion_emitters": False} if jax.__version__.startswith("0.10.") else None
    monkeypatch.setattr(step, "compiler_options", lambda model, layout: options(model, layout) or quick)


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
