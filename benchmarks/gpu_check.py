"""What a GPU does that tests on a CPU cannot show: the right records, the same numbers, the link's speed, overlap, peak memory.

    python benchmarks/gpu_check.py --out benchmarks/results/NAME.md --json NAME.json     # under 8 minutes on one H200
    python benchmarks/gpu_check.py --peer-python PEER/bin/python                         # PEER: an environment with torch
    python benchmarks/gpu_check.py --small                                               # everything, as small as it goes
    python benchmarks/gpu_check.py --compile-only                                        # for an H200 that is not there

Every check runs in a process of its own, one after the other, and yields rows (figure, bound, whether it holds) as it goes; one
that fails, crashes or hangs leaves its rows and stops none of the others. The checks, on one device:

    slices         each form in which a step slices host memory, against numpy
    fp32, bf16     10 steps with every mix of tiers against the resident step: losses, parameters
    activations    gradients with activations in host memory against recomputed ones
    memory         peak device memory over `program.memory` and over the compiler's own count; a process for each mix
    speed          the link's bandwidth; step time of each mix over the resident step, interleaved; overlap; FSDP2 offloaded

The resident step recomputes its layers, as the mixes do, so that the extra of a mix is its transfers. With c its time, b the
bytes that a mix moves over the measured bandwidth (both ways at once) and s the time of the mix, max(c, b) is the floor, and

    hidden = (c + b - s) / min(c, b)

is 1 where the shorter of the two is free and 0 where they take turns. Later checks are added to `CHECKS`.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from problem import Problem, batches
from step_time import WARMUP, Contender, cpu_name, run_process

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

TIME_LIMIT = 480.0  # seconds, for all checks
EPSILON = 1e-3  # of Adam: an element whose gradient is rounding alone must not be moved by it
NOISE = 0.02  # added to what the GPT is born with, biases above all
CLIP = 0.5
ACCOUNT_RATIO = 1.15  # most that device memory may be over program.memory, which leaves out what one layer makes and drops
COMPILED_RATIO = 1.1  # and over what the compiler counts, which leaves out its libraries' workspace
HIDDEN = 0.5  # least part of the shorter of compute and transfers that a mix updated in backward must hide, on a GPU

H = "pinned_host"
Fields = Mapping[str, Any]
STATES: dict[str, Any] = {"params": H, "grads": H, "opt_state": H}
IN_BACKWARD: dict[str, Any] = STATES | {"update": "in_backward"}
ON_HOST: dict[str, Any] = {"opt_state": H, "update_on": "host"}


# --- what is run ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a mix may be from the resident step after all steps.

    Attributes:
      ulp: of a loss, in float32.
      params: of a leaf's largest magnitude.
      gradients: likewise, after one step; some leaves of a gradient are small sums of large terms.
    """

    ulp: float
    params: float
    gradients: float = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of every check.

    Attributes:
      equal: of "fp32", "bf16" and "activations".
      lean: of "memory": little is active, so that states count.
      fast: of "speed".
      rounds: timed steps of each mix.
      link_bytes: of the array that measures the link.
      few: run only the mixes of FEW.
    """

    equal: Problem
    lean: Problem
    fast: Problem
    rounds: int
    link_bytes: int
    few: bool = False


_TINY = Problem(layers=3, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=10, learning_rate=1e-3)
_LAPTOP = Problem(layers=8, hidden=128, heads=4, seq=64, vocab=512, batch=4, steps=10, learning_rate=1e-3)
_LARGE = Problem(layers=16, hidden=2048, heads=16, seq=1024, vocab=32768, batch=8, steps=6, precision="bf16")
SMALL = Sizes(equal=_TINY, lean=_TINY, fast=_TINY, rounds=3, link_bytes=1 << 22, few=True)
CPU = Sizes(equal=_LAPTOP, lean=_LAPTOP, fast=dataclasses.replace(_LAPTOP, hidden=256, seq=128), rounds=5, link_bytes=1 << 26)
GPU = Sizes(
    equal=dataclasses.replace(_LAPTOP, hidden=256, seq=128, vocab=1024, batch=8),
    lean=dataclasses.replace(_LARGE, layers=8, seq=128, vocab=8192, batch=1),
    fast=_LARGE,
    rounds=6,
    link_bytes=1 << 30,
)

# (platform, precision) -> tolerance. A GPU picks other kernels, and so other orders of summation, for each program; in bf16
# any compiler rounds where one program has a fusion and the other has not.
TOLERANCES = MappingProxyType(
    {
        ("cpu", "fp32"): Tolerance(ulp=4, params=1e-6, gradients=1e-6),
        ("cpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
        ("gpu", "fp32"): Tolerance(ulp=100, params=1e-5),
        ("gpu", "bf16"): Tolerance(ulp=1e5, params=3e-2),
    }
)
HOST_PARAMS = 1e-5  # at least, for a mix that is updated on the host

EQUAL_MIXES: Mapping[str, Fields] = {
    "params, distance 0": {"params": H, "prefetch_distance": 0},
    "params, 4 microbatches": {"params": H, "num_microbatches": 4},
    "grads, clipped": {"grads": H, "clip_norm": CLIP},
    "grads, opt_state, distance 0": {"grads": H, "opt_state": H, "prefetch_distance": 0},
    "opt_state, clipped": {"opt_state": H, "clip_norm": CLIP},
    "half of opt_state, distance 2": {"opt_state": H, "opt_state_device_fraction": 0.5, "prefetch_distance": 2},
    "params, half of opt_state, in_backward": {
        "params": H, "opt_state": H, "opt_state_device_fraction": 0.5, "update": "in_backward",
    },
    "all, clipped, distance 2, gather_ahead": STATES | {"clip_norm": CLIP, "prefetch_distance": 2, "gather_ahead": True},
    "all, activations, clipped, 4 microbatches": STATES | {"activations": H, "clip_norm": CLIP, "num_microbatches": 4},
    "all, in_backward, distance 0": IN_BACKWARD | {"prefetch_distance": 0},
    "all, in_backward, 4 microbatches": IN_BACKWARD | {"num_microbatches": 4},
    "all, activations, in_backward, gather_ahead": IN_BACKWARD | {"activations": H, "gather_ahead": True},
    "all, in_backward, distance 2, gather_ahead": IN_BACKWARD | {"prefetch_distance": 2, "gather_ahead": True},
    "opt_state, updated on the host": ON_HOST,
    "all, activations, updated on the host": STATES | ON_HOST | {"activations": H},
    "all, clipped, 4 microbatches, updated on the host": STATES | ON_HOST | {"clip_norm": CLIP, "num_microbatches": 4},
    "all, in_backward, updated on the host": IN_BACKWARD | ON_HOST,
}  # fmt: skip

ACTIVATION_MIXES: Mapping[str, Fields] = {
    "pinned_host": {"activations": H},
    "pinned_host, distance 0": {"activations": H, "prefetch_distance": 0},
    "pinned_host, params, distance 2, 4 microbatches": {
        "activations": H, "params": H, "prefetch_distance": 2, "num_microbatches": 4,
    },
    "a named value": {"activations": "remat", "offloaded_names": ("squashed",)},
    "a named value, 4 microbatches": {"activations": "remat", "offloaded_names": ("squashed",), "num_microbatches": 4},
    "a named value, pinned_host, gather_ahead": {"activations": H, "offloaded_names": ("squashed",), "gather_ahead": True},
}  # fmt: skip

RESIDENT: dict[str, Any] = {"activations": "remat"}
RESIDENT_STEP = "resident"
MEMORY_MIXES: Mapping[str, Fields] = {
    RESIDENT_STEP: RESIDENT,
    "opt_state": RESIDENT | {"opt_state": H},
    "all, activations": STATES | {"activations": H},
    "all, activations, in_backward": IN_BACKWARD | {"activations": H},
    "all, activations, in_backward, distance 2": IN_BACKWARD | {"activations": H, "prefetch_distance": 2},
}

SPEED_MIXES: Mapping[str, Fields] = {
    "all, in_backward": RESIDENT | IN_BACKWARD,
    "all, in_backward, distance 0": RESIDENT | IN_BACKWARD | {"prefetch_distance": 0},
    "all, in_backward, distance 2": RESIDENT | IN_BACKWARD | {"prefetch_distance": 2},
    "all": RESIDENT | STATES,
    "params": RESIDENT | {"params": H},
    "opt_state": RESIDENT | {"opt_state": H},
    "all, activations, in_backward": IN_BACKWARD | {"activations": H},
    "all, in_backward, updated on the host": RESIDENT | IN_BACKWARD | ON_HOST,
}
BESIDE_PEER: dict[str, Any] = IN_BACKWARD | ON_HOST | {"activations": "save"}
"""What FSDP2's CPUOffloadPolicy does: states and optimizer on the host, activations kept on the device."""

