"""What the user chooses: one frozen dataclass, validated once.

A field is data for the builder, not a switch: the stage is a row of `zerojax.sharding.STAGES`, the
precision a row of `zerojax.precision.PRECISIONS`, and a tier a place. What this version does not
build yet is refused here, by name.
"""

import dataclasses
import difflib
import importlib
import re
from typing import Any, Literal

from host_offload.tiers import TIERS
from zerojax.given import (
    as_flag,
    as_integer,
    as_number,
    as_path,
    as_string,
    positive_number,
    shown,
    whole_number,
)
from zerojax.precision import PRECISIONS, LossScaling
from zerojax.sharding import STAGES

Tier = Literal["device", "pinned_host", "nvme"]
Activations = Literal["everything", "save", "selective", "remat", "pinned_host", "nvme"]
_ACTIVATIONS: tuple[Activations, ...] = (
    "everything",
    "save",
    "selective",
    "remat",
    "pinned_host",
    "nvme",
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": tuple(STAGES),
    "params": TIERS,
    "grads": TIERS,
    "opt_state": TIERS,
    "precision": tuple(PRECISIONS),
    "moments": ("float32", "bfloat16"),
    "reduce_dtype": (None, "float32", "bfloat16", "float16"),
    "reduce_every": (None, "microbatch", "step"),
    "update": (None, "after_backward", "in_backward"),
    "update_on": ("device", "host"),
    "io": ("direct", "tensorstore"),
    "frozen": (None, *TIERS),
    "frozen_dtype": (None, "int8", "nf4"),
}
_FLAGS = (
    "partition_activations",
    "sequence_parallel",
    "tensor_overlap",
    "delayed_update",
    "gather_ahead",
    "cuda_graphs",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous layers of a LayeredModel that keep, offload or recompute in the same way.

    Attributes:
      num_layers: how many.
      activations: what happens to the residuals of these layers, as `ZeroConfig.activations` of all
        layers.
      saved_names: as `ZeroConfig.saved_names`, of these layers.
      offloaded_names: as `ZeroConfig.offloaded_names`, of these layers.

    Raises:
      ValueError: an unknown value, fewer layers than 1, or a name in both tuples.
    """

    num_layers: int
    _: dataclasses.KW_ONLY
    activations: Activations = "save"
    saved_names: tuple[str, ...] = ()
    offloaded_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = as_integer(self.num_layers)
        if count is None or count < 1:
            raise ValueError(
                f"num_layers={shown(self.num_layers)} of a Segment: an integer of at least 1 is needed"
            )
        object.__setattr__(self, "num_layers", count)
        activations = as_string(self.activations)
        if activations not in _ACTIVATIONS:
            choices = ", ".join(map(repr, _ACTIVATIONS))
            raise ValueError(
                f"activations={shown(self.activations)} of a Segment is unknown: choose from {choices}"
            )
        object.__setattr__(self, "activations", activations)
        _check_names(self)


_NO_LIMIT = ", or None for no limit"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a train step is partitioned, and where its bytes live.

    Attributes:
      stage: what is sharded over the mesh axis `fsdp`: 0 nothing, 1 the optimizer state, 2 and the
        gradients, 3 and the parameters.
      params: tier of the parameters. Off the device it needs a LayeredModel and stage 3.
      grads: tier of the gradients, from backward to update. With update="in_backward" they are
        never stored.
      opt_state: tier of the optimizer state and the float32 master weights.
      opt_state_device_fraction: fraction of the layers, rounded down, whose optimizer state and
        masters stay on the device while the rest are in `opt_state`'s tier. Needs a LayeredModel
        and update_on="device".
      activations: what happens to a layer's residuals between forward and backward. "everything"
        keeps all that JAX keeps, and computes nothing again. "save" keeps the layer's input and the
        results of products, look-ups, loops and kernels, and computes again what elementwise
        equations, norms and random masks made of these. "selective" also computes the inner part of
        attention again. "remat" keeps the layer's input and computes all else again. The name of a
        tier stores the layer's input there and computes all else again. `program.kept` lists what
        is kept. A tuple of `zerojax.Segment`, first layer first: contiguous layers of a
        LayeredModel, each segment in its own way.
      saved_names: values that the block marks by `jax.ad_checkpoint.checkpoint_name`, kept on the
        device besides; "#2" is the value with the number 2 in `program.kept`, of those that "save"
        keeps.
      offloaded_names: likewise, kept in pinned host memory.
      partition_activations: what a layer of a LayeredModel keeps from forward to backward, and
        `tensor` does not split already, rests split over it, in every mode and tier, and is
        gathered for backward (ZeRO-R's Pa; arXiv:1910.02054, section 6.1). Means nothing where
        tensor is 1.
      sequence_parallel: the stream x[B, T, H] of a LayeredModel rests split over `tensor` in dim 1,
        and is whole for products alone whose weights `tensor` splits (arXiv:2205.05198). Means
        nothing where tensor is 1.
      tensor_overlap: with sequence_parallel, gathers and scatters of x become rings of permutes,
        each beside a part of its product (`zerojax.activations.rings`). No GPU has timed it.
      precision: dtype of compute and of gathers. Master weights stay float32, and moments as
        `moments` says; "fp16" scales its loss.
      moments: dtype in which the optimizer's moments rest, in every tier; the update itself is
        float32. "bfloat16" rounds them stochastically and halves their bytes
        (`zerojax.optim.moments`).
      reduce_dtype: dtype in which gradients are summed across devices. None: the compute dtype.
        "float32" with compute in 16 bits: the products that make gradients return float32, and
        gradients rest so until the update; gathers stay in 16 bits.
      reduce_every: when gradients are summed across devices. None: "microbatch", each where it is
        made. "step" (LayeredModel): each device keeps whole sums of its own over microbatches, and
        they are reduced once, in float32; in a streamed step a layer's at the end of its turn.
        Equal values and 1/M of the bytes, for whole float32 gradients in memory until then.
      num_microbatches: gradient accumulation steps inside the train step; divides each device's
        batch.
      clip_norm: largest global gradient norm, exact across shards. None: no clipping. Gradients
        that the optimizer never uses, those of frozen weights, do not count.
      update: when a layer's optimizer runs. None: after_backward. "in_backward" runs it as soon as
        the layer's gradient is there; after a gradient that is not finite it skips the layers that
        are left.
      update_on: where the optimizer runs when `opt_state` is off the device.
      delayed_update: with update_on="host", the optimizer works on a step's gradients while the
        next step computes, whose parameters are therefore one update old (ZeRO-Offload, section
        5.2). Not with the nvme tier.
      prefetch_distance: layers fetched ahead of their use, by the tiers off the device. 0: none.
      gather_ahead: at stage 3 the next layer of a LayeredModel is gathered while one computes, at
        the price of one more gathered layer.
      link_groups: in how many groups the arrays of a layer's record are loaded and stored, one
        group up while another goes down, where the link to the host works in both directions at
        once. None: by a table of predicted steps; `zerojax.autotune` predicts which number is
        fastest for a model. At most as many as there are arrays.
      cuda_graphs: whether XLA puts the operations of a step that moves host memory into CUDA graphs
        where it can. By default they run on streams, where copies overlap with products. In a graph
        they run one after another: on an H200 a step took 1.64 times as long. A step that keeps
        everything on the device is compiled as XLA sees fit.
      device_budget_bytes: most bytes that records in flight, gathered parameters among them, may
        take on a device: `program.operations(batch).peak_bytes`. None: no limit.
      min_shard_bytes: parameters of fewer float32 bytes stay replicated (ZeRO's persistence
        threshold).
      swap_dir: folder of the nvme tier: a str, or an os.PathLike, which is kept as the str that it
        stands for.
      io: reader of the nvme tier.
      loss_scaling: dynamic loss scaling, read by precision="fp16" alone.
      frozen: tier of the weights that the model freezes (`Model.frozen`), which a step reads and
        never writes. None: that of the parameters. Off the device it needs a LayeredModel and stage
        3.
      frozen_dtype: dtype in which frozen floating weights rest, decoded where they are used. None:
        the compute dtype. "int8": 1.02 bytes an element, in blocks of 256; "nf4": 0.52, in blocks
        of 64. Vectors and leaves that no block divides stay in the compute dtype.

    Raises:
      ValueError: an unknown field, or a value or combination that cannot work.
    """

    stage: Literal[0, 1, 2, 3] = 3
    params: Tier = "device"
    grads: Tier = "device"
    opt_state: Tier = "device"
    opt_state_device_fraction: float = 0.0
    activations: Activations | tuple[Segment, ...] = "save"
    saved_names: tuple[str, ...] = ()
    offloaded_names: tuple[str, ...] = ()
    partition_activations: bool = False
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    moments: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reduce_every: Literal["microbatch", "step"] | None = None
    num_microbatches: int = 1
    clip_norm: float | None = None
    update: Literal["after_backward", "in_backward"] | None = None
    update_on: Literal["device", "host"] = "device"
    delayed_update: bool = False
    prefetch_distance: int = 1
    gather_ahead: bool = False
    link_groups: int | None = None
    cuda_graphs: bool = False
    device_budget_bytes: int | None = None
    min_shard_bytes: int = 0
    swap_dir: str | None = None
    io: Literal["direct", "tensorstore"] = "direct"
    loss_scaling: LossScaling = dataclasses.field(default_factory=LossScaling)
    frozen: Tier | None = None
    frozen_dtype: Literal["int8", "nf4"] | None = None

    def __new__(cls, *values: Any, **fields: Any) -> "ZeroConfig":
        # A dataclass answers an unknown keyword with a TypeError that names no alternative.
        if values:
            raise ValueError(
                f"ZeroConfig takes its fields by name, such as stage={shown(values[0])}"
            )
        field_names = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in field_names:
                near = difflib.get_close_matches(name, field_names, 1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"the fields are {', '.join(field_names)}"
                )
                raise ValueError(f"ZeroConfig has no field {name!r}: {hint}")
        return object.__new__(cls)

    @staticmethod
    def auto(
        model: Any,
        tx: Any,
        mesh: Any,
        batch: Any,
        machine: Any = None,
        *,
        axes: Any = None,
        **fixed: Any,
    ) -> "ZeroConfig":
        """Return the config of `zerojax.plan`: the fastest that fits a machine.

        Args:
          model: a Model or a LayeredModel.
          tx: an optax transformation.
          mesh: a device mesh, as for `build_train_step`.
          batch: a tree of arrays or ShapeDtypeStructs, the batch of one step.
          machine: a `zerojax.Machine`, or the name of one; None: the machine that this process runs
            on.
          axes: names of the mesh's axes, as for `build_train_step`.
          **fixed: fields of the config that stay as they are.

        Raises:
          PlanError: no config fits.
          ValueError: an argument cannot be used.
        """
        # By name, and not before it is needed: the planner stands above this module, and takes time
        # to import.
        plan = importlib.import_module("zerojax.planner").plan
        return plan(model, tx, mesh, batch, machine, fixed=fixed, axes=axes).config

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if (number := as_integer(value)) is not None:  # one of numpy among them
                value = number
                object.__setattr__(self, name, value)
            elif (text := as_string(value)) is not None:
                value = text
                object.__setattr__(self, name, value)
            # By type too: True equals 1, and 2.0 equals 2.
            if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
                raise ValueError(
                    f"{name}={shown(value)} is unknown: choose from {', '.join(map(repr, choices))}"
                )
        self._check_activations()
        self._check_numbers()
        self._check_combinations()

    def _check_activations(self) -> None:
        _check_names(self)
        chosen = self.activations
        if (text := as_string(chosen)) in _ACTIVATIONS:
            object.__setattr__(self, "activations", text)
            return
        choices = ", ".join(map(repr, _ACTIVATIONS))
        if not isinstance(chosen, tuple) or not all(isinstance(one, Segment) for one in chosen):
            raise ValueError(
                f"activations={shown(chosen)} is unknown: choose from {choices}, or a tuple of zerojax.Segment"
            )
        if not chosen:
            raise ValueError(
                f"activations=() has no segment: choose from {choices}, or give segments of all layers"
            )
        for name in ("saved_names", "offloaded_names"):
            if names := getattr(self, name):
                raise ValueError(
                    f"{name}={names!r} with {len(chosen)} segments as activations: each segment has its own; give them to "
                    f"those that are to keep them, as in zerojax.Segment({chosen[0].num_layers}, {name}={names!r})"
                )

    def _check_numbers(self) -> None:
        for name, least in (
            ("num_microbatches", 1),
            ("prefetch_distance", 0),
            ("min_shard_bytes", 0),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name, least, otherwise in (
            ("link_groups", 2, ", or None for the default"),
            ("device_budget_bytes", 1, _NO_LIMIT),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, value, least, otherwise))
        if not isinstance(self.loss_scaling, LossScaling):
            raise ValueError(
                f"loss_scaling={shown(self.loss_scaling)}: a zerojax.LossScaling is needed"
            )
        if self.swap_dir is not None:
            path = as_path(self.swap_dir)
            if path is None:
                raise ValueError(
                    f"swap_dir={shown(self.swap_dir)}: a folder's path is needed, a str or an os.PathLike of one"
                )
            object.__setattr__(self, "swap_dir", path)
        for name in _FLAGS:
            flag = as_flag(getattr(self, name))
            if flag is None:
                raise ValueError(f"{name}={shown(getattr(self, name))}: True or False is needed")
            object.__setattr__(self, name, flag)
        fraction = as_number(self.opt_state_device_fraction)
        if fraction is None or not 0 <= fraction < 1:
            raise ValueError(
                f"opt_state_device_fraction={shown(self.opt_state_device_fraction)}: a number from 0 to below 1 is needed; "
                "opt_state='device' keeps all"
            )
        object.__setattr__(self, "opt_state_device_fraction", fraction)
        if self.clip_norm is not None:
            clip_norm = positive_number("clip_norm", self.clip_norm, ", or None for no clipping")
            object.__setattr__(self, "clip_norm", clip_norm)

    def _check_combinations(self) -> None:
        if self.update == "in_backward" and self.clip_norm is not None:
            raise ValueError(
                f"update='in_backward' with clip_norm={self.clip_norm}: the global norm is known only after the backward "
                "pass; use update='after_backward', or clip_norm=None"
            )
        if self.update == "in_backward" and self.precision == "fp16":
            raise ValueError(
                "update='in_backward' with precision='fp16': an overflow must skip the whole update, and is known only after "
                "the backward pass; use precision='bf16', or update='after_backward'"
            )
        if self.delayed_update and (self.update_on != "host" or self.update == "in_backward"):
            raise ValueError(
                "delayed_update=True needs update_on='host' and update='after_backward': what is delayed is the host's update"
            )
        if self.delayed_update and self.precision == "fp32" and self.params == "device":
            raise ValueError(
                "delayed_update=True with precision='fp32' and params='device': the host has no weights of its own to update; "
                "use params='pinned_host', or precision='bf16'"
            )
        if self.opt_state_device_fraction and (
            self.opt_state == "device" or self.update_on == "host"
        ):
            raise ValueError(
                f"opt_state_device_fraction={self.opt_state_device_fraction} splits an opt_state that is off the device and "
                f"updated on it; got opt_state={self.opt_state!r}, update_on={self.update_on!r}"
            )
        if self.tensor_overlap and not self.sequence_parallel:
            raise ValueError(
                "tensor_overlap=True with sequence_parallel=False: it runs beside products what sequence parallelism gathers "
                "and scatters, which is nothing here; set sequence_parallel=True, or tensor_overlap=False"
            )
        if self.gather_ahead and self.stage != 3:
            raise ValueError(
                f"gather_ahead=True needs stage=3, got stage={self.stage}: below it parameters are whole"
            )
        if self.params != "device" and self.stage != 3:
            raise ValueError(
                f"params={self.params!r} needs stage=3, got stage={self.stage}: below it parameters are whole"
            )
        if (tier := frozen_tier(self)) != "device" and self.stage != 3:
            raise ValueError(
                f"frozen={tier!r} needs stage=3, got stage={self.stage}: below it parameters are whole"
            )
        if self.update_on == "host" and self.opt_state == "device":
            raise ValueError(
                "update_on='host' needs opt_state='pinned_host' or 'nvme', got opt_state='device'"
            )
        if uses_disk(self) and self.swap_dir is None:
            raise ValueError("the nvme tier needs a folder: set swap_dir")
        if self.reduce_every == "step" and self.reduce_dtype not in (None, "float32"):
            raise ValueError(
                f"reduce_every='step' with reduce_dtype={self.reduce_dtype!r}: what a device sums over microbatches is float32 "
                "and is reduced as such; use reduce_dtype='float32' or None"
            )
        compute = PRECISIONS[self.precision].compute_dtype
        if self.reduce_dtype is not None and self.reduce_dtype not in (compute, "float32"):
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} with precision={self.precision!r}: gradients are made in {compute}; "
                f"choose {' or '.join(sorted({repr(compute), repr('float32')}))}"
            )


