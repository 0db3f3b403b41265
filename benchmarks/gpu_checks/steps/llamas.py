"""Run a Llama's steps with its states in one mode; compare them with predictions.

The rows show time, idle share, bytes and memory.

The program is compiled once, with a dump, and the timed steps run the program whose HLO and thunks
are read. Seconds are the median of a few steps; the timer waits for each step. Idle share and
overlap come from a profile of further steps, which run back to back. `hlo.simulate` predicts the
same program twice: at assumed rates, and at the rates that "rates" measured on this machine.
"""

import dataclasses
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_checks.jobs import one_device, platform_name
from gpu_checks.link.copies import BOTH
from gpu_checks.machine import OVER_NEED, SPARE, capacity_row
from gpu_checks.mixes import LlamaSizes
from gpu_checks.parts import POOL, Context
from gpu_checks.rows import Row, attempt, skipped
from gpu_checks.steps.needs import pinned_bytes
from gpu_checks.steps.profile import DOWN, UP, Measured, keep_profile, measure

if TYPE_CHECKING:
    from llama import Mode

WARMUP, TIMED, PROFILED = 2, 4, 2
SHORT_LAYERS, SHORT_WARMUP, SHORT_TIMED = 8, 1, 2
"""Limits of a step with fewer seconds left than it needs: layers, warm-up steps, timed steps.

Such a step has no profile.
"""
OVER_ACCOUNT = 1.15
"""Device memory that a step may take, over `program.memory`.

`program.memory` leaves out what one layer allocates and frees.
"""
PATIENCE = 60.0
"""Seconds of steps after which no further step is timed."""
AGREES = 0.15
"""Largest relative difference between a measured step and its prediction at measured rates.

The idle shares may differ by as much.
"""
BOTH_WAYS = ("opt_state on the host", "params, grads, opt_state on the host")
"""Modes whose backward loop copies both ways at the same time."""
COPIED = 0.99
"""Least share of the link's bytes that copies must move."""
COMPUTE: Sequence[tuple[tuple[int, int], Mapping[str, float]]] = (
    (
        (0, 12),
        {
            "opt_state on the host": 0.90,
            "params, grads, opt_state on the host": 0.85,
            "opt_state on the host, update_on host": 0.85,
        },
    ),
    (
        (0, 11),
        {
            "opt_state on the host": 0.88,
            "params, grads, opt_state on the host": 0.81,
            "opt_state on the host, update_on host": 0.85,
        },
    ),
)
"""Least share of compute alone in a step of most tokens, by least version of jax and by mode.

The bounds are slightly below what `hlo.simulate` predicts of the program that the version compiles.
Before 0.12, downloads block the uploads behind them. Before 0.11 there is no bound: the predictions
are 0.45 and 0.39.
"""
HOST_BYTES = 200e9
"""Least rate of the host's kernel, in bytes per second, for `COMPUTE` to judge a host update."""
TERAFLOPS = {"opt_state on the host": 400.0}
"""Least TF/s of a step of most tokens, by mode."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One mode at one number of tokens.

    Attributes:
      mode: key of `llama.MODES`.
      sizes: sizes of the model.
      tokens: tokens per step.
      is_largest: whether the bounds of the most tokens apply.
      link_groups: `link_groups` of the config; None is the default.
      cuda_graphs: `cuda_graphs` of the config.
    """

    mode: str
    sizes: LlamaSizes
    tokens: int
    is_largest: bool = False
    link_groups: int | None = None
    cuda_graphs: bool = False

    @property
    def of(self) -> "Mode":
        """The mode's entry in `llama.MODES`."""
        from llama import MODES

        return MODES[self.mode]

    @property
    def name(self) -> str:
        """Name of the case in files and rows."""
        groups = "" if self.link_groups is None else f", link_groups={self.link_groups}"
        graphs = ", CUDA graphs" * self.cuda_graphs
        return f"{self.mode}, {self.sizes.layers} layers, {self.tokens} tokens{groups}{graphs}"

    def build(self, mesh: Any, swap_dir: str | None = None) -> Any:
        """Return the program on a mesh; on GPUs, attention is cuDNN's."""
        import optax
        from llama import llama

        import zerojax as zj

        s = self.sizes
        attention = "xla" if mesh.devices.flat[0].platform == "cpu" else "cudnn"
        fields: dict[str, Any] = {
            "precision": "bf16",
            "activations": "remat",
            "link_groups": self.link_groups,
            "cuda_graphs": self.cuda_graphs,
            **self.of.config,
        }
        fields |= {} if swap_dir is None else {"swap_dir": swap_dir}
        model = llama(s.layers, s.hidden, s.heads, s.ff, s.vocab, attention)
        return zj.build_train_step(model, optax.adamw(1e-4), zj.ZeroConfig(**fields), mesh)

    def abstract_batch(self) -> Any:
        """Return the shapes and dtypes of a batch."""
        import jax

        shape = (self.tokens // self.sizes.seq, self.sizes.seq)
        return {name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("tokens", "targets")}

    def batch(self) -> Any:
        """Return a random batch; each token's target is the next token."""
        rows = np.random.default_rng(0).integers(
            0, self.sizes.vocab, (self.tokens // self.sizes.seq, self.sizes.seq + 1)
        )
        return {"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)}

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step, without recomputation."""
        from zerojax.planner import flops_per_token

        s = self.sizes
        weights = 4 * s.hidden**2 + 3 * s.hidden * s.ff
        return self.tokens * flops_per_token(
            s.layers, s.hidden, s.seq, layer_weights=weights, head_weights=s.vocab * s.hidden
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """What a compiled program reports about itself.

    Attributes:
      text: optimized HLO.
      thunks: XLA's thunks, or None.
      why: reason why there are no thunks, or None.
      seconds: seconds of the compilation.
      taken: bytes on the device, by the compiler's count.
    """

    text: str
    thunks: Any
    why: Exception | None
    seconds: float
    taken: int


def compile_case(program: Any, batch: Any, options: dict[str, Any]) -> Read:
    """Compile a program for a batch, with a dump, and read the dump."""
    from zerojax import hlo

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiled = program.lower(batch).compile({**options, "xla_dump_to": folder})
        seconds = time.perf_counter() - start
        text = compiled.as_text() or ""
        thunks, why = None, None
        if program.mesh.devices.flat[0].platform == "cpu":
            why = NotImplementedError(
                "a program for a CPU does not distinguish host memory from device memory"
            )
        else:
            try:
                thunks = hlo.read_thunks(folder, hlo.module_name(text))
            except ValueError as error:  # the steps can still be timed
                why = error
    stats: Any = compiled.memory_analysis()
    taken = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return Read(text=text, thunks=thunks, why=why, seconds=seconds, taken=taken)


def program_rows(read: Read) -> Iterator[Row]:
    """Report how many bytes cross the link, and whether copies or kernels move them."""
    from zerojax import hlo

    if read.why is not None:
        raise read.why
    unsafe = hlo.unsafe_host_slices(read.text, unknown_trips=1)
    yield Row(
        "slices of host memory not provably right",
        str(len(unsafe)),
        "0",
        not unsafe,
        {"unsafe": len(unsafe)},
    )
    traffic = hlo.host_traffic(read.text, read.thunks, unknown_trips=1)
    copies, kernels, graphs = traffic.by_copies, traffic.by_kernels, traffic.in_graphs
    crosses = sum(copies.values()) + sum(kernels.values()) > 0
    judged = crosses and not traffic.has_callbacks
    share = traffic.share_of_copies
    text = (
        f"by copies {copies['to_device'] / 1e9:.2f} GB up, {copies['to_host'] / 1e9:.2f} down; "
        "by kernels "
        f"{kernels['to_device'] / 1e9:.2f} up, {kernels['to_host'] / 1e9:.2f} down; "
        f"{100 * share:.1f} % by copies"
        + (", and what callbacks move" if traffic.has_callbacks else "")
    )
    values = {f"copies_{way}": float(size) for way, size in copies.items()}
    values |= {f"kernels_{way}": float(size) for way, size in kernels.items()}
    values |= {f"graphs_{way}": float(size) for way, size in graphs.items()}
    text += (
        f"; in CUDA graphs {graphs['to_device'] / 1e9:.2f} up, {graphs['to_host'] / 1e9:.2f} down"
    )
    yield Row("over the link, by its thunks", text,
              f"{100 * COPIED:g} % by copies" if judged else "",
              share >= COPIED if judged else None, values)  # fmt: skip


def predict(case: Case, read: Read, chip: str, rates: Mapping[str, float]) -> Any:
    """Return the prediction of `hlo.simulate` at a chip's assumed rates, updated by `rates`."""
    from zerojax import hlo

    known = {field.name for field in dataclasses.fields(hlo.Rates)}
    given = {name: rate for name, rate in rates.items() if name in known}
    replaced = dataclasses.replace(hlo.RATES[chip], **{**case.of.rates, **given})
    return hlo.simulate(read.text, rates=replaced, thunks=read.thunks, callbacks=case.of.callbacks)


def predicted_row(name: str, predicted: Any) -> Row:
    """Report a prediction."""
    text = (
        f"predicted {predicted.seconds:.4g} s, idle {100 * predicted.idle:.0f} %, "
        f"compute {predicted.compute_seconds:.4g} s, "
        f"floor {predicted.floor_seconds:.4g} s, "
        f"{predicted.flops / predicted.seconds / 1e12:.0f} TF/s, "
        f"{predicted.num_host_waits} drains"
    )
    values = {
        "predicted_seconds": predicted.seconds,
        "predicted_idle": predicted.idle,
        "flops": predicted.flops,
    }
    return Row(name, text, values=values)


def compile_step(case: Callable[[Context], Case]) -> Callable[[Context], Iterator[Row]]:
    """Return a check that compiles a case, with the layers that fit, without having the chip."""

    def rows(context: Context) -> Iterator[Row]:
        from llama import num_params

        from zerojax import aot

        asked = case(context)
        mesh = aot.gpu_mesh(context.chip, gpus_per_host=1)
        given, program = fitted(asked, lambda one: one.build(mesh), room_of(context))
        yield from fewer_layers(given, asked)
        with program:
            batch = given.abstract_batch()
            read = compile_case(program, batch, {"xla_gpu_enable_triton_gemm": False})
            count = num_params(
                given.sizes.layers, given.sizes.hidden, given.sizes.ff, given.sizes.vocab
            )
            taken = {tier: sum(of.values()) for tier, of in program.memory(batch).tiers.items()}
        sizes = ", ".join(
            f"{size / 2**30:.3g} GiB in {tier}" for tier, size in taken.items() if size
        )
        yield Row(
            f"{given.name}: compiled",
            f"{count / 1e9:.3g} B parameters in {read.seconds:.1f} s; "
            f"{read.taken / 2**30:.3g} GiB by the compiler, "
            f"{sizes} by program.memory",
            values={"compile_seconds": read.seconds, "bytes": float(read.taken)},
        )
        pinned = pinned_bytes(given.mode, given.sizes)
        beside = max(0, taken.get("pinned_host", 0) - pinned)
        yield capacity_row(given.name, context, device=read.taken, pinned=pinned, beside=beside)
        yield from program_rows(read)
        yield predicted_row("predicted at assumed rates", predict(given, read, context.chip, {}))

    return rows


def fewer_layers(given: Case, asked: Case, is_short: bool = False) -> Iterator[Row]:
    """Report that a case has fewer layers than were asked for, and why.

    Args:
      given: case as it is run.
      asked: case as it was asked for.
      is_short: whether the state has few layers because the check that created it was short of
        seconds.
    """
    if given.sizes.layers < asked.sizes.layers:
        was_cut_for_time = is_short and given.sizes.layers == min(asked.sizes.layers, SHORT_LAYERS)
        why = (
            "seconds are short"
            if was_cut_for_time
            else "device or host memory has no room for more"
        )
        text = f"{given.sizes.layers} of {asked.sizes.layers}: {why}"
        yield Row("layers", text, values={"layers": float(given.sizes.layers)})


def shortened(case: Case, context: Context) -> Case:
    """Return a case, with at most `SHORT_LAYERS` layers if seconds are short."""
    layers = min(case.sizes.layers, SHORT_LAYERS) if context.is_short else case.sizes.layers
    return dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, layers=layers))


@dataclasses.dataclass(kw_only=True)
class Held:
    """A program that checks of one mode and process hand on to each other.

    Attributes:
      sizes: sizes of the model, with the layers that fit.
      room: memory limits that the program is fitted to.
      is_short: whether the check that created the state was short of seconds, so that the model has
        at most `SHORT_LAYERS` layers.
      program: program that runs the steps, with any number of tokens; None before it is built.
      state: state after the last step; None before the first step, and after a check that failed.
    """

    sizes: LlamaSizes
    room: "Room"
    is_short: bool = False
    program: Any = None
    state: Any = None


def check_step(case: Callable[[Context], Case]) -> Callable[[Context], Iterator[Row]]:
    """Return a check that runs a case on the first device.

    Checks of one mode and process hand the state on. More tokens take more memory: a program that
    no longer fits is rebuilt with fewer layers and a new state.
    """

    def rows(context: Context) -> Iterator[Row]:
        asked = case(context)
        key = (asked.mode, asked.sizes, asked.link_groups, asked.cuda_graphs)
        held = context.shared.pop(key, None)
        context.shared.clear()  # frees another program's state, which would take this one's room
        held = held or Held(
            sizes=shortened(asked, context).sizes, room=room_of(context), is_short=context.is_short
        )
        given = dataclasses.replace(asked, sizes=held.sizes)
        given, program = fitted(given, lambda one: one.build(one_device()), held.room, held.program)
        if program is not held.program:
            held.sizes, held.program, held.state = given.sizes, program, None
        context.shared[key] = held
        # The bounds apply to the full model.
        given = dataclasses.replace(
            given, is_largest=asked.is_largest and given.sizes == asked.sizes
        )
        yield from fewer_layers(given, asked, held.is_short)
        # A step that fails loses its state.
        stepped, held.state = Stepped(given, context, program, held.state), None
        yield from stepped.rows()
        held.state = stepped.state

    return rows


class Stepped:
    """A program whose steps are run and examined."""

    def __init__(self, case: Case, context: Context, program: Any, state: Any) -> None:
        """Take a built program and its state, or None for the state of a new run."""
        self.case, self.context, self.program, self.state = case, context, program, state
        self.metrics: list[dict[str, float]] = []

    def rows(
        self, warmup: int = WARMUP, timed: int = TIMED, profiled: int = PROFILED
    ) -> Iterator[Row]:
        """Compile the program, run and profile its steps, and report the results.

        Args:
          warmup: number of untimed steps.
          timed: number of timed steps; slow steps are timed fewer times, but at least once.
          profiled: number of profiled steps.
        """
        import jax

        if self.context.is_short:
            warmup, timed, profiled = min(warmup, SHORT_WARMUP), min(timed, SHORT_TIMED), 0
        case, program = self.case, self.program
        abstract = case.abstract_batch()
        read = compile_case(program, abstract, {})
        yield Row("compiled", f"{read.seconds:.1f} s", values={"compile_seconds": read.seconds})
        yield from attempt("the program", lambda: program_rows(read))
        batch = program.shard_batch(case.batch())
        if self.state is None:
            start = time.perf_counter()
            self.state = jax.block_until_ready(program.init(jax.random.key(0)))
            seconds = time.perf_counter() - start
            yield Row("init", f"{seconds:.1f} s", values={"seconds": seconds})
        seconds, began = [], time.perf_counter()
        for number in range(warmup + timed):
            took = self.step(batch)
            seconds += [took] if number >= warmup else []
            if seconds and time.perf_counter() - began > PATIENCE:
                break
        step = statistics.median(seconds)
        yield from self.step_rows(read, step, seconds)
        yield from self.memory_rows(read, abstract)
        if profiled:
            yield from attempt("profile", lambda: self.profile_rows(read, batch, step, profiled))
        else:
            yield from attempt("predictions", lambda: self.predicted_rows(read, step))

    def step(self, batch: Any) -> float:
        """Run a step and return its seconds."""
        import jax

        start = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.program.step(self.state, batch))
        seconds = time.perf_counter() - start
        self.metrics.append({name: float(value) for name, value in metrics.items()})
        return seconds

    def step_rows(self, read: Read, step: float, seconds: list[float]) -> Iterator[Row]:
        """Report the time of a step and its rates."""
        case, judged = self.case, judges(self.context)
        losses = [m["loss"] for m in self.metrics]
        text = (
            f"{step:.4g} s ({min(seconds):.4g}-{max(seconds):.4g}), "
            f"{case.tokens / step:.5g} tokens/s"
        )
        yield Row("step", text, "finite losses", bool(np.isfinite(losses).all()),
                  {"seconds": step, "tokens_per_second": case.tokens / step,
                   "loss": losses[-1]})  # fmt: skip
        rate = case.model_flops / step / 1e12
        yield Row("of the model (PaLM, appendix B)", f"{rate:.4g} TF/s", values={"teraflops": rate})
        if read.thunks is not None:

            def program() -> Iterator[Row]:
                rate = predict(case, read, self.context.chip, {}).flops / step / 1e12
                bound = TERAFLOPS.get(case.mode) if judged and case.is_largest else None
                told = "" if bound is None else f"at least {bound:g}"
                yield Row("of the program's products, recomputed ones too", f"{rate:.4g} TF/s",
                          told, None if bound is None else rate >= bound,
                          {"teraflops": rate})  # fmt: skip

            yield from attempt("of the program's products", program)

    def memory_rows(self, read: Read, abstract: Any) -> Iterator[Row]:
        """Report the device memory and the host memory that the process took."""
        from usage import peak_resident_bytes

        stats = self.program.mesh.devices.flat[0].memory_stats()
        account = sum(self.program.memory(abstract).tiers["device"].values())
        if stats:
            peak = stats["peak_bytes_in_use"]
            text = (
                f"{peak / 2**30:.4g} GiB; the compiler's count {read.taken / 2**30:.4g}, "
                f"program.memory {account / 2**30:.4g}"
            )
            yield Row("peak device memory of the process", text, values={"bytes": float(peak)})
        else:
            yield skipped("peak device memory", "CPU devices do not count theirs")
        resident = peak_resident_bytes()
        yield Row(
            "peak resident memory of the process",
            f"{resident / 2**30:.4g} GiB",
            values={"bytes": float(resident)},
        )

    def profile_rows(self, read: Read, batch: Any, step: float, num_steps: int) -> Iterator[Row]:
        """Profile steps, keep the profile, and compare it with predictions."""
        import jax

        def run() -> None:
            for _ in range(num_steps):
                self.state, _ = self.program.step(self.state, batch)
            jax.block_until_ready(self.state)

        name = re.sub(r"[^a-z0-9]+", "_", self.context.check.lower())
        path = self.context.keep / f"{self.context.part}.{name}.xplane.pb.gz"
        try:
            events = keep_profile(run, path)
        finally:
            if path.exists():
                size = path.stat().st_size
                yield Row(
                    "profile kept",
                    f"{path.name}, {size / 2**20:.2f} MiB",
                    values={"bytes": float(size)},
                )
        from zerojax import hlo

        if read.thunks is None:
            raise NotImplementedError(
                "copies cannot be told from kernels without the program's thunks"
            )
        movers = {
            m.instruction for m in hlo.host_traffic(read.text, read.thunks, unknown_trips=1).kernels
        }
        found = measure(events, movers, num_steps)
        host = self.context.known.get("rates.host_kernel", 0.0)
        suits = self.case.of.config.get("update_on") != "host" or host >= HOST_BYTES
        yield from measured_rows(
            found, self.case, judges(self.context) and suits, self.context.known.get("link.both")
        )
        yield from self.predicted_rows(read, step, found)

    def predicted_rows(
        self, read: Read, step: float, found: Measured | None = None
    ) -> Iterator[Row]:
        """Report the predictions for the timed program and compare them with its steps.

        The comparison includes a profile's results if there are any.
        """
        if read.thunks is None:
            raise NotImplementedError(
                "copies cannot be told from kernels without the program's thunks"
            )
        for whose, rates in (("assumed", {}), ("measured", dict(self.rates()))):
            if whose == "measured" and not rates:
                continue
            predicted = predict(self.case, read, self.context.chip, rates)
            yield predicted_row(f"predicted at {whose} rates", predicted)
            if whose == "measured":
                yield from compared_rows(found, step, predicted, judges(self.context))

    def rates(self) -> Iterator[tuple[str, float]]:
        """Yield the name and value of each rate measured on this machine."""
        for name, rate in self.context.known.items():
            if name.startswith("rates."):
                yield name.removeprefix("rates."), rate