FEW: Mapping[str, Sequence[str]] = {
    "fp32": [
        "half of opt_state, distance 2",
        "all, activations, in_backward, gather_ahead",
        "all, activations, updated on the host",
    ],
    "bf16": ["all, activations, clipped, 4 microbatches"],
    "activations": ["a named value, pinned_host, gather_ahead"],
    "memory": [RESIDENT_STEP, "all, activations, in_backward"],
    "speed": ["all, in_backward"],
}


def chosen(check: str, mixes: Mapping[str, Fields], sizes: Sizes) -> dict[str, Fields]:
    """Return the mixes that a check runs at these sizes."""
    return {name: fields for name, fields in mixes.items() if not sizes.few or name in FEW[check]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program: a GPT, an optimizer and a config.

    Attributes:
      name: of its rows.
      problem: sizes.
      fields: of the ZeroConfig.
      gradients: a step of gradient descent at rate 1, on blocks that mark a value.
    """

    name: str
    problem: Problem
    fields: Fields
    gradients: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the optimizer runs on the host."""
        return self.fields.get("update_on") == "host"

    def build(self, mesh: Any) -> Any:
        """Return the program.

        Raises:
          NotImplementedError: this version does not build it.
        """
        import gpt
        import jax.numpy as jnp
        import optax

        import zerojax as zj

        p = self.problem
        c = gpt.GPTConfig(
            layers=p.layers, hidden=p.hidden, heads=p.heads, seq=p.seq, vocab=p.vocab, tied=False,
            dtype=jnp.bfloat16 if p.precision == "bf16" else jnp.float32,
        )  # fmt: skip
        model = without_zeros(gpt.layered_gpt(c))
        tx = optax.adamw(p.learning_rate, b2=0.95, eps=EPSILON, weight_decay=0.1)
        if self.gradients:
            model, tx = with_a_name(model), optax.sgd(1.0)
        fields: dict[str, Any] = {"precision": p.precision, **self.fields}
        return zj.build_train_step(model, tx, zj.ZeroConfig(**fields), mesh)

    def data(self) -> list[dict[str, np.ndarray]]:
        """Return the batch of each step."""
        return [{"tokens": t.astype(np.int32), "targets": u.astype(np.int32)} for t, u in batches(self.problem)]

    def train(self, mesh: Any) -> "Trained":
        """Train from key 0; returns losses f32[steps], and the float32 parameters' leaves before and after."""
        import jax

        # TF32 would differ from program to program.
        with jax.default_matmul_precision("highest"), self.build(mesh) as program:
            state = program.init(jax.random.key(0))
            before, losses = leaves_of(program, state), []
            for batch in self.data():
                state, metrics = program.step(state, batch)
                losses.append(jax.device_get(metrics["loss"]))
            return np.array(losses, np.float32), before, leaves_of(program, state)


def without_zeros(model: Any) -> Any:
    """Return a LayeredModel none of whose leaves is born near zero: differences are told over a leaf's largest magnitude."""
    import jax

    def shaken(init: Any) -> Any:
        def made(key: Any) -> Any:
            leaves, tree = jax.tree.flatten(init(key))
            keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
            return tree.unflatten([a + NOISE * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)])

        return made

    inits = {name: shaken(getattr(model, name)) for name in ("init_embed", "init_block", "init_head")}
    return dataclasses.replace(model, **inits)


