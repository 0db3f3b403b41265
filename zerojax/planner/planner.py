"""The planner: which config fits a machine and is fastest on it, and how long its step takes.

    # A model on this machine, or on another one; the mesh may be compile-only.
    plan = zj.plan(model, tx, mesh, batch)
    plan = zj.plan(model, tx, mesh, batch, zj.machine("h200"))
    # A transformer described by numbers alone.
    plan = zj.plan(
        zj.Sizes(layers=96, hidden=12288, heads=96, seq=2048, batch=64),
        machine=zj.machine("h200", nodes=8),
    )
    print(plan)
    program = zj.build_train_step(model, tx, plan.config, mesh)
    # The longest sequences that fit.
    plan = zj.plan(model, tx, mesh, batch, zj.machine("h200"), longest=True)

The papers leave the choice among recomputing, offloading and keeping to users: ZeRO-Infinity
(arXiv:2104.07857) has an engine for each, but no way to choose. Here a cost model drives a search:
a workload (`zerojax.costs.workload`) is estimated for each candidate (`zerojax.planner.candidates`,
`zerojax.costs.estimate`), best first, and layers may differ if that pays
(`zerojax.planner.segments`).

The user's choices stay: `fixed` holds fields that the planner may not change, such as the
precision. The planner never changes what is trained: the batch, the optimizer and the dtype of
moments stay as they are. bfloat16 moments are considered only if the user allows them
(`rounds_moments`). If they were used only as a last resort, a machine with more memory could get a
slower plan, because a plan that fits there in float32 may take longer.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from host_offload.tiers import TIERS
from zerojax.aot import is_there
from zerojax.config import ZeroConfig, uses_disk
from zerojax.costs import (
    MOST_LAYERS,
    Buildable,
    Grid,
    Sizes,
    Workload,
    build_grid,
    buildable_of_sizes,
    why_no_program,
    workload_of_model,
    workload_of_sizes,
)
from zerojax.machines import Machine, MissingFigureError, format_bytes, machine_of, probe
from zerojax.machines import machine as named_machine
from zerojax.memory import program_memory, steps_of_program
from zerojax.models import LayeredModel, Model
from zerojax.planner.candidates import MIN_GAIN, SEARCHED, Space
from zerojax.planner.lengths import block_of, find_longest, with_length
from zerojax.planner.plans import Plan, PlanError, RunnerUp, changed
from zerojax.planner.repairs import Change, Repairs, what_lacks
from zerojax.planner.search import (
    DAYS,
    USABLE,
    Exact,
    Found,
    Limits,
    Search,
    SearchStats,
    compute_limits,
)
from zerojax.planner.segments import mix, with_options
from zerojax.planner.validate import validated
from zerojax.program import assemble
from zerojax.sharding import (
    CONTEXT,
    EXPERT,
    Axes,
    abstract_batch,
    describe_optional_axes,
    own_mesh,
    without_mesh,
)
from zerojax.trees import Batch
from zerojax.user_values import as_integer, as_number

_TILES = (1, 2, 4, 8, 16, 32)
_NUM_RUNNERS_UP = 5
BOTH_ASSUMED = "assumed: simultaneous reads and writes share the lower of disk_read and disk_write"
_MOST_COMPILED = 5
_MOST_TRIED = 8
"""Most programs that are built to find out whether a plan fits with one change."""
_SWAP_DIR = "SWAP_DIR"
"""Placeholder for the disk's folder in a plan from numbers alone."""


