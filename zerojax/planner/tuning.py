"""Choose the schedule of a step by prediction: compile it with several settings and simulate each.

    tuned = zj.autotune(model, tx, config, mesh, batch)
    print(tuned)                        # a table; every figure in it is predicted
    program = zj.build_train_step(model, tx, tuned.config, mesh)

Two settings change when records cross the host link, without changing results: `prefetch_distance`,
and `link_groups` if the link works in both directions at the same time. Which is fastest depends on
how XLA schedules the program around them, which no formula predicts. So each program is compiled,
for devices that need not be present, and `hlo.simulate` walks its schedule.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from host_offload.schedule import Schedule
from zerojax.chips import find_chip
from zerojax.config import ZeroConfig, streams
from zerojax.hlo import Rates, Simulation, find_rates, module_name, read_thunks, simulate
from zerojax.models import LayeredModel, Model
from zerojax.program import LoweredStep, Program, build_train_step
from zerojax.sharding import PIPE, describe_optional_axes, num_stages, own_mesh, without_mesh
from zerojax.trees import Batch
from zerojax.user_values import whole_number

DISTANCES = (1, 2, 4)
GROUPS = (2, 4, 5, 6, 8, 10)
LEAST_GAIN = 0.005
"""Least gain, as a fraction of a step's seconds, for which a later setting is preferred."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedStep:
    """A step with some settings, with its prediction.

    Attributes:
      config: config with these settings.
      simulation: simulation of its compiled program.
      num_bytes: bytes per device of its arguments and temporaries; compiled, not predicted.
    """

    config: ZeroConfig
    simulation: Simulation
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that are predicted to be fastest. It prints as a table.

    Attributes:
      config: config with the fastest settings that fit.
      tried: all steps, in the order in which they were compiled; the first has the given config. A
        setting whose program equals an earlier one is omitted.
      refused: settings with which the step cannot be built, for example because of
        `device_budget_bytes`, with the reason.
      device_bytes: most bytes on the device, or None if unknown.
      rates: assumed rates.
    """

    config: ZeroConfig
    tried: tuple[TunedStep, ...]
    refused: tuple[tuple[ZeroConfig, str], ...]
    device_bytes: int | None
    rates: Rates

    def __str__(self) -> str:
        """Return the tried settings and their predictions as a table."""
        rates = self.rates
        lines = [
            f"predicted from {len(self.tried)} compiled programs at assumed rates, such as "
            f"{rates.link / 1e9:.4g} GB/s of the link each way and "
            f"{rates.products / 1e12:.4g} TF/s; nothing here was measured",
            f"{'prefetch_distance':>17} {'link_groups':>11} {'predicted ms':>12} {'idle':>6} "
            f"{'floor ms':>10} {'MB':>11}",
        ]
        for step in self.tried:
            config = step.config
            simulation = step.simulation
            marks = " <- fastest" if config == self.config else ""
            if self.device_bytes is not None and step.num_bytes > self.device_bytes:
                marks = f" more than the device's {self.device_bytes / 1e6:,.1f}"
            lines.append(
                f"{_settings(config)} {1e3 * simulation.seconds:>12,.3f} "
                f"{100 * simulation.idle:>4.0f} % {1e3 * simulation.floor_seconds:>10,.3f} "
                f"{step.num_bytes / 1e6:>11,.1f}{marks}"
            )
        lines += [f"{_settings(config)} not built: {why}" for config, why in self.refused]
        if len(self.tried) + len(self.refused) == 1:
            lines.append("no setting of the schedule changes this step")
        return "\n".join(lines)


def _settings(config: ZeroConfig) -> str:
    """Return the settings of a config, as the first columns of the table."""
    groups = "default" if config.link_groups is None else config.link_groups
    return f"{config.prefetch_distance:>17} {groups:>11}"


@without_mesh
def autotune(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    batch: Batch,
    *,
    rates: Rates | str = "h200",
    distances: Sequence[int] = DISTANCES,
    groups: Sequence[int] = GROUPS,
    device_bytes: int | None = None,
) -> Tuned:
    """Compile a step with several schedule settings, and return the predicted fastest settings.

    First `prefetch_distance` is chosen, then `link_groups`, each only if the step uses it.
    Compiling a step takes seconds, or tens of seconds for a large one. Nothing is measured. No
    setting changes what a step computes, except for rounding.

    Args:
      model: model, as in `build_train_step`.
      tx: optimizer, as in `build_train_step`.
      config: config, as in `build_train_step`; its settings are tried first.
      mesh: mesh of one GPU, which need not be present (`zerojax.aot`), with any axes.
      batch: batch of one step, as arrays or a pytree of ShapeDtypeStruct.
      rates: rates or their name, as in `hlo.simulate`; for other machines,
        `zj.machine(...).rates()`.
      distances: values of `prefetch_distance` to try.
      groups: values of `link_groups` to try.
      device_bytes: most bytes on the device. By default, the memory of a described chip; for a
        present GPU, what JAX may allocate.

    Raises:
      NotImplementedError: the mesh is not one GPU: CPUs have no link, and collectives have no
        rates.
      ValueError: no step fits, an argument is invalid, or `build_train_step` refuses the given
        config.
    """
    mesh = own_mesh(mesh)
    rates = find_rates(rates)
    _check_one_gpu(mesh)
    # All values are checked before anything is compiled.
    by_distance = _with_each(config, "prefetch_distance", distances)
    by_groups = _with_each(config, "link_groups", groups)
    if device_bytes is None:
        limit = _device_bytes(mesh.devices.flat[0])
    else:
        limit = whole_number("device_bytes", device_bytes, 1, ", or None for what the device has")
    attempts = _Attempts(model, tx, mesh, batch, rates)

    schedule = attempts.compile(config).schedule
    if isinstance(model, LayeredModel) and streams(config):
        assert isinstance(schedule, Schedule)
        if any(phase.fetches for phase in schedule.phases):
            attempts.compile_all(by_distance)
        if any(phase.stores_late for phase in schedule.phases):
            distance = _fastest(attempts.tried, limit).prefetch_distance
            attempts.compile_all(
                [dataclasses.replace(grouped, prefetch_distance=distance) for grouped in by_groups]
            )
    return Tuned(
        config=_fastest(attempts.tried, limit),
        tried=tuple(attempts.tried),
        refused=tuple(attempts.refused),
        device_bytes=limit,
        rates=rates,
    )


class _Attempts:
    """Steps that were compiled with several settings.

    Attributes:
      tried: simulated steps, without those whose program equals an earlier one.
      refused: configs that cannot be built, with the reason.
    """

    def __init__(
        self,
        model: Model | LayeredModel,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        batch: Batch,
        rates: Rates,
    ) -> None:
        self._model = model
        self._tx = tx
        self._mesh = mesh
        self._batch = batch
        self._rates = rates
        self._programs = set[str]()
        self.tried = list[TunedStep]()
        self.refused = list[tuple[ZeroConfig, str]]()

    def compile(self, config: ZeroConfig) -> Program:
        """Build the program of a config, and simulate it unless an earlier one is equal."""
        with build_train_step(self._model, self._tx, config, self._mesh) as program:
            lowered = program.lower(self._batch)
            text = lowered.as_text()
            if text not in self._programs:
                self._programs.add(text)
                self.tried.append(_predicted(config, lowered, self._rates))
        return program

    def compile_all(self, configs: Sequence[ZeroConfig]) -> None:
        """Compile several configs, and note which cannot be built."""
        for config in configs:
            try:
                self.compile(config)
            except ValueError as error:  # the given config itself can be built
                self.refused.append((config, str(error)))


def _check_one_gpu(mesh: Mesh) -> None:
    """Raise NotImplementedError for a mesh that is not one GPU."""
    if num_stages(mesh) > 1:
        raise NotImplementedError(
            f"autotune does not support a mesh with {PIPE}={num_stages(mesh)}: it chooses settings "
            "of the host link for steps on one GPU. In a pipeline, choose num_microbatches, "
            "pipe_chunks and activations: build a program with each, and compare "
            "program.schedule.bubble and program.memory(batch)"
        )
    if axes := describe_optional_axes(mesh):
        raise NotImplementedError(
            f"autotune does not support a mesh with {axes}: it predicts steps on one GPU: pass "
            'zerojax.aot.gpu_mesh("h200", gpus_per_host=1), whose GPU need not be present'
        )
    platform = mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda") or mesh.size > 1:
        raise NotImplementedError(
            f"autotune predicts steps on one GPU, but this mesh has {mesh.size} "
            f"of platform {platform!r}: pass "
            'zerojax.aot.gpu_mesh("h200", gpus_per_host=1), whose GPU need not be present'
        )


def _fastest(tried: Sequence[TunedStep], limit: int | None) -> ZeroConfig:
    """Return the config of the fastest step that fits; a later one must gain `LEAST_GAIN`.

    Raises:
      ValueError: no step fits into `limit` bytes.
    """
    fitting = [step for step in tried if limit is None or step.num_bytes <= limit]
    if not fitting:
        least = min(step.num_bytes for step in tried)
        raise ValueError(
            f"no setting fits: the smallest takes {least:,} bytes of the device, which has "
            f"{limit:,}"
        )
    fastest = fitting[0]
    for step in fitting[1:]:
        if step.simulation.seconds < (1 - LEAST_GAIN) * fastest.simulation.seconds:
            fastest = step
    return fastest.config


def _with_each(config: ZeroConfig, name: str, values: Any) -> list[ZeroConfig]:
    """Return a config with each of some values of a field.

    Raises:
      ValueError: `values` is not a sequence, or the field does not allow one of them.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        argument = "distances" if name == "prefetch_distance" else "groups"
        raise ValueError(f"{argument}={values!r}: pass a sequence of values of {name}")
    return [dataclasses.replace(config, **{name: value}) for value in values]