def with_a_name(model: Any) -> Any:
    """Return a LayeredModel whose blocks mark a value, "squashed", that their derivative reads."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def block(params: Any, x: Any, key: Any) -> Any:
        return model.block(params, jax.tree.map(lambda a: checkpoint_name(jnp.tanh(a), "squashed"), x), key)

    return dataclasses.replace(model, block=block)


def leaves_of(program: Any, state: Any) -> list[np.ndarray]:
    """Return the float32 parameters as numpy arrays; leaves in two places as one."""
    import jax

    from zerojax.state import Split, is_split

    def whole(leaf: Any) -> np.ndarray:
        parts = (leaf.device, leaf.host) if isinstance(leaf, Split) else (leaf,)
        return np.concatenate([np.atleast_1d(jax.device_get(part)) for part in parts])

    return [whole(leaf) for leaf in jax.tree.leaves(program.master_params(state), is_leaf=is_split)]


def one_device() -> Any:
    """Return the mesh of the first device."""
    import jax

    import zerojax as zj

    return zj.make_mesh(devices=jax.devices()[:1])


def platform_name() -> str:
    """Return "cpu" or "gpu"."""
    import jax

    return "cpu" if jax.default_backend() == "cpu" else "gpu"


# --- rows ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: what was looked at.
      figure: what was seen, in words.
      bound: what it must be; "" where it is only told.
      ok: whether it is; None where nothing was judged.
      values: the numbers of `figure`.
    """

    name: str
    figure: str
    bound: str = ""
    ok: bool | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)


def skipped(name: str, why: object) -> Row:
    """Return the row of something that could not be looked at."""
    return Row(name, f"skipped: {why}")


def failed(name: str, error: BaseException) -> Row:
    """Return the row of something that raised."""
    text = " ".join(f"{type(e).__name__}: {e}" for e in (error, error.__cause__) if e is not None)
    text = " ".join(text.split())
    return Row(name, text if len(text) < 400 else f"{text[:400]} ...", ok=False)