def judges(context: Context) -> bool:
    """Return whether bounds of speed apply: on a GPU, at full size."""
    return platform_name() == "gpu" and not context.sizes.few


def least_compute(mode: str, version: tuple[int, ...] | None = None) -> float | None:
    """Return the bound of `COMPUTE` for a version of jax, the installed one by default.

    The result is None if the version or the mode has no bound.
    """
    import jax

    version = jax.__version_info__ if version is None else version
    bounds = next((bounds for least, bounds in COMPUTE if version >= least), None)
    return None if bounds is None else bounds.get(mode)


def measured_rows(
    found: Measured, case: Case, judged: bool, both: float | None = None
) -> Iterator[Row]:
    """Report a profile's results.

    Args:
      found: the profile's results.
      case: the case that ran.
      judged: whether bounds of speed apply.
      both: the link's measured rate in both directions together, in bytes per second; None if it
        was not measured.
    """
    compute = found.compute_seconds / found.seconds
    bound = least_compute(case.mode) if judged and case.is_largest else None
    yield Row(
        "compute alone over the step, by the profile",
        f"{compute:.3f}: idle {100 * found.idle:.1f} % of {found.seconds:.4g} s, "
        f"compute {found.compute_seconds:.4g} s, "
        f"kernels that move host memory {found.mover_seconds:.3g} s",
        "" if bound is None else f"at least {bound:g}",
        None if bound is None else compute >= bound,
        {
            "compute": compute,
            "idle": found.idle,
            "seconds": found.seconds,
            "compute_seconds": found.compute_seconds,
        },
    )
    ways = [
        f"{found.copied_bytes[way] / 1e9:.2f} GB {name} in {found.copy_seconds[way]:.3g} s "
        f"({found.copied_bytes[way] / max(found.copy_seconds[way], 1e-12) / 1e9:.1f} GB/s)"
        for way, name in ((UP, "up"), (DOWN, "down"))
    ]
    values = {
        "beside": found.beside,
        "both_seconds": found.both_seconds,
        "both_rate": found.both_rate,
    }
    both = both if judged and case.mode in BOTH_WAYS else None
    yield Row(
        "copies, by the profile",
        f"{', '.join(ways)}; {100 * found.beside:.0f} % of their time beside compute; "
        "both ways at once "
        f"{found.both_seconds:.3g} s, {found.both_rate / 1e9:.1f} GB/s",
        "" if both is None else f"both ways at once at least {BOTH:g} of {both / 1e9:.1f} GB/s",
        None if both is None else found.both_rate >= BOTH * both,
        values
        | {f"copied_{name}": found.copied_bytes[way] for way, name in ((UP, "up"), (DOWN, "down"))},
    )


