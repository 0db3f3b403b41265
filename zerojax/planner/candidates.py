"""The configs that a plan chooses among, each with bounds of its seconds and bytes.

    field                       choices
    stage                       0, 1, 2, 3 if `fsdp` has several devices; else the default
    params, grads, opt_state    every tier of the machine; offloaded parameters only at stage 3
    activations                 save, everything, selective, remat, or a tier for the layer's
                                input; and each option of a layer (`Space.options`), with
                                saved_names and offloaded_names, the same for all layers
    update                      after backward; in backward if nothing clips; in the next forward if
                                some state is offloaded
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
        choices = (self._plain_choices() | self._layered_choices())[name]
        allowed = self.allowed.get(name)
        return [choice for choice in choices if allowed is None or choice in allowed]

    def _plain_choices(self) -> dict[str, list[Any]]:
        """Return the choices of each field for a plain Model, the plainest first."""
        return {
            "stage": [3, 2, 1, 0] if self.grid.fsdp > 1 else [3],
            "params": ["device"],
            "grads": ["device"],
            "opt_state": self._ordered_tiers(),
            "activations": ["save", "everything", "remat"],
            "update": [None],
            "update_on": ["device", "host"] if self.workload.host_update else ["device"],
            FRACTION: [0.0],
            "prefetch_distance": [1, 2, 4],
            "gather_ahead": [False],
            "num_microbatches": self._microbatches(),
            "moments": ["float32", "bfloat16"] if self.rounds_moments else ["float32"],
        }

    def _layered_choices(self) -> dict[str, list[Any]]:
        """Return the choices of fields that have more of them if the layers are known."""
        if not self.workload.is_layered:
            return {}
        tiers = self._ordered_tiers()
        return {
            "params": tiers,
            "grads": tiers,
            "activations": ["save", "everything", "selective", "remat", *tiers[1:]],
            "update": self._updates(),
            FRACTION: [0.0, MOST_FRACTION],
            "gather_ahead": [False, True] if self.grid.fsdp > 1 else [False],
        }

    def _ordered_tiers(self) -> list[str]:
        return [tier for tier in TIERS if tier in self.tiers]

    def _updates(self) -> list[str | None]:
        """Return the times at which layers may be updated, the plainest first."""
        # Otherwise an update needs the norm of all gradients, or whether they are finite.
        is_independent = (
            self.fixed.get("clip_norm") is None and self.fixed.get("precision") != "fp16"
        )
        in_backward = ["in_backward"] if is_independent else []
        return [None, *in_backward, "in_forward"]

    def _microbatches(self) -> list[int]:
        rows = self.workload.rows
        powers = [2**k for k in range(20)]
        return [n for n in powers if n <= min(rows, _MOST_MICROBATCHES) and rows % n == 0]

    def __iter__(self) -> Iterator[Candidate]:
        """Yield every candidate whose fields do not contradict each other, with its bound."""
        bound = Bound(self)
        for first in self._first_fields():
            first_with_names = [first]
            if first["activations"] == CHECKPOINTED:
                first_with_names += [first | named_fields(option) for option in self.options]
            for fields in itertools.chain.from_iterable(map(self._details, first_with_names)):
                if fields["update"] == "in_forward" and not self._is_built(fields):
                    continue
                may_tile = untiled_setting(self.view(fields)) is None
                for tiles in self.tiles if may_tile else self.tiles[:1]:
                    seconds = bound.seconds(fields)
                    yield Candidate(seconds, complexity(fields, tiles), fields, tiles)

    def _first_fields(self) -> Iterator[dict[str, Any]]:
        """Yield the combinations of stage, tiers, update and activations."""
        names = ("stage", "params", "grads", "opt_state", "update", "activations")
        for chosen in itertools.product(*map(self.choices, names)):
            fields: dict[str, Any] = dict(zip(names, chosen, strict=True))
            if fields["params"] != "device" and fields["stage"] != 3:
                continue
            # Gradients are never stored if layers are updated immediately.
            is_unstored = fields["update"] == "in_backward" and fields["grads"] != "device"
            if is_unstored and "grads" not in self.fixed:
                continue
            # An update in forward hides transfers, so it needs some.
            is_away = {fields["params"], fields["grads"], fields["opt_state"]} != {"device"}
            if fields["update"] == "in_forward" and not is_away and "update" not in self.fixed:
                continue
            yield fields

    def _details(self, first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield `first` extended by all combinations of the remaining fields."""
        opt_state_away = first["opt_state"] != "device"
        activations_away = first["activations"] in _STEPS or bool(first.get("offloaded_names"))
        params_away = {first["params"], first["grads"]} != {"device"}
        is_away = activations_away or params_away or opt_state_away
        names = (FRACTION, "prefetch_distance", "gather_ahead", "num_microbatches", "moments")
        for update_on in self._choices_if(opt_state_away, "update_on"):
            choices = (
                self._choices_if(opt_state_away and update_on == "device", FRACTION),
                self._choices_if(is_away, "prefetch_distance"),
                self._choices_if(first["stage"] == 3, "gather_ahead"),
                self.choices("num_microbatches"),
                self.choices("moments"),
            )
            for chosen in itertools.product(*choices):
                yield {**first, "update_on": update_on, **dict(zip(names, chosen, strict=True))}

    def _choices_if(self, matters: bool, name: str) -> list[Any]:
        """Return the choices of a field, or only the plainest if other fields make it meaningless.

        A fixed field has a single choice.
        """
        return self.choices(name) if matters else self.choices(name)[:1]

    @functools.cached_property
    def _fixed_view(self) -> dict[str, Any]:
        """All fields of `ZeroConfig`, with fixed values or defaults."""
        return {**_DEFAULT_FIELDS, **self.fixed}

    def view(self, fields: Mapping[str, Any]) -> ZeroConfig:
        """Return a candidate's fields as a `ZeroConfig`, without building one.

        The result has the attributes that the rules in `zerojax.config` read.
        """
        return cast(ZeroConfig, _Fields({**self._fixed_view, **fields}))

    def _is_built(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a candidate's combination of settings is supported."""
        try:
            require_built(self.view(fields))
        except NotImplementedError:
            return False
        return True

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
    activations = "pinned_host" if option.input_offloaded else CHECKPOINTED
    return {
        "activations": activations,
        "saved_names": option.keep,
        "offloaded_names": option.offload,
    }


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


class _Moved(NamedTuple):
    """Bytes that a device moves per step in each lane of a wire."""

    up: float
    down: float
    read: float
    write: float


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
        self.layer_elements = float(work.elements - work.unstacked_elements)
        self.unstacked_seconds = work.embed + work.head + work.embed_backward
        self.forward = sum(s.num_layers * s.forward for s in work.stacks)
        self.backward = {m: sum(s.num_layers * s.backward[m] for s in work.stacks) for m in MODES}
        self.x_bytes = sum(s.num_layers * s.x_bytes for s in work.stacks)
        self.kept_bytes = {m: sum(s.num_layers * s.kept[m] for s in work.stacks) for m in MODES}
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
        sharded = STAGES[fields["stage"]]
        n = self.space.grid.fsdp
        params = work.elements * self.itemsize / (n if sharded.params else 1)
        moved_elements = work.elements * (1 - fields[FRACTION]) / (n if sharded.opt_state else 1)
        least: dict[str, float] = dict.fromkeys(TIERS, 0.0)
        least[fields["params"]] += params
        least[fields["opt_state"]] += moved_elements * self._opt_state_bytes(fields)

        activations = fields["activations"]
        if option := self._option(fields):
            least["device"] += work.num_layers * option.device_bytes
            least["pinned_host"] += work.num_layers * option.host_bytes
        elif isinstance(activations, str) and not self.space.fixed.get("offloaded_names"):
            count = 1 if self.space.streams(fields) else fields["num_microbatches"]
            if activations in MODES:
                least["device"] += self.kept_bytes[activations] / count
            else:
                least["device"] += (self.kept_bytes[CHECKPOINTED] - self.x_bytes) / count
                least[activations if self.x_bytes else "device"] += self.x_bytes / count
        return least

    def part_bytes(self, fields: Mapping[str, Any]) -> tuple[float, float]:
        """Return the optimizer state bytes of one of `PARTS` parts, and of one layer per stack.

        A part is a sixteenth of all layers. A fraction covers full layers and is rounded down, so
        it can take up to the second number of bytes less than its parts.
        """
        share = self._opt_state_share(fields)
        per_parameter = share * self._opt_state_bytes(fields)
        part = self.layer_elements * per_parameter / PARTS
        elements = sum(stack.elements for stack in self.space.workload.stacks)
        return part, elements * per_parameter

    def _opt_state_share(self, fields: Mapping[str, Any]) -> float:
        """Return the fraction of the optimizer state that one device stores."""
        return 1 / self.space.grid.fsdp if STAGES[fields["stage"]].opt_state else 1.0

    def _opt_state_bytes(self, fields: Mapping[str, Any]) -> float:
        """Return the bytes of masters and moments per parameter."""
        factor = 0.5 if fields["moments"] == "bfloat16" else 1.0
        return self.master + self.space.workload.moment_bytes * factor

    def seconds(self, fields: Mapping[str, Any]) -> float:
        """Return the seconds that no schedule can beat."""
        option = self._option(fields)
        compute = self._compute_seconds(fields, option)
        moved = self._moved(fields, option)
        up = moved.up / self._rate("link_up")
        down = moved.down / self._rate("link_down")
        disk = max(
            moved.read / self._rate("disk_read"),
            moved.write / self._rate("disk_write"),
            (moved.read + moved.write) / self._rate("disk_both"),
        )
        disk *= self.space.machine.devices_per_node  # they share the disk
        if self.space.shares_cores:
            return max(compute + up + down, disk)
        link = (moved.up + moved.down) / self._rate("link_both")
        return max(compute, up, down, link, disk)

    def _compute_seconds(self, fields: Mapping[str, Any], option: LayerOption | None) -> float:
        """Return the seconds of compute, and of the gathers that it waits for."""
        space = self.space
        work = space.workload
        n = space.grid.fsdp
        activations = fields["activations"]
        if option is not None:
            backward = self.backward["save"] + work.num_layers * option.seconds
        elif isinstance(activations, str):
            backward = self.backward[activations if activations in MODES else CHECKPOINTED]
        else:
            # Fixed segments mix modes, so the least of all modes is the only bound.
            backward = min(self.backward.values())
        compute = self.unstacked_seconds + self.forward + backward
        if fields["update_on"] != "host":
            compute += work.elements * self._opt_state_share(fields) * work.update
        if STAGES[fields["stage"]].params and not fields["gather_ahead"] and n > 1:
            times = 1 if space.streams(fields) else fields["num_microbatches"]
            gathered = 2 * times * self.layer_elements * self.itemsize
            compute += gathered * (n - 1) / n / self._network()
        return compute

    def _moved(self, fields: Mapping[str, Any], option: LayerOption | None) -> _Moved:
        """Return the bytes of layers that must move over the link and to and from the disk."""
        activations = fields["activations"]
        on_host = fields["update_on"] == "host"
        up = 0.0
        down = 0.0
        read = 0.0
        write = 0.0
        if fields["params"] != "device":
            share = 1 / self.space.grid.fsdp if STAGES[fields["stage"]].params else 1.0
            params = self.layer_elements * self.itemsize * share
            # Forward makes the parameters that it updates from their masters.
            makes_params = fields["update"] == "in_forward" and self.master > 0
            fetched = params if makes_params else 2 * params
            up += fetched
            if not on_host:
                down += params
            if fields["params"] == "nvme":
                read += fetched
                write += params
        if fields["opt_state"] != "device":
            opt_state = self.layer_elements * self._opt_state_share(fields)
            opt_state = opt_state * self._opt_state_bytes(fields) * (1 - fields[FRACTION])
            if not on_host:
                up += opt_state
                down += opt_state
            if fields["opt_state"] == "nvme":
                read += opt_state
                write += opt_state
        if option is not None:
            offloaded = self.space.workload.num_layers * option.host_bytes
            up += offloaded
            down += offloaded
        elif isinstance(activations, str) and activations not in MODES:
            up += self.x_bytes
            down += self.x_bytes
            if activations == "nvme":
                read += self.x_bytes
                write += self.x_bytes
        return _Moved(up, down, read, write)

    def _rate(self, name: str) -> float:
        return self.figures.get(name, float("inf"))

    def _network(self) -> float:
        fits_node = self.space.grid.devices <= self.space.machine.devices_per_node
        return self._rate("network_in_node" if fits_node else "network_between_nodes")


def _has_names(fields: Mapping[str, Any]) -> bool:
    """Return whether some values of a layer are kept or offloaded by name."""
    return bool(fields.get("saved_names") or fields.get("offloaded_names"))


class _Fields:
    """Fields of a `ZeroConfig` that is not built.

    A search evaluates config rules on very many of them.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