def attempt(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield rows; an exception becomes the last one."""
    try:
        yield from rows()
    except NotImplementedError as e:
        yield skipped(name, e)
    except Exception as e:
        yield failed(name, e)


# --- slices, equal numbers -----------------------------------------------------------------------------------------------


def check_slices(sizes: Sizes) -> Iterator[Row]:
    """Run each form of access to host memory, in both directions."""
    import jax

    from host_offload import self_test

    del sizes
    for name, form in self_test.forms().items():

        def rows(name: str = name, form: Any = form) -> Iterator[Row]:
            program, wrong = self_test.build_form(form, jax.devices()[0]), []
            stack = self_test.records()
            for direction, order in (("ascending", range(len(stack))), ("descending", reversed(range(len(stack))))):
                order = np.array(list(order), np.int32)
                found, right = program(order, stack), form.expect(order, stack)
                wrong += [direction] if any(not np.array_equal(f, r) for f, r in zip(found, right, strict=True)) else []
            text = f"wrong records {' and '.join(wrong)}" if wrong else "right"
            yield Row(name, text, "right", not wrong, {"wrong": len(wrong)})

        yield from attempt(name, rows)


def reference_of(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return name and config of the resident step that a mix is compared with."""
    same = {name: fields[name] for name in ("clip_norm", "num_microbatches") if name in fields}
    return ", ".join([RESIDENT_STEP, *(f"{name}={value}" for name, value in same.items())]), same


def jobs(check: str, mixes: Mapping[str, Fields], p: Problem, sizes: Sizes, gradients: bool = False) -> list[Job]:
    """Return a check's jobs, those that the mixes are compared with first."""
    found = chosen(check, mixes, sizes)
    base: dict[str, Any] = dict(RESIDENT) if gradients else {}
    references = {name: base | same for name, same in map(reference_of, found.values())}
    return [Job(name=name, problem=p, fields=f, gradients=gradients) for name, f in (references | found).items()]


def equal_jobs(precision: str, sizes: Sizes) -> list[Job]:
    """Return the jobs of "fp32" or "bf16"."""
    return jobs(precision, EQUAL_MIXES, dataclasses.replace(sizes.equal, precision=precision), sizes)


def activation_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "activations"."""
    p = dataclasses.replace(sizes.equal, precision="fp32", steps=1)
    return jobs("activations", ACTIVATION_MIXES, p, sizes, gradients=True)


def largest_ulp(found: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference of losses in units of the last place."""
    return float((np.abs(found - right) / np.spacing(np.abs(right))).max())


def largest_part(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Return the largest difference of leaves, over each leaf's largest magnitude."""
    tiny = np.finfo(np.float32).tiny
    return max(float(np.abs(f - r).max() / max(np.abs(r).max(), tiny)) for f, r in zip(found, right, strict=True))


Trained = tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]
"""What `Job.train` returns."""


def compare(job: Job, found: Trained, right: Trained, tolerance: Tolerance) -> Row:
    """Compare a mix with the resident step: losses, and parameters or what one step made of them."""
    (losses, before, after), (right_losses, right_before, right_after) = found, right
    if job.gradients:
        after = [a - b for a, b in zip(after, before, strict=True)]
        right_after = [a - b for a, b in zip(right_after, right_before, strict=True)]
    ulp, part = largest_ulp(losses, right_losses), largest_part(after, right_after)
    limit = tolerance.gradients if job.gradients else max(tolerance.params, HOST_PARAMS if job.on_host else 0)
    return Row(
        job.name,
        f"loss {ulp:.1f} ulp, {'gradients' if job.gradients else 'params'} {part:.1e}",
        f"{tolerance.ulp:g} ulp, {limit:g}",
        ulp <= tolerance.ulp and part <= limit,  # False where either is not a number
        {"loss_ulp": ulp, "params": part},
    )


def compare_jobs(all_jobs: Sequence[Job]) -> Iterator[Row]:
    """Train every job, several at a time, and compare the mixes with the resident step."""
    mesh, platform = one_device(), platform_name()
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # they compile for longer than they run
        trained = {job.name: pool.submit(job.train, mesh) for job in all_jobs}
        for job in all_jobs:
            if job.name.startswith(RESIDENT_STEP):
                continue

            def rows(job: Job = job) -> Iterator[Row]:
                right = trained[reference_of(job.fields)[0]]
                yield compare(job, trained[job.name].result(), right.result(), TOLERANCES[platform, job.problem.precision])

            yield from attempt(job.name, rows)


# --- peak memory ---------------------------------------------------------------------------------------------------------


def memory_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "memory"."""
    return [Job(name=name, problem=sizes.lean, fields=f) for name, f in chosen("memory", MEMORY_MIXES, sizes).items()]


def peak_of(job: Job) -> dict[str, float]:
    """Train a little in a fresh process; returns its peak of device memory and what it should have been."""
    import jax

    mesh = one_device()
    device = mesh.devices.flat[0]
    with job.build(mesh) as program:
        batch = job.data()[0]
        report, stats = program.memory(batch), program.lower(batch).compile().memory_analysis()
        state = jax.block_until_ready(program.init(jax.random.key(0)))
        after_init = device.memory_stats()["peak_bytes_in_use"]
        for _ in range(WARMUP):
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
        return {
            "peak": device.memory_stats()["peak_bytes_in_use"],
            "peak_of_init": after_init,
            "account": sum(report.tiers["device"].values()),
            "compiled": stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        }


def memory_row(name: str, figure: str, ratio: float, bound: float, sizes: Sizes, values: Mapping[str, float]) -> Row:
    """Return a row that is judged where states are large beside what a layer makes and drops."""
    if sizes.few:
        return Row(name, figure, values=values)
    return Row(name, figure, f"{bound:g}", ratio <= bound, {**values, "ratio": ratio})


def check_memory(sizes: Sizes) -> Iterator[Row]:
    """Compare each mix's peak, in a process of its own, with the closed form and with the compiler's count."""
    import jax

    if not jax.devices()[0].memory_stats():
        yield skipped("peak device memory", f"{jax.default_backend()} devices do not count theirs")
        return
    words = [sys.executable, str(HERE / "gpu_check.py"), *(["--small"] if sizes is SMALL else []), "--peak"]
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool,
    ):
        all_jobs = memory_jobs(sizes)
        peaks = [pool.submit(run_process, Contender(job.name, 1, [*words, job.name]), folder, None) for job in all_jobs]
        for job, peak in zip(all_jobs, peaks, strict=True):

            def rows(job: Job = job, peak: Any = peak) -> Iterator[Row]:
                seen = peak.result()
                what = f"{seen['peak'] / 2**30:.3g} GiB" + (" (of init)" if seen["peak"] == seen["peak_of_init"] else "")
                for against, bound in (("account", ACCOUNT_RATIO), ("compiled", COMPILED_RATIO)):
                    ratio = seen["peak"] / seen[against]
                    told = {"account": "program.memory", "compiled": "the compiler's count"}[against]
                    text = f"{ratio:.3f} ({what} over {seen[against] / 2**30:.3g})"
                    yield memory_row(f"{job.name}: peak over {told}", text, ratio, bound, sizes, seen)

            yield from attempt(job.name, rows)


# --- the link, step time, overlap, the peer ------------------------------------------------------------------------------


def speed_jobs(sizes: Sizes) -> list[Job]:
    """Return the jobs of "speed": first the resident step, then the mixes, last the one beside the peer."""
    mixes = {RESIDENT_STEP: RESIDENT, **chosen("speed", SPEED_MIXES, sizes), "as the peer": BESIDE_PEER}
    return [Job(name=name, problem=sizes.fast, fields=f) for name, f in mixes.items()]


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes a second between pinned host memory and the device: each way alone, and both at once, summed."""

    to_device: float
    to_host: float
    both: float

    def seconds(self, to_device: float, to_host: float) -> float:
        """Return the least time of a transfer."""
        return max(to_device / self.to_device, to_host / self.to_host, (to_device + to_host) / self.both)


def measure_link(mesh: Any, num_bytes: int, repeats: int = 5) -> Link:
    """Time `jax.device_put` of arrays of `num_bytes`."""
    import jax
    import jax.numpy as jnp

    from zerojax.layout import named

    on_device, on_host = named(mesh, ()), named(mesh, (), H)
    x = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), on_device)
    y = jax.device_put(x, on_host)

    def best(*pairs: Any) -> float:
        found = []
        for _ in range(repeats + 1):  # the first allocates
            jax.block_until_ready((x, y))
            start = time.perf_counter()
            moved = [jax.device_put(a, sharding, may_alias=False) for a, sharding in pairs]
            jax.block_until_ready(moved)
            found.append(time.perf_counter() - start)
            del moved
        return len(pairs) * x.nbytes / min(found[1:])

    return Link(best((y, on_device)), best((x, on_host)), best((y, on_device), (x, on_host)))


