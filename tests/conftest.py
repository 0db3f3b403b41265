"""Tests run on 8 simulated CPU devices; programs for GPUs are compiled, not run."""

import gc
import importlib.metadata
import os
import pathlib
import sys
import zlib

# Small programs take longer to compile than to run: skip LLVM's optimizations but not XLA's, and
# compile in one thread, since each worker has a core. Fusions without MLIR compile in half the
# time, and round differently; later versions of XLA have no such flag.
HAS_FUSION_FLAG = importlib.metadata.version("jax").startswith("0.10.")
SMALL_MODULES = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# From programs compiled for GPUs, tests read the program and the Mosaic kernels, which this flag
# does not affect.
SMALL_MODULES += ["--xla_gpu_disable_gpuasm_optimizations=true"]
FLAGS = [*SMALL_MODULES, *(["--xla_cpu_use_fusion_emitters=false"] if HAS_FUSION_FLAG else [])]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
# The lines of Python that made each operation are left out of programs: no test reads them, and
# writing them takes a twelfth of the time of tracing and compiling.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["JAX_PLATFORMS"] = (
    "cpu"  # before JAX starts: the compile-only GPU topology must not look for a driver
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("tests/helpers", "examples", "benchmarks")]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


# Collect garbage less often: visiting imported modules and the programs that JAX keeps takes a
# tenth of the time.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last test of a file, exclude surviving objects from later collections.

    JAX's caches keep them anyway.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _disk_is_not_probed():
    """Use default disk settings: programs are built on disk many times, and probes are slow."""
    from host_offload.disk.tuning import DEFAULT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerojax.runtime.swap.tune", lambda _: DEFAULT)
        yield


@pytest.fixture
def default_fusions():
    """Compile zerojax's programs as users do, including fusions with MLIR.

    This is for claims about the last bits.
    """
    jit = jax.jit

    def as_users_do(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        nested = caller == "zerojax.tiling.loops"  # options apply to the entire program
        if caller.startswith("zerojax.") and not nested and options.get("compiler_options") is None:
            options["compiler_options"] = {"xla_cpu_use_fusion_emitters": True}
        return jit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if HAS_FUSION_FLAG:
            patch.setattr(jax, "jit", as_users_do)
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--tenth", action="store_true", help="run a tenth of the tests, always the same"
    )
    parser.addoption(
        "--site", metavar="DIR", help="folder of the built site, for the tests in tests/site"
    )


@pytest.hookimpl(tryfirst=True)  # before marks are evaluated, and groups are added to names
def pytest_collection_modifyitems(config, items):
    """Leave the cases that `by_default` does not name to `-m exhaustive`.

    If requested, run only a tenth of all cases.

    Raises:
      UsageError: if no case is named, or a case that is exhaustive by another mark; or, if all
        cases were collected, a case that the test does not have.
    """
    cases = {}
    for item in items:
        if (marker := item.get_closest_marker("by_default")) is not None:
            cases.setdefault((item.path, item.originalname), (marker, []))[1].append(item)
    for (path, name), (marker, found) in cases.items():
        by_id = {item.callspec.id: item for item in found if hasattr(item, "callspec")}
        named = set(marker.args)
        if not named or len(by_id) < len(found):
            raise pytest.UsageError(
                f"{path}: {name}: by_default must name cases of a parametrized test"
            )
        if hidden := sorted(
            case for case in named & set(by_id) if by_id[case].get_closest_marker("exhaustive")
        ):
            raise pytest.UsageError(
                f"{path}: {name}: the cases {hidden} are exhaustive by another mark"
            )
        is_whole = not any(
            "::" in argument for argument in config.args
        )  # otherwise some cases may not have been collected
        if is_whole and (unknown := sorted(named - set(by_id))):
            raise pytest.UsageError(
                f"{path}: {name} has no cases {unknown}: they are {sorted(by_id)}"
            )
        for case, item in by_id.items():
            if case not in named:
                item.add_marker(pytest.mark.exhaustive)
    if config.getoption("tenth"):
        # By their names, so that an added test does not change the selection of the others.
        chosen = [zlib.crc32(f"{item.path.name}::{item.name}".encode()) % 10 == 0 for item in items]
        config.hook.pytest_deselected(
            items=[item for item, taken in zip(items, chosen, strict=True) if not taken]
        )
        items[:] = [item for item, taken in zip(items, chosen, strict=True) if taken]


@pytest.fixture(scope="session")
def h200_compiler():
    """Skip if compilation for an absent H200 is impossible; on Linux that is a failure."""
    from zerojax import aot

    try:
        aot.gpu_devices("h200", 1, 1)
    except RuntimeError as e:
        if sys.platform == "linux":
            raise
        pytest.skip(f"compiling for GPUs without one needs Linux and zerojax[aot]: {e}")