@without_mesh
def plan(
    model: Model | LayeredModel | Sizes | Callable[[int], Model | LayeredModel],
    tx: optax.GradientTransformation | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    batch: Batch = None,
    machine: Machine | str | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    min_disk_days: float | None = None,
    rounds_moments: bool = False,
    tiles: Sequence[int] | None = None,
    longest: bool | int = False,
    validate: bool = False,
    axes: Axes | None = None,
) -> Plan:
    """Choose the fastest config that fits, and predict its bytes and its step time.

    Nothing is allocated for the model. If the mesh's devices are present, the model's block,
    embedding and head are timed separately, for some seconds; otherwise their seconds follow from
    the machine's rates.

    Args:
      model: model to plan for; or `Sizes`, which plans a transformer in closed form, with Adam.
        With `longest`, also a function of the tokens of a row that returns a model, for a model
        that depends on them, such as by the number of its `seq_tiles`.
      tx: optimizer of the model; None for sizes.
      mesh: mesh of the model; for sizes, axis sizes by name (`{"fsdp": 64, "tensor": 8}`), with all
        devices on fsdp by default.
      batch: arrays or ShapeDtypeStructs of one step; None for sizes.
      machine: machine, or its name or file as in `zj.machine`; by default the named machine with
        the mesh's devices, or this machine as measured by `zj.probe`.
      fixed: fields of `ZeroConfig` with fixed values: "precision", "clip_norm", "swap_dir", and any
        field that must not be chosen. The disk is used only if "swap_dir" is given.
      min_disk_days: days that the disk must last, by its TBW.
      rounds_moments: whether bfloat16 moments, which round what is trained, may be chosen;
        otherwise moments are stored as `fixed` says.
      tiles: for sizes, the numbers of tiles in which the layers' MLPs may run; powers of two up to
        32 by default.
      longest: whether to plan for the longest sequences that fit (`plan.length`), among multiples
        of 1,024 tokens, or of the number given here. The length of the batch, or of the sizes, is
        then ignored, and its number of rows stays. Nothing is timed: seconds follow from the
        machine's rates.
      validate: whether to compile the plan's step for the mesh's devices, or the machine's GPUs,
        and report its bytes next to the plan's. A step that needs more than the device has is left
        out, and the next one is compiled; with `longest`, one of shorter sequences.
      axes: for a model on a mesh of your own, its axes by name, as in `build_train_step`.

    Raises:
      PlanError: nothing fits, or not with the fixed fields, or with `longest` not even the shortest
        sequence; the message has the needed and available bytes, and the nearest change that fits.
      ValueError: fields are unknown or contradict each other, the batch does not divide evenly, or
        the machine lacks a figure; `longest` is not a number of tokens, or the batch has none.
      NotImplementedError: the mesh has `pipe`, `expert` or `context`.
    """
    with _log_once():
        if axes is not None and not isinstance(mesh, Mesh):
            raise ValueError(
                f"axes={axes!r} names the axes of a jax.sharding.Mesh, but mesh is {mesh!r}"
            )
        if isinstance(mesh, Mesh) and not isinstance(model, Sizes):
            mesh = own_mesh(mesh, axes)
            _check_axes(mesh)
        options: Any = (fixed, min_disk_days, tiles, rounds_moments)
        block = block_of(longest)
        if block is None:
            return Planner(model, tx, mesh, batch, machine, *options).plan(validate)

        def build(length: int) -> Planner:
            resized, of_length = with_length(model, batch, length)
            return Planner(resized, tx, mesh, of_length, machine, *options, is_for_length=True)

        return _plan_longest(build, block, validate)


@without_mesh
def plan_uniform(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    batch: Batch,
    machine: Machine | str,
    *,
    fixed: Mapping[str, Any] | None = None,
) -> Plan | None:
    """Return the fastest plan whose layers are all alike; None if nothing fits.

    It takes a fraction of the time of `plan`, which also lets layers differ, and looks for the
    nearest change if nothing fits.

    Args:
      model: model, as in `plan`.
      tx: optimizer, as in `plan`.
      mesh: mesh, as in `plan`.
      batch: arrays or ShapeDtypeStructs of one step.
      machine: machine, or its name or file.
      fixed: fields of `ZeroConfig` with fixed values.

    Raises:
      ValueError: an argument is invalid; see `plan`.
    """
    with _log_once():
        return Planner(model, tx, mesh, batch, machine, fixed, None).plan_uniform()


def _plan_longest(build: Callable[[int], "Planner"], block: int, validate: bool) -> Plan:
    """Return the plan for the longest sequences that fit.

    Args:
      build: function from the tokens of a row to their planner.
      block: tokens whose multiples are tried.
      validate: whether to compile the plan's step, and to shorten the sequences until it fits.

    Raises:
      PlanError: not even sequences of `block` tokens fit.
    """
    usable_fraction = 1.0

    def planner_of(length: int) -> Planner:
        planner = build(length)
        planner.usable_fraction = usable_fraction
        return planner

    notes = list[str]()
    while True:
        length = find_longest(lambda length: planner_of(length).fits(), block)
        planner = planner_of(length or block)
        try:
            plan = planner.plan(False)
        except PlanError as error:
            text = f"not even sequences of {block:,} tokens fit: {error}"
            raise PlanError(text, error.tier, error.needed, error.had) from error
        assert length is not None
        if validate:
            compiled = validated(plan, planner.model, planner.tx, planner.mesh, planner.batch)
            plan = dataclasses.replace(plan, validated=compiled)
            most = planner.machine.need("device_bytes")
            if compiled.device_bytes > most:
                notes.append(f"sequences of {length:,} tokens were left out: {compiled}")
                usable_fraction *= min(0.98, 0.98 * most / compiled.device_bytes)
                continue
        return dataclasses.replace(plan, length=length, block=block, notes=(*plan.notes, *notes))