def check_speed(sizes: Sizes, peer_python: str | None) -> Iterator[Row]:
    """Measure the link, each mix beside the resident step, and the peer."""
    import jax

    mesh = one_device()
    link = measure_link(mesh, sizes.link_bytes)
    for way, rate in dataclasses.asdict(link).items():
        yield Row(f"link, {way.replace('_', ' ')}", f"{rate / 1e9:.1f} GB/s", values={"bytes_per_second": rate})
    first, *others = speed_jobs(sizes)
    beside = others[-1]
    key, seconds = jax.random.key(0), float("nan")

    def run(program: Any, state: Any, batch: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program.step(state, batch))
        return state, time.perf_counter() - start

    with first.build(mesh) as resident:
        data = [resident.shard_batch(b) for b in first.data()]
        base = resident.init(key)
        for _ in range(WARMUP):
            base, _ = run(resident, base, data[0])
        for job in others:

            def rows(job: Job = job) -> Iterator[Row]:
                nonlocal base, seconds
                times, base_times = [], []
                with job.build(mesh) as program:
                    moved = getattr(program.memory(data[0]), "host_link", None)
                    state = program.init(key)
                    for _ in range(WARMUP):
                        state, _ = run(program, state, data[0])
                    for i in range(sizes.rounds):
                        base, t = run(resident, base, data[i % len(data)])
                        base_times.append(t)
                        state, t = run(program, state, data[i % len(data)])
                        times.append(t)
                    del state
                seconds = statistics.median(times)
                yield from speed_rows(job, times, base_times, moved, link)

            yield from attempt(job.name, rows)
    del base
    yield from attempt("FSDP2, CPUOffloadPolicy", lambda: peer_rows(sizes.fast, peer_python, beside.name, seconds))