def _check_names(chosen: Segment | ZeroConfig) -> None:
    """Raise ValueError unless the names of values to keep are tuples of names, each in one of them."""
    for name in ("saved_names", "offloaded_names"):
        value = getattr(chosen, name)
        if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
            raise ValueError(
                f"{name}={shown(value)}: a tuple of names is needed, such as ('mlp_hidden',)"
            )
    if both := sorted(set(chosen.saved_names) & set(chosen.offloaded_names)):
        raise ValueError(
            f"saved_names and offloaded_names both hold {both}: a value is kept in one place"
        )


def activations_of(config: ZeroConfig) -> tuple[Activations, ...]:
    """Return what happens to the residuals of each segment, or of all layers."""
    chosen = config.activations
    return (
        tuple(segment.activations for segment in chosen) if isinstance(chosen, tuple) else (chosen,)
    )


def frozen_tier(config: ZeroConfig) -> Tier:
    """Return the tier of frozen weights."""
    return config.params if config.frozen is None else config.frozen


def reduces_in_float32(config: ZeroConfig) -> bool:
    """Tell whether gradients are made and reduced in float32 while compute is in 16 bits."""
    in_float32 = config.reduce_dtype == "float32" or config.reduce_every == "step"
    return in_float32 and PRECISIONS[config.precision].compute_dtype != "float32"