def compared_rows(
    found: Measured | None, step: float, predicted: Any, judged: bool
) -> Iterator[Row]:
    """Compare the measured step with the prediction: seconds, and idle share if profiled."""
    ratio = step / predicted.seconds
    figure, bound = (
        f"{ratio:.2f} ({step:.4g} s over {predicted.seconds:.4g})",
        f"within {AGREES:g} of 1",
    )
    values, agrees = {"ratio": ratio, "predicted_idle": predicted.idle}, abs(ratio - 1) <= AGREES
    if found is not None:
        figure += (
            f"; idle {100 * found.idle:.1f} % where {100 * predicted.idle:.1f} % was predicted"
        )
        bound += f", idle within {100 * AGREES:g} points"
        values["idle"] = found.idle
        agrees &= abs(found.idle - predicted.idle) <= AGREES
    ok = agrees if judged else None
    yield Row(
        "measured over predicted at measured rates", figure, bound if judged else "", ok, values
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that a step may take of each memory; None means that no limit is known.

    Attributes:
      host: pinned host memory, inside and outside XLA's pool.
      pool: XLA's pool of pinned host memory.
      device: device memory.
    """

    host: int | None = None
    pool: int | None = None
    device: int | None = None


def room_of(context: Context) -> Room:
    """Return the memory of the machine, less what is left free and what a pool wastes."""
    from host_offload.device import available_bytes

    there = context.host_bytes if context.host_bytes is not None else available_bytes()
    spare = 0 if context.sizes.few else SPARE
    return Room(
        host=None if there is None else int((there - spare) / OVER_NEED),
        pool=int((int(os.environ[POOL]) << 30) / OVER_NEED) if POOL in os.environ else None,
        device=context.device_bytes,
    )


def fitted(
    case: Case, build: Callable[[Case], Any], room: Room, program: Any = None
) -> tuple[Case, Any]:
    """Return a case with as many layers as fit into each memory, and its program.

    Args:
      case: case with the most layers.
      build: function that returns a case's program.
      room: memory limits in bytes.
      program: program of `case` if it is already built; it is closed if it does not fit.

    Raises:
      NotImplementedError: if not even one layer fits.
    """
    while True:
        program, asked = build(case) if program is None else program, case.sizes.layers
        tiers = {
            tier: sum(kinds.values())
            for tier, kinds in program.memory(case.abstract_batch()).tiers.items()
        }
        needs = (
            ("host memory", tiers.get("pinned_host", 0), room.host),
            ("XLA's pool of host memory", pinned_bytes(case.mode, case.sizes), room.pool),
            ("device memory", OVER_ACCOUNT * tiers.get("device", 0), room.device),
        )
        too_much = [
            (name, size, most) for name, size, most in needs if most is not None and size > most
        ]
        if not too_much:
            return case, program
        program.close()
        program = None
        layers = min(asked - 1, *(int(asked * most / size) for _, size, most in too_much))
        if layers < 1:
            name, size, most = too_much[0]
            raise NotImplementedError(
                f"it needs {size / 2**30:.1f} GiB of {name}, and {most / 2**30:.1f} are free"
            )
        case = dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, layers=layers))