def speed_rows(
    job: Job, times: Sequence[float], base_times: Sequence[float], moved: Mapping[str, float] | None, link: Link
) -> Iterator[Row]:
    """Say how long a mix took, and how much of its transfers it hid."""
    step, compute = statistics.median(times), statistics.median(base_times)
    ratios = [t / b for t, b in zip(times, base_times, strict=True)]
    ratio = statistics.median(ratios)
    text = f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}; {1e3 * step:.1f} ms over {1e3 * compute:.1f})"
    yield Row(f"{job.name}: step over resident", text, values={"ratio": ratio, "seconds": step, "resident_seconds": compute})
    if moved is None:
        yield skipped(f"{job.name}: link", "program.memory does not count its bytes")
        return
    up, down = moved["to_device"], moved["to_host"]
    rate = (up + down) / step
    text = f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down: {rate / 1e9:.1f} GB/s reached"
    yield Row(f"{job.name}: link", text, values={"to_device": up, "to_host": down, "bytes_per_second": rate})
    if job.on_host or job.fields.get("activations") == "save":
        return  # the host's own work, or less to compute than in the resident step, would count as transfers
    transfer = link.seconds(up, down)
    hidden = (compute + transfer - step) / min(compute, transfer)
    judged = platform_name() == "gpu" and job.fields.get("update") == "in_backward" and job.fields.get("prefetch_distance") != 0
    yield Row(
        f"{job.name}: transfers hidden",
        f"{hidden:.2f} (compute {1e3 * compute:.1f} ms, transfers {1e3 * transfer:.1f} ms, "
        f"{step / max(compute, transfer):.2f} of the floor)",
        f"at least {HIDDEN:g}" if judged else "",
        hidden >= HIDDEN if judged else None,
        {"hidden": hidden, "transfer_seconds": transfer, "over_floor": step / max(compute, transfer)},
    )


def peer_rows(p: Problem, python: str | None, beside: str, seconds: float) -> Iterator[Row]:
    """Time FSDP2 with its states and its optimizer on the host."""
    name = "FSDP2, CPUOffloadPolicy"
    python = python or sys.executable
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        yield skipped(name, "no torch: give --peer-python")
        return
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(HERE / "peer.py")]
    p = dataclasses.replace(p, steps=WARMUP + 4)
    with tempfile.TemporaryDirectory() as folder:
        seen = run_process(Contender(name, 1, [*launch, *p.arguments(), "--mode", "fsdp2-offload"]), folder, python)
    own = statistics.median(seen["seconds"][WARMUP:])
    text = f"{1e3 * own:.1f} ms, {own / seconds:.2f} of ours {beside!r} ({seen['version']})"
    yield Row(name, text, "finite losses", bool(np.isfinite(seen["losses"]).all()), {"seconds": own, "ratio": own / seconds})
    if seen["peak_bytes"]:
        yield Row(f"{name}: peak device memory", f"{seen['peak_bytes'] / 2**30:.2f} GiB", values={"bytes": seen["peak_bytes"]})