def reduces_once(config: ZeroConfig) -> bool:
    """Tell whether several microbatches are summed on each device before gradients are reduced."""
    return config.reduce_every == "step" and config.num_microbatches > 1


def grads_in_float32(config: ZeroConfig) -> bool:
    """Tell whether gradients rest in float32: they are reduced in it, or summed in it over
    microbatches.
    """
    return config.num_microbatches > 1 or reduces_in_float32(config)


def streams(config: ZeroConfig) -> bool:
    """Tell whether a LayeredModel runs as the streamed step: explicit loops over layers, each
    fetched and released.
    """
    off_device = {config.params, config.grads, config.opt_state, frozen_tier(config)} != {"device"}
    # Autodiff of the whole loss can save or recompute by itself. A choice of values, or a tier,
    # needs the explicit loops.
    keeps_by_choice = (
        config.activations not in ("everything", "save", "remat")
        or config.saved_names
        or config.offloaded_names
        or config.partition_activations
    )
    return bool(
        off_device or keeps_by_choice or config.update == "in_backward" or config.gather_ahead
    )


def moves_host_memory(config: ZeroConfig) -> bool:
    """Tell whether a step moves anything between the device and host memory, on its way to a disk
    included.
    """
    kept = config.activations if isinstance(config.activations, tuple) else (config,)
    tiers = {
        config.params,
        config.grads,
        config.opt_state,
        frozen_tier(config),
        *activations_of(config),
    }
    return not tiers.isdisjoint(("pinned_host", "nvme")) or any(one.offloaded_names for one in kept)


