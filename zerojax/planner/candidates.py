"""The configs that a plan chooses among, each with bounds of its seconds and bytes.

    field                       choices
    stage                       0, 1, 2, 3 if `fsdp` has several devices; else the default
    params, grads, opt_state    every tier of the machine; offloaded parameters only at stage 3
    activations                 save, everything, selective, remat, or a tier for the layer's
                                input; and each option of a layer (`Space.options`), with
                                saved_names and offloaded_names, the same for all layers
    update                      after backward, or in backward if nothing clips
    update_on                   the device, or the host if the optimizer state is offloaded
    opt_state_device_fraction   0, or the largest number of sixteenths that fits, if the optimizer
                                state is offloaded
    prefetch_distance           1, 2, 4 if something is fetched
    gather_ahead                off or on, if parameters are gathered
    num_microbatches            powers of two that divide a device's rows
    moments                     float32; bfloat16, which rounds them, only if the user allows it
    tiles                       number of tiles of the MLPs, if the model is given as sizes

The bound of seconds is what no lane can beat: compute with the waits that it cannot avoid, or a
wire's bytes over its rate. The bound of bytes leaves out gradients and records in flight. Neither
needs a schedule and both take microseconds, so most configs never get a schedule.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from host_offload.tiers import TIERS
from zerojax.activations import MODES
from zerojax.choice import LayerOption
from zerojax.config import ZeroConfig, check_unlayered, require_built, streams, untiled_setting
from zerojax.costs import CHECKPOINTED, Grid, Workload
from zerojax.machines import Machine
from zerojax.precision import PRECISIONS
from zerojax.sharding import STAGES

SEARCHED = (
    "stage",
    "params",
    "grads",
    "opt_state",
    "activations",
    "update",
    "update_on",
    "opt_state_device_fraction",
    "prefetch_distance",
    "gather_ahead",
    "num_microbatches",
    "moments",
)
"""Fields of `ZeroConfig` that a plan chooses, unless they are fixed."""
MIN_GAIN = 0.03
"""Fraction of a step's seconds that a less plain config must save to be chosen."""
FRACTION = "opt_state_device_fraction"
PARTS = 16
"""Number of steps in which the fraction is chosen."""
MOST_FRACTION = 1 - 1 / PARTS
"""Placeholder in a candidate for the largest fraction that fits, which needs an estimate to find.
"""
_MOST_MICROBATCHES = 64
_DEFAULT_FIELDS = {field.name: field.default for field in dataclasses.fields(ZeroConfig)}
_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(ZeroConfig) if field.name in SEARCHED
}
_STEPS = {"device": 0, "pinned_host": 1, "nvme": 2}