# --- the list, and a worker for each -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What a worker does.

    Attributes:
      run: (sizes, peer's python) -> rows.
      programs: the jobs that it compiles.
      preallocates: take device memory in one piece, as a training run does.
    """

    run: Callable[[Sizes, str | None], Iterator[Row]]
    programs: Callable[[Sizes], list[Job]]
    preallocates: bool = False


CHECKS: Mapping[str, Check] = {
    "slices": Check(run=lambda s, _: check_slices(s), programs=lambda _: []),
    "fp32": Check(run=lambda s, _: compare_jobs(equal_jobs("fp32", s)), programs=lambda s: equal_jobs("fp32", s)),
    "bf16": Check(run=lambda s, _: compare_jobs(equal_jobs("bf16", s)), programs=lambda s: equal_jobs("bf16", s)),
    "activations": Check(run=lambda s, _: compare_jobs(activation_jobs(s)), programs=activation_jobs),
    "memory": Check(run=lambda s, _: check_memory(s), programs=memory_jobs),
    "speed": Check(run=check_speed, programs=speed_jobs, preallocates=True),
}


def compile_rows(name: str, sizes: Sizes) -> Iterator[Row]:
    """Compile what a check would run for an H200 that is not there, and look for host slices that could be wrong."""
    import jax

    from zerojax import aot, hlo_host

    mesh = aot.gpu_mesh(gpus_per_host=1)

    def judged(name: str, compiled: Any, seconds: float) -> Row:
        text = compiled.as_text()
        slices, unsafe = hlo_host.host_slices(text, unknown_trips=1), hlo_host.unsafe_host_slices(text, unknown_trips=1)
        figure = f"{len(slices)} host slices, {len(unsafe)} not provably right; {seconds:.1f} s"
        return Row(name, figure, "0", not unsafe, {"slices": len(slices), "unsafe": len(unsafe), "seconds": seconds})

    def compile_job(job: Job) -> Iterator[Row]:
        start, program = time.perf_counter(), job.build(mesh)
        batch = job.data()[0]
        with jax.default_matmul_precision("highest" if name not in ("memory", "speed") else None):
            compiled = program.lower(batch).compile()
        yield judged(job.name, compiled, time.perf_counter() - start)
        if name == "memory":
            stats = compiled.memory_analysis()
            taken = stats.argument_size_in_bytes + stats.temp_size_in_bytes
            ratio = taken / sum(program.memory(batch).tiers["device"].values())
            figure = f"{ratio:.3f} ({taken / 2**30:.3g} GiB)"
            yield memory_row(f"{job.name}: compiled over program.memory", figure, ratio, ACCOUNT_RATIO, sizes, {"bytes": taken})

    for job in CHECKS[name].programs(sizes):
        yield from attempt(job.name, lambda job=job: compile_job(job))
    if name == "slices":
        yield from compile_forms(mesh, judged)


def compile_forms(mesh: Any, judged: Callable[[str, Any, float], Row]) -> Iterator[Row]:
    """Compile the forms of access to host memory."""
    import jax

    from host_offload import self_test
    from zerojax.layout import named

    stack = self_test.records()
    for name, form in self_test.forms().items():

        def rows(name: str = name, form: Any = form) -> Iterator[Row]:
            start = time.perf_counter()
            with jax.set_mesh(mesh):
                here, there = named(mesh, ()), named(mesh, (), H)
                order = jax.ShapeDtypeStruct(stack.shape[:1], np.int32, sharding=here)
                given = jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=there)
                step = jax.jit(lambda order, stack: form.run(order, stack, H), donate_argnums=1, out_shardings=(there, here))
                compiled = step.lower(order, given).compile()
            yield judged(name, compiled, time.perf_counter() - start)

        yield from attempt(name, rows)


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes for these options and this platform."""
    if options.small:
        return SMALL
    return CPU if platform_name() == "cpu" and not options.compile_only else GPU


def head(sizes: Sizes) -> dict[str, Any]:
    """Return hardware, versions and sizes."""
    import jax

    device = jax.devices()[0]
    driver = None
    if platform_name() == "gpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "hardware": f"{device.device_kind}, {os.cpu_count()} cores of {cpu_name()}",
        "driver": driver,
        "platform": " ".join(device.client.platform_version.split()),
        "versions": versions,
        "sizes": dataclasses.asdict(sizes),
    }


def work(options: argparse.Namespace) -> None:
    """Run one check, and append a line of JSON to the file for its head and for each row."""
    sizes, name = sizes_of(options), options.worker
    with open(options.rows, "a", buffering=1) as rows:
        rows.write(json.dumps({"head": head(sizes)}) + "\n")
        check = CHECKS[name]
        run = (lambda: compile_rows(name, sizes)) if options.compile_only else lambda: check.run(sizes, options.peer_python)
        for row in attempt(name, run):
            rows.write(json.dumps({"row": dataclasses.asdict(row)}) + "\n")
            print(line(name, row), flush=True)


# --- all of them, the table ----------------------------------------------------------------------------------------------


def line(check: str, row: Row) -> str:
    """Return a row of the table in Markdown."""
    ok = {True: "yes", False: "NO", None: ""}[row.ok]
    return "| " + " | ".join(text.replace("|", "/") for text in (check, row.name, row.figure, row.bound, ok)) + " |"