def uses_disk(config: ZeroConfig) -> bool:
    """Tell whether anything rests on disk."""
    return "nvme" in (
        config.params,
        config.grads,
        config.opt_state,
        *activations_of(config),
        config.frozen,
    )


def calls_host(config: ZeroConfig) -> bool:
    """Return whether a compiled step calls back into Python, to swap with a disk or to update on
    the host.
    """
    return uses_disk(config) or config.update_on == "host"


def updates_by_parts(config: ZeroConfig) -> bool:
    """Tell whether the optimizer is applied to a layer or a leaf at a time, and so must be
    elementwise.
    """
    return {config.params, config.grads, config.opt_state} != {
        "device"
    } or config.update == "in_backward"


def require_built(config: ZeroConfig) -> None:
    """Raise NotImplementedError, by name, for a setting that is valid and that this version does
    not build.
    """
    if config.delayed_update and uses_disk(config):
        tiers = [
            (name, getattr(config, name)) for name in ("params", "grads", "opt_state", "frozen")
        ]
        tiers += [("activations", tier) for tier in activations_of(config)]
        name = next(name for name, tier in tiers if tier == "nvme")
        raise NotImplementedError(
            f"delayed_update=True is not built in this version with {name}='nvme': use delayed_update=False, or 'pinned_host'"
        )
    kept = config.activations if isinstance(config.activations, tuple) else (config,)
    names = [
        name
        for one in kept
        for name in (*one.saved_names, *one.offloaded_names)
        if number_of(name) is not None
    ]
    everything = next(
        (one for one in kept if one.activations == "everything" and one.offloaded_names), None
    )
    if everything is not None and (
        numbers := [n for n in everything.offloaded_names if number_of(n) is not None]
    ):
        raise NotImplementedError(
            f"activations='everything' is not built in this version with offloaded_names={numbers!r}: the values that it keeps "
            "have no numbers; mark them by jax.ad_checkpoint.checkpoint_name, or use activations='save'"
        )
    if config.tensor_overlap and names:
        raise NotImplementedError(
            f"tensor_overlap=True is not built in this version with values named by number, {', '.join(map(repr, names))}: "
            "what rings keep depends on the mode; mark the values by jax.ad_checkpoint.checkpoint_name, or leave tensor_overlap"
        )


