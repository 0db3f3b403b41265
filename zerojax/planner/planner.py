"""The planner: which config of a step fits a machine and is fastest there, what it needs, and how long it takes.

    plan = zj.plan(model, tx, mesh, batch)                                  # a model, on the machine that runs this
    plan = zj.plan(model, tx, mesh, batch, zj.machine("h200"))              # on another one; the mesh may be compile-only
    plan = zj.plan(zj.Sizes(layers=96, hidden=12288, heads=96, seq=2048, batch=64), machine=zj.machine("h200", nodes=8))
    print(plan); program = zj.build_train_step(model, tx, plan.config, mesh)

Choosing among recomputation, offload and keeping by a model of costs is what the papers leave to users: ZeRO-Infinity
(arXiv:2104.07857) has them, and an engine for each, without a choice. Here it is a search: a workload
(`zerojax.costs.workload`) is estimated for each candidate (`zerojax.planner.candidates`, `zerojax.costs.estimate`), best first,
and layers may differ where that pays (`zerojax.planner.segments`).

Numbers a user has chosen stay: `fixed` holds fields that the planner may not touch, such as the precision. It never changes
what is trained: the batch, the optimizer and the dtype of moments stay as they are, unless nothing else fits.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from host_offload.tiers import TIERS
from zerojax.aot import is_there
from zerojax.config import ZeroConfig
from zerojax.costs import Grid, Sizes, Workload, grid_of, workload_of_model, workload_of_sizes
from zerojax.machines import Machine, machine_of, probe, size_of
from zerojax.machines import machine as named_machine
from zerojax.memory import program_memory
from zerojax.models import LayeredModel, Model
from zerojax.planner.candidates import SEARCHED, Space
from zerojax.planner.plans import Beaten, Plan, PlanError, changed
from zerojax.planner.search import DAYS, USABLE, Exact, Found, Nearest, Search, limits_of
from zerojax.planner.segments import mix
from zerojax.planner.validate import validated
from zerojax.program import assemble
from zerojax.sharding import abstract_batch

_TILES = (1, 2, 4, 8, 16, 32)
_TOLD = 5
_MOST_COMPILED = 5
_SWAP_DIR = "SWAP_DIR"
"""Stands in a plan from numbers alone for the folder of the disk."""


def plan(
    model: Model | LayeredModel | Sizes,
    tx: optax.GradientTransformation | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    batch: Any = None,
    machine: Machine | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    min_disk_days: float | None = None,
    tiles: Sequence[int] | None = None,
    validate: bool = False,
) -> Plan:
    """Choose the fastest config that fits, and say what it needs and how long its step takes.

    Nothing is allocated for the model. On devices that are there its block and its ends are timed, each alone, for some
    seconds; on others their seconds follow from the machine's rates.

    Args:
      model: a model; or `Sizes`, by which a transformer is planned in closed form, with Adam.
      tx: of a model, its optimizer.
      mesh: of a model, its mesh; of sizes, the axes by name (`{"fsdp": 64, "tensor": 8}`), all devices on fsdp by default.
      batch: of a model, arrays or ShapeDtypeStructs of one step.
      machine: its figures; by default those of the mesh's devices by name, or of this machine, which `zj.probe` measures.
      fixed: fields of `ZeroConfig` that stay: "precision", "clip_norm", "swap_dir", and any that is not to be chosen. The disk
        is used only where "swap_dir" is given.
      min_disk_days: days that the disk has to last, by its TBW.
      tiles: of sizes, the numbers of tiles in which the layers' MLPs may run; powers of two to 32 by default.
      validate: compile the plan's step for the mesh's devices, or the machine's GPUs, and tell what it takes beside the plan. A
        step that takes more than the device has is left out, and the next one is compiled.

    Raises:
      PlanError: nothing fits, or not what is fixed; with what is needed and had, and the nearest change that fits.
      ValueError: unknown or contradicting fields, a batch that does not divide, or a figure that the machine lacks.
    """
    with _told_once():
        return Planner(model, tx, mesh, batch, machine, dict(fixed or {}), min_disk_days, tiles).plan(validate)


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """Let each warning through once: a plan lays out the same model for many configs."""
    told, logger = set[str](), logging.getLogger("zerojax")

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        known = text in told
        told.add(text)
        return not known

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def auto(
    model: Model | LayeredModel, tx: optax.GradientTransformation, mesh: Mesh, batch: Any, machine: Machine | None = None,
    **fixed: Any,
) -> ZeroConfig:  # fmt: skip
    """Return the config of `plan`: the fastest that fits. `ZeroConfig.auto` is this function.

    Args:
      model: as of `build_train_step`.
      tx: likewise.
      mesh: likewise.
      batch: arrays, or ShapeDtypeStructs, of one step.
      machine: as of `plan`.
      **fixed: fields of the config that stay as they are.

    Raises:
      PlanError, ValueError: as `plan`.
    """
    return plan(model, tx, mesh, batch, machine, fixed=fixed).config


ZeroConfig.auto = staticmethod(auto)  # bound from above: config.py imports no planner


class Planner:
    """One plan in the making."""

    def __init__(
        self, model: Any, tx: Any, mesh: Any, batch: Any, machine: Machine | None, fixed: dict[str, Any],
        min_disk_days: float | None, tiles: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.tx, self.batch, self.fixed = model, tx, batch, fixed
        self.tiles = tuple(tiles or _TILES)
        self.is_sizes, self.notes = isinstance(model, Sizes), list[str]()
        self._check(mesh)
        self.mesh: Mesh | None = None if self.is_sizes else mesh
        self.shares_cores = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"
        if self.is_sizes:
            # The folder is not known, and not needed: nothing runs.
            self.fixed = {"swap_dir": _SWAP_DIR} | fixed
        self.base = ZeroConfig(**{**self.fixed, **_fitting(self.fixed)})
        self.machine = self._on_mesh(self._machine(machine))
        self.grid = self._grid(mesh)
        self.limits = limits_of(self.machine, self.shares_cores, min_disk_days)
        self.workload = self._workload()
        self._check_fixed()

    def _check(self, mesh: Any) -> None:
        if self.is_sizes:
            if self.tx is not None or self.batch is not None or isinstance(mesh, Mesh):
                raise ValueError("a plan from Sizes takes no optimizer, batch or Mesh: sizes say the batch, Adam is assumed")
            return
        if not isinstance(self.model, Model | LayeredModel):
            raise ValueError(f"model must be a zerojax.Model, LayeredModel or Sizes, got {type(self.model).__name__}")
        wrong = [name for name, value in (("tx", self.tx), ("mesh", mesh), ("batch", self.batch)) if value is None]
        if wrong or not isinstance(mesh, Mesh):
            raise ValueError(f"a plan of a model takes (model, tx, mesh, batch): {', '.join(wrong) or 'mesh'} is missing")

    def _machine(self, machine: Machine | None) -> Machine:
        if machine is not None:
            return machine
        if self.mesh is None:
            raise ValueError("a plan from Sizes needs a machine, such as zj.machine('h200')")
        kind = self.mesh.devices.flat[0].device_kind
        if name := machine_of(kind):
            return named_machine(name)
        if not is_there(self.mesh):
            raise ValueError(f"nothing is known of {kind!r}, and it is not here to be measured: give machine=")
        if jax.process_count() > 1:
            raise ValueError(
                f"nothing is known of {kind!r}, and each of {jax.process_count()} processes would measure another machine: "
                "give machine=, the same to all, such as zj.machine('lab.toml') of zerojax probe"
            )
        return probe(self.base.swap_dir)

    def _on_mesh(self, machine: Machine) -> Machine:
        """Return a machine with the devices of the mesh: a part of one node, or as many nodes as it takes."""
        if self.mesh is None or self.mesh.size == machine.devices:
            return machine
        each = min(machine.devices_per_node, self.mesh.size)
        return dataclasses.replace(machine, devices_per_node=each, nodes=-(-self.mesh.size // each))

    def _grid(self, mesh: Any) -> Grid:
        if self.mesh is not None:
            return grid_of(self.mesh)
        devices, axes = self.machine.devices, dict(mesh or {})
        if unknown := sorted(set(axes) - set(Grid._fields)):
            raise ValueError(f"mesh has the axes {unknown}: they may be {', '.join(Grid._fields)}")
        others = math.prod(n for axis, n in axes.items() if axis != "fsdp")
        if devices % others:
            raise ValueError(f"mesh {axes} does not divide the {devices} devices of {self.machine.name}")
        grid = Grid(**{"fsdp": devices // others, **axes})
        if grid.devices != devices:
            raise ValueError(f"mesh {axes} has {grid.devices} devices, and {self.machine.name} has {devices}")
        return grid

    def _workload(self) -> Workload:
        if isinstance(self.model, Sizes):
            return workload_of_sizes(self.model, self.machine, self.grid, self.base.precision)
        assert self.mesh is not None
        rows = next((a.shape[0] for a in jax.tree.leaves(self.batch) if a.shape), 0)
        if rows % self.grid.batch_shards:
            raise ValueError(
                f"batch {rows} does not divide by data x fsdp = {self.grid.data} x {self.grid.fsdp}: each device has whole "
                f"rows; use {-(-rows // self.grid.batch_shards) * self.grid.batch_shards}"
            )
        return workload_of_model(self.model, self.tx, self.mesh, self.batch, self.machine, self.base)

    def _check_fixed(self) -> None:
        """Raise ValueError for fixed fields that do not go with the model: nothing may be built that would tell."""
        work, config = self.workload, self.base
        if work.rows % config.num_microbatches:
            raise ValueError(
                f"num_microbatches={config.num_microbatches} does not divide the {work.rows} rows of a device: use one of "
                f"{[n for n in range(1, work.rows + 1) if work.rows % n == 0][:16]}"
            )
        segments = config.activations if isinstance(config.activations, tuple) else ()
        if segments and (count := sum(segment.num_layers for segment in segments)) != work.num_layers:
            raise ValueError(f"the segments of activations have {count} layers, and the model has {work.num_layers}")
        known = {value.name for stack in work.stacks for value in stack.values}
        named = [config, *segments]
        names = {name for each in named for name in (*each.saved_names, *each.offloaded_names)}
        if self.is_sizes and (missing := sorted(names - known)):
            raise ValueError(f"saved_names and offloaded_names name {missing}: a transformer of sizes has {sorted(known)}")

    # --- the search --------------------------------------------------------------------------------------------------------

    def plan(self, validate: bool) -> Plan:
        """Search, and return the plan; of those that are compiled, one whose program fits as compiled."""
        made = self._plan()
        if not validate:
            return made
        most, compiled = self.limits.device / USABLE, None
        for _ in range(_MOST_COMPILED):
            compiled = validated(made, self.model, self.tx, self.mesh, self.batch)
            made = dataclasses.replace(made, validated=compiled)
            if compiled.device_bytes <= most:
                return made
            # It takes more than was counted: the next plan may count so much less.
            self._note(f"{_named(_chosen(made.config))} was left out: {compiled}")
            less = min(0.98, 0.98 * most / compiled.device_bytes)
            self.limits = dataclasses.replace(self.limits, device=self.limits.device * less)
            made = self._plan()
        assert compiled is not None
        raise PlanError(
            f"nothing that was compiled fits {self.machine.name}: {compiled}, of {size_of(most)}",
            "device", compiled.device_bytes, most,
        )  # fmt: skip

    def _plan(self) -> Plan:
        search = self.search(self.space())
        best = search.settle()
        if best is None and "moments" not in self.fixed:
            search = self.search(dataclasses.replace(self.space(), rounds_moments=True))
            best = search.settle()
            if best is not None and best.config.moments != "float32":
                self._note("moments='bfloat16' rounds the optimizer's moments: in float32 nothing fits")
        if best is None:
            raise self.error(search)
        return self.made(search, best)

    def search(self, space: Space) -> Search:
        """Return a search that has run."""
        search = Search(space, self.limits, None if self.is_sizes else self.exact)
        search.run()
        mix(search, seconds=8.0)
        return search

    def space(self, fixed: Mapping[str, Any] | None = None) -> Space:
        """Return what may be chosen; tells in notes what is left out because a figure is missing."""
        fixed = self.fixed if fixed is None else fixed
        tiers, allowed = self._tiers(fixed), dict[str, list[Any]]()
        if "host_kernel" not in self.machine.figures and fixed.get("update_on") != "host":
            allowed["update_on"] = ["device"]
            self._note("update_on='host' is not considered: the machine's host_kernel is not given")
        if not self.is_sizes:
            allowed |= self._capable(tiers, allowed, fixed)
        searched = {name: value for name, value in fixed.items() if name in SEARCHED}
        others = {name: value for name, value in fixed.items() if name not in SEARCHED}
        return Space(
            workload=self.workload,
            grid=self.grid,
            machine=self.machine,
            fixed=others | searched,
            tiers=tiers,
            tiles=self.tiles if self.is_sizes else (1,),
            allowed=allowed,
            shares_cores=self.shares_cores,
        )

    def _tiers(self, fixed: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the tiers that the machine has; those that are asked for must have their figures."""
        figures, tiers = self.machine.figures, ["device"]
        link = ("link_up", "link_down", "link_both")
        needs = {"pinned_host": ("host_bytes", *link), "nvme": ("disk_bytes", "disk_read", "disk_write", "disk_both", *link)}
        for tier, names in needs.items():
            is_asked = tier in [fixed.get(name) for name in ("params", "grads", "opt_state", "activations")]
            if missing := [name for name in names if name not in figures]:
                if is_asked:
                    self.machine.needs(*missing)
                self._note(f"{tier} is not considered: the machine's {', '.join(missing)} is not given")
            elif tier == "nvme" and fixed.get("swap_dir") is None:
                self._note("nvme is not considered: fixed={'swap_dir': folder} gives the disk")
            elif tier == "nvme" and not self.machine.disk_bytes:
                continue
            else:
                tiers.append(tier)
        return tuple(tiers)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _capable(self, tiers: tuple[str, ...], allowed: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return by field the choices that this model and optimizer can take, found by building one of each."""
        tries = {
            "opt_state": [{"opt_state": tier} for tier in tiers],
            "update": [{"update": None}, {"update": "in_backward"}],
            "update_on": [{}, {"opt_state": "pinned_host", "update_on": "host"}],
            "params": [{"params": tier} for tier in tiers],
        }
        if not self.workload.is_layered:
            tries = {name: tries[name] for name in ("opt_state",)}
        found: dict[str, list[Any]] = {}
        for name, options in tries.items():
            if name in fixed or name in allowed:
                continue
            default = {"update_on": "device"}
            found[name] = [o.get(name, default.get(name)) for o in options if self._builds(o, fixed)]
        return found

    def _builds(self, fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        """Tell whether a program of some fields can be built."""
        assert self.mesh is not None
        try:
            plain = {name: value for name, value in fixed.items() if name not in fields}
            assemble(self.model, self.tx, ZeroConfig(**{**plain, **fields}), self.mesh)
        except (ValueError, NotImplementedError) as error:
            self._note(f"{', '.join(f'{k}={v!r}' for k, v in fields.items())} is not considered: {_first(str(error))}")
            return False
        return True

    def exact(self, config: ZeroConfig) -> Exact:
        """Return what the program of a config takes.

        Raises:
          ValueError, NotImplementedError: it cannot be built.
        """
        assert self.mesh is not None
        parts = assemble(self.model, self.tx, config, self.mesh)
        batch, disk = abstract_batch(self.batch, self.mesh), parts.records.layout.disk
        with jax.set_mesh(self.mesh):
            tiers = program_memory(parts.records, parts.step, batch).tiers
            if disk is None:
                return Exact(tiers, None)
            parts.step.records_written(batch)  # which tells the disk of the activations
            moves = [(move.writes, disk.kinds[move.kind].num_bytes) for move in parts.step.moves()]
        return Exact(tiers, (sum(n for writes, n in moves if not writes), sum(n for writes, n in moves if writes)))

    # --- results -----------------------------------------------------------------------------------------------------------

    def made(self, search: Search, best: Found) -> Plan:
        """Return what a search found as a plan."""
        tally, work = search.tally, self.workload
        of_best, moved = best.estimate, best.estimate.moved
        per = self.machine.devices_per_node
        others = [f for f in search.found if f is not best][:_TOLD]
        text = (
            f"{tally.candidates:,} configs, {tally.estimated:,} estimated, {tally.walked:,} walked through"
            + (f", {tally.exact} built" if tally.exact else "")
            + f" in {tally.seconds:.1f} s"
            + (f"; layers by {tally.solver}" if tally.solver else "")
        )
        bytes_by_tier = of_best.bytes if best.exact is None else best.exact.bytes
        read, written = moved["read"], moved["write"]
        if best.exact is not None and best.exact.swapped is not None:
            read, written = best.exact.swapped
        return Plan(
            config=best.config,
            name=work.name,
            grid=self.grid,
            machine=self.machine,
            tiles=of_best.tiles,
            bytes={tier: {kind: n for kind, n in bytes_by_tier[tier].items() if n} for tier in TIERS},
            capacity={"device": self.limits.device, "pinned_host": self.limits.pinned_host, "nvme": self.limits.nvme},
            time=of_best.time,
            estimate=of_best,
            tokens=work.tokens,
            flops=work.flops,
            hardware_flops=self._hardware_flops(best),
            link_bytes={"up": moved["up"], "down": moved["down"]},
            disk_bytes={"read": read * per, "write": written * per},
            collectives=of_best.collectives,
            beaten=tuple(Beaten(seconds=f.seconds, fields=_chosen(f.config)) for f in others),
            notes=tuple(self.notes),
            source=work.source,
            search=text,
        )

    def _hardware_flops(self, found: Found) -> float:
        """Return the FLOPs of a step with what backward computes again, in proportion to its seconds."""
        work = self.workload
        forward = sum(s.num_layers * s.forward for s in work.stacks)
        again = max(0.0, found.estimate.again)
        of_layers = work.flops * (1 - _head_share(work))
        return work.flops + of_layers / 3 * (again / forward if forward else 0.0)

    def error(self, search: Search) -> PlanError:
        """Return the error that nothing fits: what is lacking, and the nearest change with which something does."""
        tally = search.tally
        if tally.nearest is None:
            why = tally.refused[0] if tally.refused else "the fixed fields contradict each other"
            return PlanError(f"no config can be built with {_named(self.fixed)}: {why}")
        what, needed, had = tally.nearest.lacks[0]
        if what == DAYS:
            text = f"the disk lasts {had:.4g} days of steps, and min_disk_days={needed:.4g} are asked for"
        else:
            text = f"nothing fits {self.machine.name}: {what} needs {size_of(needed)} of a device's {size_of(had)}"
            text += f" ({needed:,.0f} and {had:,.0f})"
        return PlanError(
            f"{text}, with the config that comes nearest ({_named(_chosen(tally.nearest.config))}). "
            + self._repair(tally.nearest),
            what, needed, had,
        )  # fmt: skip

    def _repair(self, nearest: Nearest) -> str:
        """Return the nearest change with which something fits."""
        for name in (n for n in self.fixed if n in SEARCHED):
            space = self.space({k: v for k, v in self.fixed.items() if k != name})
            rounded = [dataclasses.replace(space, rounds_moments=True)] if "moments" not in space.fixed else []
            if any(map(self._finds, (space, *rounded))):
                return f"Without {name}={self.fixed[name]!r} a plan fits."
        notes = [note for note in self.notes if note.startswith(("pinned_host", "nvme"))]
        more = f" Not tried: {'; '.join(notes)}." if notes else ""
        machine = " and ".join(f"{field} of {least:,}" for field, least in self._lacking(nearest).items())
        days = " and ".join(f"min_disk_days={_rounded_down(lack.had)}" for lack in nearest.lacks if lack.what == DAYS)
        if not machine:
            return f"With {days} it fits.{more}"
        text = f"A machine with {machine} would fit it, or more devices, or a smaller batch"
        return f"{text}{f'; with {days}' if days else ''}.{more}"

    def _lacking(self, nearest: Nearest) -> dict[str, int]:
        """Return the figures that a machine would have to have for a config."""
        per, pinned, least = self.machine.devices_per_node, self.machine.pinned_bytes, dict[str, int]()
        for what, needed, _ in (lack for lack in nearest.lacks if lack.what != DAYS):
            # One byte more, because the share of it that is usable is a rounded number.
            whole = math.ceil(needed * (1 if what == "device" else per) / (1.0 if what == "nvme" else USABLE)) + 1
            fields = {"device": ["device_bytes"], "nvme": ["disk_bytes"]}.get(what, ["host_bytes"])
            if what == "pinned_host" and pinned is not None:
                fields = [field for field in ("host_bytes", "pinned_bytes") if self.machine.figures[field] < whole]
            least |= {field: max(whole, least.get(field, 0)) for field in fields}
        return least

    def _finds(self, space: Space) -> bool:
        search = Search(space, self.limits, None if self.is_sizes else self.exact)
        return any(map(search.consider_candidate, sorted(space, key=lambda c: c.complexity)))


def _fitting(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a config of the fixed fields valid before the others are chosen."""
    needs_host = fixed.get("update_on") == "host" or fixed.get("opt_state_device_fraction")
    return {"opt_state": "pinned_host"} if needs_host and "opt_state" not in fixed else {}


def _rounded_down(days: float) -> float:
    """Return days that a plan keeps for sure: three digits of them."""
    unit = 10.0 ** (math.floor(math.log10(days)) - 2)
    return float(f"{math.floor(days / unit) * unit:.3g}")


def _head_share(work: Workload) -> float:
    """Return the head's part of the model's compute, by seconds."""
    layers = sum(s.num_layers * (s.forward + s.backward["save"]) for s in work.stacks)
    return work.head / (work.head + layers) if layers else 0.0


def _chosen(config: ZeroConfig) -> dict[str, Any]:
    """Return the fields of a config that were chosen and are not the default."""
    names = (*SEARCHED, "saved_names", "offloaded_names")
    return {name: value for name, value in changed(config).items() if name in names}


def _named(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items()) or "the default"


def _first(text: str) -> str:
    """Return the first part of a message."""
    return text.split(": ")[0][:120]