def run_check(name: str, options: argparse.Namespace, folder: str, seconds: float) -> tuple[dict[str, Any], list[Row]]:
    """Run a worker for at most `seconds`; returns its head and its rows."""
    if seconds <= 0:
        return {}, [Row(name, f"not run: the others took the {options.limit:g} s", ok=False)]
    file = pathlib.Path(folder) / f"{name}.jsonl"
    words = ["--worker", name, "--rows", str(file)]
    words += ["--small"] if options.small else []
    words += ["--compile-only"] if options.compile_only else []
    words += ["--peer-python", options.peer_python] if options.peer_python else []
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}  # keep what kernels were timed, and not programs
    if CHECKS[name].preallocates:
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}  # the rest is the peer's
    if options.compile_only:
        env |= {"JAX_PLATFORMS": "cpu"}
        if options.small:  # without a GPU to try on, XLA's Triton backend finds no tiles for products as small as these
            env |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"}
    errors = pathlib.Path(folder) / f"{name}.txt"
    with errors.open("w") as out:
        command = [sys.executable, str(HERE / "gpu_check.py"), *words]
        process = subprocess.Popen(command, env=env, stderr=out, start_new_session=True)
        try:
            status = process.wait(seconds if seconds < float("inf") else None)
            why = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, why = 1, f"stopped after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a peer may be left
            process.wait()
    found = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    rows = [Row(**one["row"]) for one in found if "row" in one]
    if status:
        tail = errors.read_text().strip().splitlines()[-1:]
        rows.append(Row(name, ": ".join([why, *tail])[:400], ok=False))
        print(line(name, rows[-1]), flush=True)
        print(errors.read_text()[-4000:], file=sys.stderr)
    return next((one["head"] for one in found if "head" in one), {}), rows


def report(facts: Mapping[str, Any], results: Mapping[str, Sequence[Row]]) -> str:
    """Return the table in Markdown."""
    versions = [f"{name} {version}" for name, version in facts.get("versions", {}).items()]
    sizes = facts.get("sizes", {})
    fast = sizes.get("fast", {})
    judged = [row.ok for rows in results.values() for row in rows if row.ok is not None]
    device = "compiled for an H200 that is not there" if facts["compile_only"] else facts.get("hardware", "unknown")
    driver = f", driver {facts['driver']}" if facts.get("driver") else ""
    lines = [
        f"# What the device does, {datetime.date.today():%Y-%m}",
        "",
        f"Hardware: {device}{driver}. Versions: {', '.join(versions)}.",
        f"Command: `{facts['command']}`; {facts['seconds']:.0f} s "
        f"({', '.join(f'{name} {seconds:.0f}' for name, seconds in facts['check_seconds'].items())}).",
        "",
    ]
    if "speed" in results and not facts["compile_only"] and fast:
        lines += [
            f"Speed: {fast['layers']} layers x {fast['hidden']}, batch {fast['batch']} x {fast['seq']}, {fast['precision']}, "
            f"{sizes['rounds']} rounds; a ratio is taken within a round, and its median and range are shown. `all` is params, "
            "grads and opt_state in pinned_host; the resident step recomputes its layers, as the mixes do.",
            "",
        ]
    lines += ["| check | what | figure | bound | ok |", "|---|---|---|---|---|"]
    lines += [line(name, row) for name, rows in results.items() for row in rows]
    lines += ["", f"{sum(judged)} of {len(judged)} bounds hold."]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes and few mixes")
    parser.add_argument("--compile-only", action="store_true", help="compile every program for an H200 that is not there")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="run these checks alone")
    parser.add_argument("--peer-python", help="python of an environment with torch; this one if it has torch")
    parser.add_argument("--limit", type=float, help=f"seconds for all checks; {TIME_LIMIT:g}, or none where nothing is run")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--out", help="write the table here")
    for name in ("worker", "rows", "peak"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limit is None:
        options.limit = float("inf") if options.compile_only else TIME_LIMIT
    return options


def main() -> None:
    """Run every check, print and save the table."""
    options = parse()
    if options.worker:
        work(options)
        return
    if options.peak:
        job = next(job for job in memory_jobs(sizes_of(options)) if job.name == options.peak)
        print("RESULT " + json.dumps(peak_of(job)))
        return
    words = [w if w != options.peer_python else "PEER/bin/python" for w in sys.argv[1:]]
    facts: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu_check.py", *words]),
        "compile_only": options.compile_only,
        "check_seconds": {},
    }
    results: dict[str, list[Row]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            began = time.monotonic()
            seen, results[name] = run_check(name, options, folder, options.limit - (began - start))
            facts |= seen
            facts["check_seconds"] |= {name: round(time.monotonic() - began, 1)}
    facts["seconds"] = time.monotonic() - start
    text = report(facts, results)
    print(f"\n{text}")
    if options.out:
        pathlib.Path(options.out).write_text(text)
    if options.json:
        rows = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
        pathlib.Path(options.json).write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(row.ok is False for rows in results.values() for row in rows) else 0)


if __name__ == "__main__":
    main()