def number_of(name: str) -> int | None:
    """Return the number of a value that is named by it, "#2", or None."""
    return int(name[1:]) if re.fullmatch(r"#[0-9]+", name) else None


def whole_layers(config: ZeroConfig) -> str | None:
    """Return the setting with which a streamed step moves whole layers, tiles included, or None."""
    if config.stage != 3:
        return f"stage={config.stage}"
    for name, tiled in (
        ("update_on", "device"),
        ("gather_ahead", False),
        ("opt_state_device_fraction", 0),
    ):
        if (value := getattr(config, name)) != tiled:
            return f"{name}={value!r}"
    return None


def reason(config: ZeroConfig) -> str:
    """Return the setting that makes the optimizer run by parts."""
    for name in ("opt_state", "params", "grads"):
        if (tier := getattr(config, name)) != "device":
            return f"{name}={tier!r}"
    return f"update={config.update!r}"


def check_unlayered(config: ZeroConfig) -> None:
    """Raise ValueError for a setting that needs the layers of a LayeredModel."""
    needs = {
        "params": ("device",),
        "grads": ("device",),
        "activations": ("everything", "save", "remat"),
        "update": (None, "after_backward"),
        "gather_ahead": (False,),
        "partition_activations": (False,),
        "sequence_parallel": (False,),
        "reduce_every": (None, "microbatch"),
        "delayed_update": (False,),
        "saved_names": ((),),
        "offloaded_names": ((),),
        "opt_state_device_fraction": (0,),
        "frozen": (None, "device"),
    }
    for name, without in needs.items():
        if (value := getattr(config, name)) not in without:
            raise ValueError(
                f"{name}={value!r} works layer by layer, and the layers of a Model are not known: use {name}={without[0]!r}, "
                "or give a LayeredModel (zerojax.from_flax(embed=..., block=..., head=..., num_layers=...))"
            )