def _check_axes(mesh: Mesh) -> None:
    """Raise NotImplementedError for a mesh whose steps the planner cannot predict."""
    if axes := describe_optional_axes(mesh):
        exchanges = set(mesh.axis_names) & {CONTEXT, EXPERT}
        without = ", less the exchanges of zj.attention and zj.moe" if exchanges else ""
        raise NotImplementedError(
            f"zj.plan cannot predict what a step sends on a mesh with {axes}: plan on "
            "a mesh with these devices on fsdp, and compare the bytes with "
            f"program.memory(batch) on this mesh, which has what a device holds and sends{without}"
        )


@contextlib.contextmanager
def _log_once() -> Iterator[None]:
    """Log each warning only once, since a plan lays out the same model for many configs."""
    logged = set[str]()
    logger = logging.getLogger("zerojax")

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_first = text not in logged
        logged.add(text)
        return is_first

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def auto(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    batch: Batch,
    machine: Machine | str | None = None,
    *,
    axes: Axes | None = None,
    **fixed: Any,
) -> ZeroConfig:
    """Return the config of `plan`: the fastest that fits. `ZeroConfig.auto` is this function.

    Args:
      model: model, as in `build_train_step`.
      tx: optimizer, as in `build_train_step`.
      mesh: mesh, as in `build_train_step`.
      batch: arrays or ShapeDtypeStructs of one step.
      machine: machine to plan for, as in `plan`.
      axes: names of the mesh's axes, as in `build_train_step`.
      **fixed: fields of the config that keep these values.

    Raises:
      PlanError: nothing fits.
      ValueError: an argument is invalid; see `plan`.
    """
    return plan(model, tx, mesh, batch, machine, fixed=fixed, axes=axes).config


