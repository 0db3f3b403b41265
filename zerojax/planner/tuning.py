"""Choose the schedule of a step by prediction: it is compiled with each of a few settings, and each
program is simulated.

    tuned = zj.autotune(model, tx, config, mesh, batch)
    print(tuned)                                              # a table; every figure in it is predicted
    program = zj.build_train_step(model, tx, tuned.config, mesh)

Two settings change when records cross the link to the host, and no number: `prefetch_distance`, and
  `link_groups` where the
link works in both directions at once. What is fastest depends on how XLA schedules the program
around them, which no formula tells. So each is compiled, for devices that may not be there, and its
schedule is walked by `hlo.simulate`.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax.chips import chip_of
from zerojax.config import ZeroConfig, streams
from zerojax.given import whole_number
from zerojax.hlo import Rates, Simulation, module_name, rates_of, read_thunks, simulate
from zerojax.models import LayeredModel, Model
from zerojax.program import LoweredStep, Program, build_train_step
from zerojax.sharding import own_mesh, without_mesh

DISTANCES = (1, 2, 4)
GROUPS = (2, 4, 5, 6, 8, 10)
LEAST_GAIN = 0.005
"""Of the seconds of a step.

What gains less is not preferred to a setting that was tried before it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedStep:
    """A step with some settings, as it was predicted.

    Attributes:
      config: with these settings.
      simulation: of its compiled program.
      num_bytes: that its arguments and temporaries take on a device; compiled, not predicted.
    """

    config: ZeroConfig
    simulation: Simulation
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that are predicted to be fastest. It prints as a table.

    Attributes:
      config: with the fastest ones that fit.
      tried: all steps, in the order in which they were compiled; the first is that of the config as
        it was given. A setting that makes the same program as one before it is not among them.
      refused: settings with which the step cannot be built, such as by `device_budget_bytes`, and
        why.
      device_bytes: most bytes on a device, or None where that is not known.
      rates: assumed.
    """

    config: ZeroConfig
    tried: tuple[TunedStep, ...]
    refused: tuple[tuple[ZeroConfig, str], ...]
    device_bytes: int | None
    rates: Rates

    def __str__(self) -> str:
        rates = self.rates
        lines = [
            f"predicted from {len(self.tried)} compiled programs at assumed rates, such as {rates.link / 1e9:.4g} GB/s of the "
            f"link each way and {rates.products / 1e12:.4g} TF/s; nothing here was measured",
            f"{'prefetch_distance':>17} {'link_groups':>11} {'predicted ms':>12} {'idle':>6} {'floor ms':>10} {'MB':>11}",
        ]
        for step in self.tried:
            config, found = step.config, step.simulation
            marks = " <- fastest" if config == self.config else ""
            if self.device_bytes is not None and step.num_bytes > self.device_bytes:
                marks = f" more than the device's {self.device_bytes / 1e6:,.1f}"
            lines.append(
                f"{_settings(config)} {1e3 * found.seconds:>12,.3f} {100 * found.idle:>4.0f} % "
                f"{1e3 * found.floor_seconds:>10,.3f} {step.num_bytes / 1e6:>11,.1f}{marks}"
            )
        lines += [f"{_settings(config)} not built: {why}" for config, why in self.refused]
        if len(self.tried) + len(self.refused) == 1:
            lines.append("no setting of the schedule changes this step")
        return "\n".join(lines)


def _settings(config: ZeroConfig) -> str:
    """Return the settings of a config, as the first columns of the table."""
    return f"{config.prefetch_distance:>17} {'default' if config.link_groups is None else config.link_groups:>11}"


@without_mesh
def autotune(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    batch: Any,
    *,
    rates: Rates | str = "h200",
    distances: Sequence[int] = DISTANCES,
    groups: Sequence[int] = GROUPS,
    device_bytes: int | None = None,
) -> Tuned:
    """Compile a step with several settings of its schedule, and return those that are predicted to
    be fastest.

    First `prefetch_distance` is chosen, then `link_groups`, each only where the step has a use for
    it. A step takes seconds to compile, a large one tens of them. No figure is measured. No setting
    changes what a step computes, but for rounding.

    Args:
      model: as of `build_train_step`.
      tx: likewise.
      config: likewise; its settings are tried first.
      mesh: of one GPU, which need not be there (`zerojax.aot`), of any axes.
      batch: arrays, or a tree of ShapeDtypeStruct.
      rates: as of `hlo.simulate`; `zj.machine(...).rates()` are those of other machines.
      distances: values of `prefetch_distance` to try.
      groups: values of `link_groups` to try.
      device_bytes: most bytes on the device. None: what a described chip has; of a GPU that is
        there, what JAX may take.

    Raises:
      NotImplementedError: the mesh is not one GPU: CPUs have no link, and collectives have no
        rates.
      ValueError: no step fits, or an argument is none of those; and as `build_train_step`, of the
        config as it is given.
    """
    mesh = own_mesh(mesh)
    device, rates = mesh.devices.flat[0], rates_of(rates)
    if device.platform not in ("gpu", "cuda") or mesh.size > 1:
        raise NotImplementedError(
            f"autotune predicts steps of one GPU, and this mesh has {mesh.size} of platform {device.platform!r}: give "
            'zerojax.aot.gpu_mesh("h200", gpus_per_host=1), which need not be there'
        )
    # Each is checked before anything is compiled.
    by_distance = _with_each(config, "prefetch_distance", distances)
    by_groups = _with_each(config, "link_groups", groups)
    if device_bytes is not None:
        device_bytes = whole_number(
            "device_bytes", device_bytes, 1, ", or None for what the device has"
        )
    limit = _device_bytes(device) if device_bytes is None else device_bytes
    tried, programs, refused = list[TunedStep](), set[str](), list[tuple[ZeroConfig, str]]()

    def attempt(config: ZeroConfig) -> Program:
        with build_train_step(model, tx, config, mesh) as program:
            lowered = program.lower(batch)
            if (text := lowered.as_text()) not in programs:
                programs.add(text)
                tried.append(_predicted(config, lowered, rates))
        return program

    def attempt_others(configs: Sequence[ZeroConfig]) -> None:
        for other in configs:
            try:
                attempt(other)
            except ValueError as error:  # the config as it was given can be built
                refused.append((other, str(error)))

    def best() -> ZeroConfig:
        fitting = [step for step in tried if limit is None or step.num_bytes <= limit]
        if not fitting:
            least = min(step.num_bytes for step in tried)
            raise ValueError(
                f"no setting fits: the least takes {least:,} bytes of the device, which has {limit:,}"
            )
        chosen = fitting[0]
        for step in fitting[1:]:
            if step.simulation.seconds < (1 - LEAST_GAIN) * chosen.simulation.seconds:
                chosen = step
        return chosen.config

    schedule = attempt(config).schedule
    phases = schedule.phases if isinstance(model, LayeredModel) and streams(config) else ()
    if any(phase.fetches for phase in phases):
        attempt_others(by_distance)
    if any(phase.stores_late for phase in phases):
        distance = best().prefetch_distance
        attempt_others(
            [dataclasses.replace(other, prefetch_distance=distance) for other in by_groups]
        )
    return Tuned(
        config=best(), tried=tuple(tried), refused=tuple(refused), device_bytes=limit, rates=rates
    )


def _with_each(config: ZeroConfig, name: str, values: Any) -> list[ZeroConfig]:
    """Return a config with each of some values of a field.

    Raises:
      ValueError: they are no sequence, or the field takes one of them not.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        what = "distances" if name == "prefetch_distance" else "groups"
        raise ValueError(f"{what}={values!r}: a sequence of values of {name} is needed")
    return [dataclasses.replace(config, **{name: value}) for value in values]


def _predicted(config: ZeroConfig, lowered: LoweredStep, rates: Rates) -> TunedStep:
    """Compile and walk a step."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder})
        text, stats = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert stats is not None
        thunks = read_thunks(folder, module_name(text))
    found = simulate(text, rates=rates, thunks=thunks, callbacks=_callbacks(config))
    return TunedStep(
        config=config,
        simulation=found,
        num_bytes=stats.argument_size_in_bytes + stats.temp_size_in_bytes,
    )


def _callbacks(config: ZeroConfig) -> str:
    """Return what a step's callbacks do, as `simulate` takes it."""
    on_disk = "nvme" in (config.params, config.grads, config.opt_state, config.frozen)
    if config.update_on == "host":
        return "nvme_update" if on_disk else "delayed" if config.delayed_update else "update"
    return "nvme" if on_disk else "plain"


def _device_bytes(device: Any) -> int | None:
    """Return the bytes that a program may take on a device; None where that is not known."""
    chip = chip_of(device.device_kind)
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # of a device that is not there
        stats = None
    return (stats or {}).get("bytes_limit") or (None if chip is None else chip.allocatable_bytes)