class Candidate(NamedTuple):
    """A config that may be tried.

    Attributes:
      seconds: lower bound of its step's seconds.
      complexity: distance from the plainest config.
      fields: fields of `ZeroConfig`, in addition to the fixed ones.
      tiles: number of tiles of the layers' MLPs.
    """

    seconds: float
    complexity: float
    fields: Mapping[str, Any]
    tiles: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What a plan may choose.

    Attributes:
      workload: workload of the model.
      grid: sizes of the mesh axes.
      machine: machine to plan for.
      fixed: fields that keep their values.
      tiers: tiers that may be used, in addition to fixed ones.
      tiles: numbers of tiles that may be used.
      allowed: choices that the model and its optimizer support, by field; a missing field allows
        all choices.
      shares_cores: whether the devices are threads of a CPU.
      rounds_moments: whether bfloat16 moments may be chosen.
      options: options of a layer that keep or offload some values by name, with estimated costs;
        only for a model of one stack.
    """

    workload: Workload
    grid: Grid
    machine: Machine
    fixed: Mapping[str, Any]
    tiers: tuple[str, ...]
    tiles: tuple[int, ...] = (1,)
    allowed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    shares_cores: bool = False
    rounds_moments: bool = False
    options: tuple[LayerOption, ...] = ()

    def choices(self, name: str) -> list[Any]:
        """Return the choices of a field, the plainest first."""
        if name in self.fixed:
            return [self.fixed[name]]
        layered = self.workload.is_layered
        several = self.grid.fsdp > 1
        host = [tier for tier in TIERS if tier in self.tiers]
        found: dict[str, list[Any]] = {
            "stage": [3, 2, 1, 0] if several else [3],
            "params": host if layered else ["device"],
            "grads": host if layered else ["device"],
            "opt_state": host,
            "activations": ["save", "everything", "selective", "remat", *host[1:]]
            if layered
            else ["save", "everything", "remat"],
            "update": [None, "in_backward"] if layered and self._may_update_in_backward else [None],
            "update_on": ["device", "host"] if self.workload.host_update else ["device"],
            FRACTION: [0.0, MOST_FRACTION] if layered else [0.0],
            "prefetch_distance": [1, 2, 4],
            "gather_ahead": [False, True] if layered and several else [False],
            "num_microbatches": self._microbatches(),
            "moments": ["float32", "bfloat16"] if self.rounds_moments else ["float32"],
        }
        allowed = self.allowed.get(name)
        return [choice for choice in found[name] if allowed is None or choice in allowed]

    @property
    def _may_update_in_backward(self) -> bool:
        """Whether layers may be updated before the norm of all gradients is known."""
        return self.fixed.get("clip_norm") is None and self.fixed.get("precision") != "fp16"

    def _microbatches(self) -> list[int]:
        rows = self.workload.rows
        return [
            n
            for n in (2**k for k in range(20))
            if n <= min(rows, _MOST_MICROBATCHES) and rows % n == 0
        ]

    def __iter__(self) -> Iterator[Candidate]:
        """Yield every candidate whose fields do not contradict each other, with its bound."""
        bound = Bound(self)
        for stage, params, grads, opt_state in itertools.product(
            *map(self.choices, ("stage", "params", "grads", "opt_state"))
        ):
            if params != "device" and stage != 3:
                continue
            for update, activations in itertools.product(
                self.choices("update"), self.choices("activations")
            ):
                # Gradients are never stored if layers are updated immediately.
                if update == "in_backward" and grads != "device" and "grads" not in self.fixed:
                    continue
                first = {
                    "stage": stage,
                    "params": params,
                    "grads": grads,
                    "opt_state": opt_state,
                    "update": update,
                    "activations": activations,
                }
                named = [
                    first | named_fields(option)
                    for option in self.options
                    if activations == CHECKPOINTED
                ]
                for fields in itertools.chain.from_iterable(map(self._details, [first, *named])):
                    for tiles in (
                        self.tiles if untiled_setting(self.view(fields)) is None else self.tiles[:1]
                    ):
                        yield Candidate(
                            bound.seconds(fields), complexity(fields, tiles), fields, tiles
                        )

    def _details(self, first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield `first` extended by all combinations of the remaining fields."""
        stage = first["stage"]
        opt_state = first["opt_state"]
        of_layers = first["activations"] in _STEPS or bool(first.get("offloaded_names"))
        is_away = of_layers or {first["params"], first["grads"], opt_state} != {"device"}
        names = (FRACTION, "prefetch_distance", "gather_ahead", "num_microbatches", "moments")
        for on in self._choices_if(opt_state != "device", "update_on"):
            choices = (
                self._choices_if(opt_state != "device" and on == "device", names[0]),
                self._choices_if(is_away, names[1]),
                self._choices_if(stage == 3, names[2]),
                *map(self.choices, names[3:]),
            )
            for chosen in itertools.product(*choices):
                yield {**first, "update_on": on} | dict(zip(names, chosen, strict=True))

    def _choices_if(self, matters: bool, name: str) -> list[Any]:
        """Return the choices of a field, or only the plainest if other fields make it meaningless.

        A fixed field has a single choice.
        """
        return self.choices(name) if matters else self.choices(name)[:1]

    @functools.cached_property
    def _given(self) -> dict[str, Any]:
        return {**_DEFAULT_FIELDS, **self.fixed}

    def view(self, fields: Mapping[str, Any]) -> ZeroConfig:
        """Return a candidate's fields as a `ZeroConfig`, without building one.

        The result has the attributes that the rules in `zerojax.config` read.
        """
        return cast(ZeroConfig, _Fields({**self._given, **fields}))

    def streams(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a candidate's step is streamed."""
        return self.workload.is_layered and streams(self.view(fields))

    def leaves_fraction(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a candidate's `opt_state_device_fraction` is still to be found."""
        return FRACTION not in self.fixed and fields[FRACTION] == MOST_FRACTION

    def built(self, fields: Mapping[str, Any]) -> ZeroConfig:
        """Return a candidate's config.

        Raises:
          ValueError, NotImplementedError: its fields cannot be combined.
        """
        config = ZeroConfig(**{**self.fixed, **fields})
        require_built(config)
        if not self.workload.is_layered:
            check_unlayered(config)
        return config

    def config(self, fields: Mapping[str, Any]) -> ZeroConfig | None:
        """Return a candidate's config, or None if its fields cannot be combined."""
        try:
            return self.built(fields)
        except (ValueError, NotImplementedError):
            return None


def named_fields(option: LayerOption) -> dict[str, Any]:
    """Return the config fields that apply an option to all layers."""
    kept = "pinned_host" if option.input_offloaded else CHECKPOINTED
    return {"activations": kept, "saved_names": option.keep, "offloaded_names": option.offload}


def complexity(fields: Mapping[str, Any], tiles: int = 1) -> float:
    """Return a config's distance from the plainest one, counting tiers and non-default fields."""
    total = 0.0
    for name, value in fields.items():
        if name not in _DEFAULTS:  # names of values
            continue
        if name in ("params", "grads", "opt_state", "activations"):
            total += 2.0 * _STEPS.get(value, 0) if isinstance(value, str) else 6.0
        if value != _DEFAULTS[name] and name != "stage":
            total += 1.0
    return total + (tiles > 1) + 2.0 * _has_names(fields)


class Bound:
    """Lower bounds of a candidate's seconds and bytes."""

    def __init__(self, space: Space) -> None:
        """Precompute sums over the layers of a space's workload."""
        self.space = space
        self.figures = space.machine.figures
        work = space.workload
        precision = space.fixed.get("precision", "fp32")
        self.master = 4 if PRECISIONS[precision].has_master else 0
        self.itemsize = 2 if self.master else 4
        self.blocks = float(work.elements - work.unstacked_elements)
        self.unstacked_seconds = work.embed + work.head + work.embed_backward
        self.forward = sum(s.num_layers * s.forward for s in work.stacks)
        self.backward = {m: sum(s.num_layers * s.backward[m] for s in work.stacks) for m in MODES}
        self.x = sum(s.num_layers * s.x_bytes for s in work.stacks)
        self.kept = {m: sum(s.num_layers * s.kept[m] for s in work.stacks) for m in MODES}
        self.options = {tuple(named_fields(option).values()): option for option in space.options}

    def _option(self, fields: Mapping[str, Any]) -> LayerOption | None:
        """Return the option that a candidate applies to all layers, or None if it applies none."""
        if not _has_names(fields):
            return None
        return self.options[fields["activations"], fields["saved_names"], fields["offloaded_names"]]

    def resting(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """Return a lower bound of the bytes per device by tier.

        It counts parameters, optimizer state and saved activations.
        """
        work = self.space.workload
        row = STAGES[fields["stage"]]
        n = self.space.grid.fsdp
        kept = fields["activations"]
        least: dict[str, float] = dict.fromkeys(TIERS, 0.0)
        least[fields["params"]] += work.elements * self.itemsize / (n if row.params else 1)
        moved = (
            work.elements * (1 - fields["opt_state_device_fraction"]) / (n if row.opt_state else 1)
        )
        least[fields["opt_state"]] += moved * self._state(fields)
        if option := self._option(fields):
            least["device"] += work.num_layers * option.device_bytes
            least["pinned_host"] += work.num_layers * option.host_bytes
        elif isinstance(kept, str) and not self.space.fixed.get("offloaded_names"):
            count = 1 if self.space.streams(fields) else fields["num_microbatches"]
            away = self.x if kept not in MODES else 0
            least["device"] += (self.kept[kept if kept in MODES else CHECKPOINTED] - away) / count
            least[kept if away else "device"] += away / count
        return least

    def part_bytes(self, fields: Mapping[str, Any]) -> tuple[float, float]:
        """Return the optimizer state bytes of one of `PARTS` parts, and of one layer per stack.

        A part is a sixteenth of all layers. A fraction covers full layers and is rounded down, so
        it can take up to the second number of bytes less than its parts.
        """
        share = 1 / self.space.grid.fsdp if STAGES[fields["stage"]].opt_state else 1.0
        of_one = share * self._state(fields)
        return self.blocks * of_one / PARTS, sum(
            stack.elements for stack in self.space.workload.stacks
        ) * of_one

    def _state(self, fields: Mapping[str, Any]) -> float:
        """Return the bytes of masters and moments per parameter."""
        return self.master + self.space.workload.moment_bytes * (
            0.5 if fields["moments"] == "bfloat16" else 1.0
        )

    def seconds(self, fields: Mapping[str, Any]) -> float:
        """Return the seconds that no schedule can beat."""
        space = self.space
        work = self.space.workload
        n = space.grid.fsdp
        row = STAGES[fields["stage"]]
        kept = fields["activations"]
        mode = kept if kept in MODES else CHECKPOINTED
        option = self._option(fields)
        # Fixed segments mix modes, so the least of all modes is the only bound.
        backward = self.backward[mode] if isinstance(kept, str) else min(self.backward.values())
        if option is not None:
            backward = self.backward["save"] + work.num_layers * option.seconds
        compute = self.unstacked_seconds + self.forward + backward
        share = 1 / n if row.opt_state else 1.0
        on_host = fields["update_on"] == "host"
        compute += 0.0 if on_host else work.elements * share * work.update
        if row.params and not fields["gather_ahead"] and n > 1:
            times = fields["num_microbatches"] if not space.streams(fields) else 1
            compute += 2 * times * self.blocks * self.itemsize * (n - 1) / n / self._network()
        state = self.blocks * share * self._state(fields)
        params = self.blocks * self.itemsize * (1 / n if row.params else 1.0)
        up = down = read = write = 0.0
        if fields["params"] != "device":
            up = up + 2 * params
            down = down + (0.0 if on_host else params)
            if fields["params"] == "nvme":
                read = read + 2 * params
                write = write + params
        if fields["opt_state"] != "device":
            moved = state * (1 - fields["opt_state_device_fraction"])
            if not on_host:
                up = up + moved
                down = down + moved
            if fields["opt_state"] == "nvme":
                read = read + moved
                write = write + moved
        if option is not None:
            up = up + work.num_layers * option.host_bytes
            down = down + work.num_layers * option.host_bytes
        elif isinstance(kept, str) and kept not in MODES:
            up = up + self.x
            down = down + self.x
            if kept == "nvme":
                read = read + self.x
                write = write + self.x
        link_up = self._rate("link_up")
        link_down = self._rate("link_down")
        share_of_disk = space.machine.devices_per_node
        disk = (
            max(
                read / self._rate("disk_read"),
                write / self._rate("disk_write"),
                (read + write) / self._rate("disk_both"),
            )
            * share_of_disk
        )
        if space.shares_cores:
            return max(compute + up / link_up + down / link_down, disk)
        return max(
            compute, up / link_up, down / link_down, (up + down) / self._rate("link_both"), disk
        )

    def _rate(self, name: str) -> float:
        return self.figures.get(name, float("inf"))

    def _network(self) -> float:
        within = self.space.grid.devices <= self.space.machine.devices_per_node
        return self._rate("network_in_node" if within else "network_between_nodes")


def _has_names(fields: Mapping[str, Any]) -> bool:
    """Return whether some values of a layer are kept or offloaded by name."""
    return bool(fields.get("saved_names") or fields.get("offloaded_names"))


class _Fields:
    """Fields of a `ZeroConfig` that is not built.

    A search evaluates config rules on very many of them.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