class Planner:
    """State of one call of `plan`."""

    def __init__(
        self,
        model: Any,
        tx: Any,
        mesh: Any,
        batch: Batch,
        machine: Machine | str | None,
        fixed: Mapping[str, Any] | None,
        min_disk_days: float | None,
        tiles: Sequence[int] | None = None,
        rounds_moments: bool = False,
        *,
        is_for_length: bool = False,
    ) -> None:
        """Check the arguments and trace the model; they are the arguments of `plan`.

        With `is_for_length`, the plan decides how long sequences can be: nothing is timed, and
        working memory is an upper estimate.
        """
        _check_arguments(fixed, min_disk_days, tiles)
        self.is_for_length = is_for_length
        self.model = model
        self.tx = tx
        self.batch = batch
        self.fixed = dict(fixed or {})
        self.tiles = tuple(int(n) for n in tiles or _TILES)
        self.is_sizes = isinstance(model, Sizes)
        self.notes = list[str]()
        self.rounds_moments = rounds_moments
        self._check(mesh)
        self.mesh: Mesh | None = None if self.is_sizes else mesh
        self.shares_cores = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        if self.is_sizes:
            # The folder is unknown and not needed, because nothing runs.
            self.fixed = {"swap_dir": _SWAP_DIR} | self.fixed
        self.base = ZeroConfig(**{**self.fixed, **_fitting(self.fixed)})
        self.machine = _with_both(self._on_mesh(self._machine(machine)))
        self.grid = self._grid(mesh)
        self.min_disk_days = as_number(min_disk_days)
        # Fraction of the device's usable memory that a plan may fill; below 1 after a compiled plan
        # took more than it counted.
        self.usable_fraction = 1.0
        _ = self.limits  # raises an error if figures are missing
        self.workload = self._workload()
        self._check_fixed()

    def _check(self, mesh: Any) -> None:
        if self.is_sizes:
            if self.tx is not None or self.batch is not None or isinstance(mesh, Mesh):
                raise ValueError(
                    "a plan from Sizes takes no optimizer, batch or Mesh: the sizes include the "
                    "batch, and Adam is assumed"
                )
            return
        if not isinstance(self.model, Model | LayeredModel):
            raise ValueError(
                "model must be a zerojax.Model, LayeredModel or Sizes, "
                f"got {type(self.model).__name__}"
            )
        if isinstance(self.model, LayeredModel) and self.model.num_layers > MOST_LAYERS:
            raise ValueError(
                f"the model has {self.model.num_layers:,} layers: the planner supports at most "
                f"{MOST_LAYERS:,}"
            )
        arguments = {"tx": self.tx, "mesh": mesh, "batch": self.batch}
        missing = [name for name, value in arguments.items() if value is None]
        if missing or not isinstance(mesh, Mesh):
            fault = f"mesh is {mesh!r}, which is not a jax.sharding.Mesh"
            if missing:
                fault = f"lacks {', '.join(missing)}"
            raise ValueError(f"a plan of a model takes (model, tx, mesh, batch): {fault}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} is {leaf!r}: a plan takes arrays or "
                    "jax.ShapeDtypeStructs of one step"
                )
        if not any(leaf.shape for leaf in jax.tree.leaves(self.batch)):
            raise ValueError(
                "batch has no array with rows: a plan takes arrays or jax.ShapeDtypeStructs of one "
                "step"
            )

    def _machine(self, machine: Machine | str | None) -> Machine:
        if isinstance(machine, str | os.PathLike):
            return named_machine(machine)
        if machine is not None:
            if not isinstance(machine, Machine):
                raise ValueError(
                    "machine must be a zerojax.Machine or its name, such as 'h200', "
                    f"got {type(machine).__name__}"
                )
            return machine
        if self.mesh is None:
            raise ValueError("a plan from Sizes needs a machine, such as zj.machine('h200')")
        kind = self.mesh.devices.flat[0].device_kind
        if name := machine_of(kind):
            return named_machine(name)
        if not is_there(self.mesh):
            raise ValueError(
                f"{kind!r} is not a known machine, and is not present to be measured: pass machine="
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"{kind!r} is not a known machine, and each of {jax.process_count()} processes "
                "would measure different figures: pass the same machine= in all processes, such as "
                "zj.machine('lab.toml') from zerojax probe"
            )
        return probe(self.base.swap_dir)

    def _on_mesh(self, machine: Machine) -> Machine:
        """Return the machine reduced or extended to the mesh's devices.

        They are a part of one node, or as many nodes as needed.
        """
        if self.mesh is None or self.mesh.size == machine.devices:
            return machine
        per_node = min(machine.devices_per_node, self.mesh.size)
        nodes = -(-self.mesh.size // per_node)
        return dataclasses.replace(machine, devices_per_node=per_node, nodes=nodes)

    def _grid(self, mesh: Any) -> Grid:
        if self.mesh is not None:
            return build_grid(self.mesh)
        if mesh is not None and not isinstance(mesh, Mapping):
            raise ValueError(
                f"mesh={mesh!r}: for Sizes, pass axis sizes by name, such as {{'fsdp': 8}}"
            )
        devices = self.machine.devices
        axes = dict(mesh or {})
        if unknown := sorted(set(axes) - set(Grid._fields)):
            raise ValueError(
                f"mesh has unknown axes {unknown}: choose from {', '.join(Grid._fields)}"
            )
        if wrong := [n for n in axes.values() if (as_integer(n) or 0) < 1]:
            raise ValueError(
                f"mesh {axes}: {wrong[0]!r} is not a number of devices, an integer of at least 1"
            )
        axes = {axis: int(n) for axis, n in axes.items()}
        outside_fsdp = math.prod(n for axis, n in axes.items() if axis != "fsdp")
        if devices % outside_fsdp:
            raise ValueError(
                f"mesh {axes} does not divide the {devices} devices of {self.machine.name}"
            )
        grid = Grid(**{"fsdp": devices // outside_fsdp, **axes})
        if grid.devices != devices:
            raise ValueError(
                f"mesh {axes} has {grid.devices} devices, but {self.machine.name} has {devices}"
            )
        return grid

    def _workload(self) -> Workload:
        if isinstance(self.model, Sizes):
            return workload_of_sizes(self.model, self.machine, self.grid, self.base.precision)
        assert self.mesh is not None
        rows = next((a.shape[0] for a in jax.tree.leaves(self.batch) if a.shape), 0)
        if rows % self.grid.batch_shards:
            raise ValueError(
                f"batch {rows} is not divisible by data x fsdp = {self.grid.data} x "
                f"{self.grid.fsdp}, and a row is not split over devices; "
                f"use {-(-rows // self.grid.batch_shards) * self.grid.batch_shards}"
            )
        return workload_of_model(
            self.model,
            self.tx,
            self.mesh,
            self.batch,
            self.machine,
            self.base,
            is_for_length=self.is_for_length,
        )

    def _check_fixed(self) -> None:
        """Raise ValueError for fixed fields that do not match the model.

        They are checked here because no program may be built that would report them.
        """
        work = self.workload
        config = self.base
        if work.rows % config.num_microbatches:
            raise ValueError(
                f"num_microbatches={config.num_microbatches} does not divide the {work.rows} rows "
                "of a device: use one of "
                f"{[n for n in range(1, work.rows + 1) if work.rows % n == 0][:16]}"
            )
        segments = config.activations if isinstance(config.activations, tuple) else ()
        count = sum(segment.num_layers for segment in segments)
        if segments and count != work.num_layers:
            raise ValueError(
                f"the segments of activations have {count} layers, but the model has "
                f"{work.num_layers}"
            )
        known = {value.name for stack in work.stacks for value in stack.values}
        names = set[str]()
        for choice in (config, *segments):
            names.update(choice.saved_names, choice.offloaded_names)
        if self.is_sizes and (missing := sorted(names - known)):
            raise ValueError(
                f"saved_names and offloaded_names contain unknown names {missing}: "
                f"a transformer from Sizes has {sorted(known)}"
            )

    @property
    def limits(self) -> Limits:
        """Bytes that one device may use, and the required life of the disk."""
        limits = compute_limits(self.machine, self.shares_cores, self.min_disk_days)
        return dataclasses.replace(limits, device=self.usable_fraction * limits.device)

    # --- the search -------------------------------------------------------------------------------

    def plan(self, validate: bool) -> Plan:
        """Search, and return the plan; with `validate`, one whose compiled program fits."""
        plan = self._plan()
        if not validate:
            return plan
        most = self.machine.need("device_bytes")
        compiled = None
        for _ in range(_MOST_COMPILED):
            compiled = validated(plan, self.model, self.tx, self.mesh, self.batch)
            plan = dataclasses.replace(plan, validated=compiled)
            if compiled.device_bytes <= most:
                return plan
            # The program takes more than was counted, so the next plan may use less memory.
            self._note(f"{_named(_chosen(plan.config))} was left out: {compiled}")
            self.usable_fraction *= min(0.98, 0.98 * most / compiled.device_bytes)
            plan = self._plan()
        assert compiled is not None
        raise PlanError(
            f"no compiled step fits {self.machine.name}: {compiled}, of {format_bytes(most)}",
            "device",
            compiled.device_bytes,
            most,
        )

    def fits(self) -> bool:
        """Return whether any config fits."""
        exact = self.exact if self.has_programs else None
        search = Search(self.space(), self.limits, exact, _MOST_TRIED)
        search.run()
        return search.settle() is not None

    def plan_uniform(self) -> Plan | None:
        """Return the fastest plan whose layers are all alike; None if nothing fits."""
        search = Search(self.space(), self.limits, self.exact if self.has_programs else None)
        search.run()
        best = search.settle()
        return None if best is None else self.build_plan(search, best)

    def _plan(self) -> Plan:
        search = self.search(self.space())
        best = search.settle()
        if best is None:
            raise self.error(search)
        self._note_moments(best)
        return self.build_plan(search, best)

    def _note_moments(self, best: Found) -> None:
        """Note if bfloat16 moments would be faster.

        They round what is trained, so they are not chosen unless requested.
        """
        if self.rounds_moments or "moments" in self.fixed or best.config.opt_state == "device":
            return
        space = dataclasses.replace(self.space(), fixed=self.fixed | {"moments": "bfloat16"})
        rounded = Search(space, self.limits)
        limit = best.seconds * (1 - MIN_GAIN)
        rounded.run(below=limit)
        if rounded.found and rounded.found[0].seconds < limit:
            self._note(
                f"with moments='bfloat16', which rounds the optimizer's moments, a step is "
                f"predicted to take {rounded.found[0].seconds:.4g} s; "
                "to use it, fix moments or set rounds_moments=True"
            )

    def search(self, space: Space) -> Search:
        """Return a search that has run."""
        search = Search(space, self.limits, self.exact if self.has_programs else None)
        search.run()
        mix(search, seconds=8.0)
        return search

    def space(self, fixed: Mapping[str, Any] | None = None) -> Space:
        """Return the choices; notes record what is left out because a figure is missing."""
        fixed = self.fixed if fixed is None else fixed
        tiers = self._tiers(fixed)
        allowed = dict[str, list[Any]]()
        if "host_kernel" not in self.machine.figures and fixed.get("update_on") != "host":
            allowed["update_on"] = ["device"]
            self._note("update_on='host' is not considered: the machine lacks host_kernel")
        if not self.is_sizes:
            allowed |= self._capable(tiers, allowed, fixed)
        space = Space(
            workload=self.workload,
            grid=self.grid,
            machine=self.machine,
            fixed=dict(fixed),
            tiers=tiers,
            tiles=self.tiles if self.is_sizes else (1,),
            allowed=allowed,
            shares_cores=self.shares_cores,
            rounds_moments=self.rounds_moments,
        )
        return with_options(space)

    def _tiers(self, fixed: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the tiers that the machine has.

        Raises ValueError if a fixed field needs a tier whose figures the machine lacks.
        """
        figures = self.machine.figures
        tiers = ["device"]
        asked = _asked_tiers(fixed)
        link = ("link_up", "link_down", "link_both")
        host = ("host_bytes", *link)
        # Records in flight to and from the disk are in host memory buffers, so nvme needs host
        # memory and the host link, too.
        needs = {"pinned_host": host, "nvme": ("disk_bytes", "disk_read", "disk_write", *host)}
        for tier, names in needs.items():
            if missing := [name for name in names if name not in figures]:
                if tier in asked:
                    self._need(tier, missing, fixed)
                self._note(f"{tier} is not considered: the machine lacks {', '.join(missing)}")
            elif tier == "nvme" and fixed.get("swap_dir") is None:
                self._note("nvme is not considered: pass fixed={'swap_dir': folder} to use it")
            elif tier == "nvme" and not self.machine.disk_bytes:
                continue
            else:
                tiers.append(tier)
                if tier == "nvme" and self.machine.source["disk_both"] == BOTH_ASSUMED:
                    rate = format_bytes(self.machine.need("disk_both"))
                    self._note(f"disk_both, {rate}/s, is {BOTH_ASSUMED}")
        return tuple(tiers)

    def _need(self, tier: str, missing: Sequence[str], fixed: Mapping[str, Any]) -> None:
        """Raise MissingFigureError, naming the fixed fields that need the missing figures."""
        try:
            self.machine.needs(*missing)
        except MissingFigureError as error:
            fields = [f"{name}={value!r}" for name, value in fixed.items() if value == tier]
            asking = f"fixed {', '.join(fields)} needs {tier}: " if fields else ""
            raise MissingFigureError(f"{asking}{error}", error.figures) from error

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _capable(
        self, tiers: tuple[str, ...], allowed: Mapping[str, Any], fixed: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Return the choices that the model and optimizer support, by field.

        They are found by building one program for each choice.
        """
        # For each field, the fields with which a program of each choice is built.
        tries: dict[str, dict[Any, dict[str, Any]]] = {
            "opt_state": {tier: {"opt_state": tier} for tier in tiers},
            "update": {
                update: {"update": update} for update in (None, "in_backward", "in_forward")
            },
            "update_on": {
                "device": {},
                "host": {"opt_state": "pinned_host", "update_on": "host"},
            },
            "params": {tier: {"params": tier} for tier in tiers},
        }
        if not self.workload.is_layered:
            tries = {"opt_state": tries["opt_state"]}
        supported: dict[str, list[Any]] = {}
        for name, choices in tries.items():
            if name not in fixed and name not in allowed:
                supported[name] = [
                    choice for choice, fields in choices.items() if self._builds(fields, fixed)
                ]
        if self.workload.is_layered and "activations" not in fixed:
            # A layer whose tiles are stored off the device cannot use activations="everything".
            away = {"params": supported["params"][-1]} if "params" in supported else {}
            if not self._builds({"activations": "everything", **away}, fixed):
                supported["activations"] = ["save", "selective", "remat", *tiers[1:]]
        return supported

    def _builds(self, fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        """Return whether a program can be built with some fields."""
        assert self.mesh is not None
        try:
            # `grads_dtype` needs a streamed step, which single fields may not make.
            fixed = {**fixed, "grads_dtype": None}
            plain = {name: value for name, value in fixed.items() if name not in fields}
            assemble(self.model, self.tx, ZeroConfig(**{**plain, **fields}), self.mesh)
        except (ValueError, NotImplementedError) as error:
            shown = _named(fields)
            self._note(f"{shown} is not considered{_reason(shown, str(error))}")
            return False
        return True

    def exact(self, config: ZeroConfig, tiles: int = 1) -> Exact:
        """Return the bytes of a config's program.

        Raises:
          ValueError, NotImplementedError: the program cannot be built.
        """
        of_program = self._buildable(tiles)
        parts = assemble(of_program.model, of_program.tx, config, of_program.mesh)
        batch = abstract_batch(of_program.batch, of_program.mesh)
        with jax.set_mesh(of_program.mesh):
            tiers = program_memory(parts.records, parts.step, batch).tiers
            if parts.records.layout.disk is None:
                return Exact(tiers, None)
            steps = steps_of_program(parts.records, parts.step, batch)
        return Exact(tiers, (steps.moved("read"), steps.moved("write")))

    def _buildable(self, tiles: int) -> Buildable:
        """Return what programs are built from: the given model, or a model of the sizes."""
        if not isinstance(self.model, Sizes):
            assert self.mesh is not None
            return Buildable(self.model, self.tx, self.mesh, self.batch)
        return buildable_of_sizes(self.model, self.machine, self.grid, self.base.precision, tiles)

    @functools.cached_property
    def has_programs(self) -> bool:
        """Whether programs can be built and counted; if not for sizes, a note says why."""
        if not isinstance(self.model, Sizes):
            return True
        why = why_no_program(self.model, self.machine, self.base.precision)
        if why is None:
            try:
                self.exact(ZeroConfig(precision=self.base.precision))
            except (ValueError, NotImplementedError, RuntimeError) as error:
                why = str(error)
        if why is not None:
            self._note(
                "bytes are estimated in closed form, because no program can be built from these "
                f"sizes: {why}"
            )
        return why is None

    # --- results ----------------------------------------------------------------------------------

    def build_plan(self, search: Search, best: Found) -> Plan:
        """Return the plan for the config that a search settled on."""
        work = self.workload
        of_best = best.estimate
        moved = of_best.moved
        devices_per_node = self.machine.devices_per_node
        runners_up = [found for found in search.found if found is not best]
        bytes_by_tier = of_best.bytes if best.exact is None else best.exact.bytes
        read = moved["read"]
        written = moved["write"]
        if best.exact is not None and best.exact.swapped is not None:
            read, written = best.exact.swapped
        config = best.config
        if config.swap_dir == _SWAP_DIR and not uses_disk(config):
            config = dataclasses.replace(config, swap_dir=None)
        return Plan(
            config=config,
            name=work.name,
            grid=self.grid,
            machine=self.machine,
            tiles=of_best.tiles,
            peak_bytes=best.peak_bytes,
            bytes={tier: _nonzero(bytes_by_tier[tier]) for tier in TIERS},
            capacity={
                "device": self.limits.device,
                "pinned_host": self.limits.pinned_host,
                "nvme": self.limits.nvme,
            },
            time=of_best.time,
            estimate=of_best,
            tokens=work.tokens,
            flops=work.flops,
            hardware_flops=self._hardware_flops(best),
            link_bytes={"up": moved["up"], "down": moved["down"]},
            disk_bytes={"read": read * devices_per_node, "write": written * devices_per_node},
            collectives=of_best.collectives,
            beaten=tuple(
                RunnerUp(seconds=found.seconds, fields=_chosen(found.config))
                for found in runners_up[:_NUM_RUNNERS_UP]
            ),
            notes=tuple(self.notes),
            source=work.source,
            search=_describe_search(search.tally),
        )

    def _hardware_flops(self, found: Found) -> float:
        """Return the FLOPs of a step including recomputation, in proportion to its seconds."""
        work = self.workload
        forward = sum(stack.num_layers * stack.forward for stack in work.stacks)
        recomputed = max(0.0, found.estimate.again)
        return work.flops + work.forward_flops * (recomputed / forward if forward else 0.0)

    def error(self, search: Search) -> PlanError:
        """Return the error that nothing fits: what is missing, and the nearest change that fits."""
        nearest = search.tally.nearest
        if nearest is None:
            fixed = {name: value for name, value in self.fixed.items() if value != _SWAP_DIR}
            return PlanError(
                f"no config can be built with {_named(fixed)}: {self._contradiction(search)}"
            )
        worst = nearest.lacks[0]
        if worst.what == DAYS:
            text = (
                f"the disk lasts {worst.had:.4g} days of steps, "
                f"but min_disk_days={worst.needed:.4g} is required"
            )
        else:
            text = f"nothing fits {self.machine.name}: {what_lacks(worst)}"
        notes = [note for note in self.notes if note.startswith(("pinned_host", "nvme"))]
        repairs = Repairs(
            tries=self._tried,
            machine=self.machine,
            fixed=self.fixed,
            filled=USABLE * self.usable_fraction,
        )
        return PlanError(
            f"{text}, with the config that comes nearest ({_named(_chosen(nearest.config))}). "
            f"{repairs.nearest(search)}" + (f" Not tried: {'; '.join(notes)}." if notes else ""),
            worst.what,
            worst.needed,
            worst.had,
        )

    def _contradiction(self, search: Search) -> str:
        """Return why no config can be built: the first refusal, and what was not considered."""
        none = [name for name in SEARCHED if not search.space.choices(name)]
        why = [
            *search.tally.refused[:1],
            *(f"no value of {name} is possible" for name in none),
            *self.notes,
        ]
        return "; ".join(why) or "the fixed fields contradict each other"

    def _tried(self, change: Change) -> tuple[Search, Found | None]:
        """Return the search with a changed request, and the config that it settled on."""
        other = copy.copy(self)
        other.notes = []
        other.machine = dataclasses.replace(self.machine, **change.figures)
        other.fixed = {
            name: value for name, value in self.fixed.items() if name != change.without
        } | dict(change.fixed)
        if change.min_disk_days is not None:
            other.min_disk_days = change.min_disk_days
        search = Search(
            other.space(), other.limits, other.exact if other.has_programs else None, _MOST_TRIED
        )
        search.run()
        return search, search.settle()


def _describe_search(stats: SearchStats) -> str:
    """Return how many configs a search examined, and how."""
    text = (
        f"{stats.candidates:,} configs, {stats.estimated:,} estimated, "
        f"{stats.walked:,} walked through"
    )
    if stats.exact:
        text += f", {stats.exact} built"
    text += f" in {stats.seconds:.1f} s"
    if stats.solver:
        text += f"; layers by {stats.solver}"
    return text


def _nonzero(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _check_arguments(fixed: Any, min_disk_days: Any, tiles: Any) -> None:
    """Raise ValueError for arguments of `plan` with wrong types or values."""
    if fixed is not None and not (
        isinstance(fixed, Mapping) and all(isinstance(name, str) for name in fixed)
    ):
        raise ValueError(
            f"fixed={fixed!r}: pass fields of ZeroConfig by name, such as fixed={{'stage': 3}}"
        )
    if min_disk_days is not None and (as_number(min_disk_days) or 0) <= 0:
        raise ValueError(
            f"min_disk_days={min_disk_days!r}: pass a number of days above 0, or None for any"
        )
    if tiles is not None and not (
        isinstance(tiles, Sequence) and tiles and all((as_integer(n) or 0) >= 1 for n in tiles)
    ):
        raise ValueError(f"tiles={tiles!r}: pass numbers of at least 1, such as (1, 2, 4)")


def _with_both(machine: Machine) -> Machine:
    """Return a machine with a rate of simultaneous reads and writes, which no data sheet lists.

    It is assumed to be the lower of the rates of reads alone and of writes alone.
    """
    read = machine.disk_read
    write = machine.disk_write
    if (
        read is None
        or write is None
        or machine.source.get("disk_both", BOTH_ASSUMED) != BOTH_ASSUMED
    ):
        return machine
    source = dict(machine.source) | {"disk_both": BOTH_ASSUMED}
    return dataclasses.replace(machine, disk_both=min(read, write), source=source)


def _asked_tiers(fixed: Mapping[str, Any]) -> set[str]:
    """Return the tiers that fixed fields name, and host memory if they offload layer values."""
    named = {fixed.get(name) for name in ("params", "grads", "opt_state", "frozen")}
    offloads = bool(fixed.get("offloaded_names"))
    activations = fixed.get("activations")
    if isinstance(activations, str):
        named.add(activations)
    for segment in activations if isinstance(activations, tuple) else ():
        named.add(segment.activations)
        offloads = offloads or bool(segment.offloaded_names)
    tiers = {tier for tier in TIERS[1:] if tier in named}
    return tiers | {"pinned_host"} if offloads else tiers


def _fitting(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return extra fields that make a config of the fixed fields valid."""
    fitting = dict[str, Any]()
    needs_host = fixed.get("update_on") == "host" or fixed.get("opt_state_device_fraction")
    if needs_host and "opt_state" not in fixed:
        fitting["opt_state"] = "pinned_host"
    if fixed.get("grads_dtype") is not None:  # it needs a streamed step
        streaming = {
            "grads": "pinned_host",
            "opt_state": "pinned_host",
            "activations": "pinned_host",
            "gather_ahead": True,
        }
        free = [name for name in streaming if name not in fixed]
        fitting |= {name: streaming[name] for name in free[:1]}
    return fitting


def _chosen(config: ZeroConfig) -> dict[str, Any]:
    """Return the fields of a config that the planner chose and that differ from the default."""
    names = (*SEARCHED, "saved_names", "offloaded_names")
    return {name: value for name, value in changed(config).items() if name in names}


def _named(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items()) or "the default"


def _reason(fields: str, text: str) -> str:
    """Return why some fields are not considered, given the error that refuses them.

    The fields and the remedy are cut from the error's text.
    """
    first = text.split("; ")[0]
    if first.startswith(f"{fields} with"):
        return f" {first.removeprefix(fields).lstrip()}"
    return f": {first}"