def _predicted(config: ZeroConfig, lowered: LoweredStep, rates: Rates) -> TunedStep:
    """Compile a step and simulate it."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder})
        text = compiled.as_text()
        stats = compiled.memory_analysis()
        assert text is not None
        assert stats is not None
        thunks = read_thunks(folder, module_name(text))
    simulation = simulate(text, rates=rates, thunks=thunks, callbacks=_callbacks(config))
    return TunedStep(
        config=config,
        simulation=simulation,
        num_bytes=stats.argument_size_in_bytes + stats.temp_size_in_bytes,
    )


def _callbacks(config: ZeroConfig) -> str:
    """Return the kind of a step's callbacks, as `simulate` takes it."""
    on_disk = "nvme" in (config.params, config.grads, config.opt_state, config.frozen)
    if config.update_on != "host":
        return "nvme" if on_disk else "plain"
    if on_disk:
        return "nvme_update"
    if config.update == "in_forward":
        return "in_forward"
    return "delayed" if config.delayed_update else "update"


def _device_bytes(device: Any) -> int | None:
    """Return the bytes that a program may use on a device, or None if unknown."""
    chip = find_chip(device.device_kind)
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # the device is not present
        stats = None
    limit = (stats or {}).get("bytes_limit")
    if limit:
        return limit
    return None if chip is None else chip.allocatable_bytes
