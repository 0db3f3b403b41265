"""The user's choices: one frozen dataclass, validated once.

Each field is data for the builder, not a switch: a stage is a row of `zerojax.sharding.STAGES`, a
precision is a row of `zerojax.precision.PRECISIONS`, and a tier is a place. `require_built` rejects
valid combinations that are not supported.
"""

import dataclasses
import difflib
import importlib
import re
from typing import Any, Literal

from host_offload.tiers import TIERS
from zerojax.precision import PRECISIONS, LossScaling
from zerojax.sharding import STAGES
from zerojax.trees import Batch
from zerojax.user_values import (
    as_flag,
    as_integer,
    as_number,
    as_path,
    as_string,
    positive_number,
    shown,
    whole_number,
)

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
    "grads_dtype": (None, "float32", "bfloat16"),
    "reduce_dtype": (None, "float32", "bfloat16", "float16"),
    "reduce_every": (None, "microbatch", "step"),
    "update": (None, "after_backward", "in_backward", "in_forward"),
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
      num_layers: number of layers in the segment.
      activations: what happens to the residuals of these layers, as in `ZeroConfig.activations`.
      saved_names: values of these layers to keep on the device, as in `ZeroConfig.saved_names`.
      offloaded_names: values of these layers to keep in pinned host memory, as in
        `ZeroConfig.offloaded_names`.

    Raises:
      ValueError: unknown value, num_layers below 1, or a name in both tuples.
    """

    num_layers: int
    _: dataclasses.KW_ONLY
    activations: Activations = "save"
    saved_names: tuple[str, ...] = ()
    offloaded_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields and convert them to plain Python values."""
        count = as_integer(self.num_layers)
        if count is None or count < 1:
            raise ValueError(
                f"num_layers={shown(self.num_layers)} of a Segment: an integer of at least 1 "
                "is needed"
            )
        object.__setattr__(self, "num_layers", count)
        activations = as_string(self.activations)
        if activations not in _ACTIVATIONS:
            choices = ", ".join(map(repr, _ACTIVATIONS))
            raise ValueError(
                f"activations={shown(self.activations)} of a Segment is unknown: choose from "
                f"{choices}"
            )
        object.__setattr__(self, "activations", activations)
        _check_names(self)


_NO_LIMIT = ", or None for no limit"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How a train step is partitioned, and where its bytes live.

    Attributes:
      stage: what is sharded over the mesh axis `fsdp`. 0: nothing. 1: the optimizer state. 2: the
        gradients too. 3: the parameters too.
      params: tier of the parameters. Tiers off the device need a LayeredModel and stage 3.
      grads: tier of the gradients between backward and update. With update="in_backward" gradients
        are never stored. With update_on="host" and an update in the next step ("in_forward" or
        `delayed_update`), they wait in host memory.
      opt_state: tier of the optimizer state and the float32 master weights.
      opt_state_device_fraction: fraction of the layers, rounded down, whose optimizer state and
        masters stay on the device; the remaining layers use the tier in `opt_state`. On a mesh with
        `pipe`, it is a fraction of the layers of each stage. Needs a LayeredModel and
        update_on="device".
      activations: what happens to a layer's residuals between forward and backward. "everything"
        keeps all residuals that JAX keeps and recomputes nothing. "save" keeps the layer's input
        and the results of products, look-ups, loops and kernels, and recomputes elementwise
        operations, norms and random masks. "selective" also recomputes the inner part of attention.
        "remat" keeps the layer's input and recomputes everything else. A tier's name ("pinned_host"
        or "nvme") stores the layer's input in that tier and recomputes everything else.
        `program.kept` lists the saved activations. A tuple of `zerojax.Segment` gives each group of
        contiguous layers of a LayeredModel, first layer first, its own choice.
      saved_names: additional values to keep on the device, named in the block by `checkpoint_name`
        of `jax.ad_checkpoint`. "#2" is value number 2 in `program.kept`, counted among the values
        that "save" keeps.
      offloaded_names: additional values to keep in pinned host memory, named as in `saved_names`.
      partition_activations: split a LayeredModel's saved activations over the mesh axis `tensor`,
        unless `tensor` splits them already, and gather them for backward. Applies to every mode and
        tier (ZeRO-R's Pa; arXiv:1910.02054, section 6.1). Has no effect if `tensor` has size 1.
      sequence_parallel: split the stream x[B, T, H] of a LayeredModel over `tensor` in dim 1, and
        gather it only for products whose weights `tensor` splits (arXiv:2205.05198). Has no effect
        if `tensor` has size 1.
      tensor_overlap: with sequence_parallel, replace gathers and scatters of x by rings of
        permutes, each overlapped with a part of its product (`zerojax.activations.rings`). Not yet
        timed on a GPU.
      precision: dtype of compute and of gathers. Master weights stay float32, and `moments` sets
        the dtype of the moments. "fp16" scales the loss.
      moments: dtype in which the optimizer's moments are stored, in every tier; the update itself
        runs in float32. "bfloat16" rounds the moments stochastically and halves their bytes
        (`zerojax.optim.moments`).
      grads_dtype: dtype in which the gradients of a streamed step are stored between backward and
        update, in every tier. None: float32 if they are summed over several microbatches or reduced
        in float32, else the compute dtype. "bfloat16" halves the bytes of float32 gradients: sums,
        norm and finite check stay as they are, then each sum is rounded once, to the nearest, and
        the update widens it again. fp16 refuses it: its gradients have 11 significant bits, and
        bfloat16 keeps 8. "float32" stores 16-bit gradients in float32, which changes no number.
      reduce_dtype: dtype in which gradients are summed across devices. None: the compute dtype.
        With 16-bit compute, "float32" makes the products that compute gradients return float32, and
        gradients stay float32 until the update; gathers stay in 16 bits.
      reduce_every: when gradients are summed across devices. "microbatch": once per microbatch,
        where the gradient is computed. None: "microbatch", or in a pipeline at stages 0 and 1
        "step", if gradients are summed in float32. "step" (LayeredModel only): each device
        accumulates full gradients over its microbatches, and they are reduced once, in float32; a
        streamed step reduces each layer's gradients at the end of the layer's tick. "step" gives
        equal values and sends 1/num_microbatches of the bytes, but full float32 gradients stay in
        memory until the reduction.
      num_microbatches: number of gradient accumulation steps inside the train step; must divide
        each device's batch.
      pipe_chunks: number of chunks of layers that each pipeline stage holds (interleaved schedule;
        arXiv:2104.04473). With v chunks the stages idle for 1 / v of the time that they idle with
        one, send activations v times as often, and keep more of them. With more than one,
        `num_microbatches` must divide by the stages. Has no effect without the mesh axis `pipe`.
      clip_norm: largest global gradient norm, computed exactly across shards. None: no clipping.
        Gradients that the optimizer never uses (frozen weights) do not count.
      update: when a layer's optimizer runs. None: "after_backward". "in_backward" updates each
        layer as soon as its gradient is computed; after a non-finite gradient it skips the
        remaining layers. "in_forward" (LayeredModel only) updates each layer in the next step's
        forward, just before the layer computes: it is as exact as "after_backward", with clipping
        and loss scaling, and the update's transfers overlap with forward's products. Between steps
        the state then holds the gradients; `program.settle` applies them.
      update_on: where the optimizer runs if `opt_state` is off the device.
      delayed_update: with update_on="host", the host updates with one step's gradients while the
        device computes the next step, whose parameters are therefore one update old (ZeRO-Offload,
        section 5.2). Not supported with the nvme tier.
      prefetch_distance: number of layers fetched ahead of use from tiers off the device. 0: no
        prefetch.
      gather_ahead: at stage 3, gather the next layer of a LayeredModel while the current layer
        computes. Costs memory for one more gathered layer.
      link_groups: number of groups into which the arrays of a layer's record are split for
        transfer: one group is loaded while another is stored, if the host link works in both
        directions at the same time. At most the number of arrays. None: taken from a table of
        predicted steps; `zerojax.autotune` predicts the fastest number for a model.
      cuda_graphs: let XLA put the operations of a step that moves host memory into CUDA graphs
        where it can. By default they run on streams, where copies overlap with products. In a graph
        they run one after another: on an H200 a step took 1.64 times as long. A step that keeps
        everything on the device always uses XLA's default.
      device_budget_bytes: most bytes per device for records in flight, including gathered
        parameters: `peak_bytes` of `program.operations(batch)`. None: no limit.
      min_shard_bytes: size in float32 bytes below which a parameter stays replicated (ZeRO's
        persistence threshold).
      swap_dir: folder of the nvme tier: a str or an os.PathLike, stored as a str.
      io: disk reader of the nvme tier.
      loss_scaling: settings of dynamic loss scaling; only precision="fp16" uses them.
      frozen: tier of the weights that the model freezes (`Model.frozen`), which a step reads and
        never writes. None: the tier of the parameters. Tiers off the device need a LayeredModel and
        stage 3.
      frozen_dtype: dtype in which frozen floating-point weights are stored; they are decoded where
        they are used. None: the compute dtype. "int8": 1.02 bytes per element, in blocks of 256.
        "nf4": 0.52 bytes per element, in blocks of 64. Vectors, and leaves whose size is not a
        multiple of the block, stay in the compute dtype.

    Raises:
      ValueError: unknown field, or a value or combination that cannot work.
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
    grads_dtype: Literal["float32", "bfloat16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reduce_every: Literal["microbatch", "step"] | None = None
    num_microbatches: int = 1
    pipe_chunks: int = 1
    clip_norm: float | None = None
    update: Literal["after_backward", "in_backward", "in_forward"] | None = None
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
        """Return an instance; reject positional values and unknown fields by name.

        Args:
          *values: not accepted: every field is given by name.
          **fields: fields of the config.

        Raises:
          ValueError: a value has no name, or there is no field of a name.
        """
        # A dataclass raises a TypeError for an unknown keyword, which suggests no alternative.
        if values:
            raise ValueError(
                f"ZeroConfig takes its fields by name, such as stage={shown(values[0])}"
            )
        field_names = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name in field_names:
                continue
            similar = difflib.get_close_matches(name, field_names, 1)
            if similar:
                hint = f"did you mean {similar[0]!r}?"
            else:
                hint = f"the fields are {', '.join(field_names)}"
            raise ValueError(f"ZeroConfig has no field {name!r}: {hint}")
        return object.__new__(cls)

    @staticmethod
    def auto(
        model: Any,
        tx: Any,
        mesh: Any,
        batch: Batch,
        machine: Any = None,
        *,
        axes: Any = None,
        **fixed: Any,
    ) -> "ZeroConfig":
        """Return the fastest config that fits a machine, as chosen by `zerojax.plan`.

        Args:
          model: a Model or a LayeredModel.
          tx: an optax transformation.
          mesh: a device mesh, as for `build_train_step`.
          batch: a tree of arrays or ShapeDtypeStructs with the shapes of one step's batch.
          machine: a `zerojax.Machine` or a machine's name. None: the machine that runs this
            process.
          axes: names of the mesh's axes, as for `build_train_step`.
          **fixed: fields of the config that the planner must not change.

        Raises:
          PlanError: no config fits.
          ValueError: an argument is invalid.
        """
        # Imported here because the planner imports this module, and takes time to import.
        plan = importlib.import_module("zerojax.planner").plan
        return plan(model, tx, mesh, batch, machine, fixed=fixed, axes=axes).config

    def __post_init__(self) -> None:
        """Validate the fields and convert them to plain Python values."""
        self._check_choices()
        self._check_activations()
        self._check_integers()
        self._check_values()
        self._check_update()
        self._check_tiers()
        self._check_reduction()
        self._check_grads_dtype()

    def _check_choices(self) -> None:
        """Check the fields that have a fixed set of values."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            number = as_integer(value)  # numpy integers too
            text = as_string(value)
            if number is not None:
                value = number
            elif text is not None:
                value = text
            object.__setattr__(self, name, value)
            # Compare types too: True equals 1, and 2.0 equals 2.
            if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
                raise ValueError(
                    f"{name}={shown(value)} is unknown: choose from {', '.join(map(repr, choices))}"
                )

    def _check_activations(self) -> None:
        """Check `activations`, and the names of values that layers keep."""
        _check_names(self)
        activations = self.activations
        mode = as_string(activations)
        if mode in _ACTIVATIONS:
            object.__setattr__(self, "activations", mode)
            return
        choices = ", ".join(map(repr, _ACTIVATIONS))
        if not isinstance(activations, tuple) or not all(
            isinstance(segment, Segment) for segment in activations
        ):
            raise ValueError(
                f"activations={shown(activations)} is unknown: choose from {choices}, or a tuple "
                "of zerojax.Segment"
            )
        if not activations:
            raise ValueError(
                f"activations=() has no segment: choose from {choices}, or give segments for "
                "all layers"
            )
        for name in ("saved_names", "offloaded_names"):
            names = getattr(self, name)
            if names:
                raise ValueError(
                    f"{name}={names!r} with {len(activations)} segments as activations: each "
                    "segment has its own; set them on the segments that should keep the values, "
                    f"as in zerojax.Segment({activations[0].num_layers}, {name}={names!r})"
                )

    def _check_integers(self) -> None:
        """Check the fields that are whole numbers."""
        for name, least in (
            ("num_microbatches", 1),
            ("pipe_chunks", 1),
            ("prefetch_distance", 0),
            ("min_shard_bytes", 0),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name, least, otherwise in (
            ("link_groups", 2, ", or None for the default"),
            ("device_budget_bytes", 1, _NO_LIMIT),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least, otherwise))

    def _check_values(self) -> None:
        """Check the remaining fields one by one."""
        if not isinstance(self.loss_scaling, LossScaling):
            raise ValueError(
                f"loss_scaling={shown(self.loss_scaling)}: a zerojax.LossScaling is needed"
            )
        if self.swap_dir is not None:
            path = as_path(self.swap_dir)
            if path is None:
                raise ValueError(
                    f"swap_dir={shown(self.swap_dir)}: a folder's path is needed, a str or an "
                    "os.PathLike of one"
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
                f"opt_state_device_fraction={shown(self.opt_state_device_fraction)}: a number "
                "from 0 to below 1 is needed; opt_state='device' keeps all state on the device"
            )
        object.__setattr__(self, "opt_state_device_fraction", fraction)
        if self.clip_norm is not None:
            clip_norm = positive_number("clip_norm", self.clip_norm, ", or None for no clipping")
            object.__setattr__(self, "clip_norm", clip_norm)

    def _check_update(self) -> None:
        """Check that the settings of the update fit each other."""
        if self.update == "in_backward" and self.clip_norm is not None:
            raise ValueError(
                f"update='in_backward' with clip_norm={self.clip_norm}: the global norm is known "
                "only after the backward pass; use update='after_backward', or clip_norm=None"
            )
        if self.update == "in_backward" and self.precision == "fp16":
            raise ValueError(
                "update='in_backward' with precision='fp16': an overflow must skip the whole "
                "update, and is known only after the backward pass; use precision='bf16', or "
                "update='after_backward'"
            )
        in_a_pass = self.update in ("in_backward", "in_forward")
        if self.delayed_update and (self.update_on != "host" or in_a_pass):
            raise ValueError(
                "delayed_update=True needs update_on='host' and update='after_backward': it "
                "delays the host's update"
            )
        if self.delayed_update and self.precision == "fp32" and self.params == "device":
            raise ValueError(
                "delayed_update=True with precision='fp32' and params='device': the host has no "
                "weights of its own to update; use params='pinned_host', or precision='bf16'"
            )
        if self.opt_state_device_fraction and (
            self.opt_state == "device" or self.update_on == "host"
        ):
            raise ValueError(
                f"opt_state_device_fraction={self.opt_state_device_fraction} splits an opt_state "
                f"that is off the device and updated on it; got opt_state={self.opt_state!r}, "
                f"update_on={self.update_on!r}"
            )

    def _check_tiers(self) -> None:
        """Check that the stage and the other settings allow the tiers and the overlap."""
        if self.tensor_overlap and not self.sequence_parallel:
            raise ValueError(
                "tensor_overlap=True with sequence_parallel=False: there are no gathers and "
                "scatters of sequence parallelism to overlap; set sequence_parallel=True, or "
                "tensor_overlap=False"
            )
        if self.gather_ahead and self.stage != 3:
            raise ValueError(
                f"gather_ahead=True needs stage=3, got stage={self.stage}: below stage 3 "
                "parameters are not sharded"
            )
        if self.params != "device" and self.stage != 3:
            raise ValueError(
                f"params={self.params!r} needs stage=3, got stage={self.stage}: below stage 3 "
                "parameters are not sharded"
            )
        tier = frozen_tier(self)
        if tier != "device" and self.stage != 3:
            raise ValueError(
                f"frozen={tier!r} needs stage=3, got stage={self.stage}: below stage 3 "
                "parameters are not sharded"
            )
        if self.update_on == "host" and self.opt_state == "device":
            raise ValueError(
                "update_on='host' needs opt_state='pinned_host' or 'nvme', got opt_state='device'"
            )
        if uses_disk(self) and self.swap_dir is None:
            raise ValueError("the nvme tier needs a folder: set swap_dir")

    def _check_reduction(self) -> None:
        """Check that gradients can be summed in `reduce_dtype`."""
        if self.reduce_every == "step" and self.reduce_dtype not in (None, "float32"):
            raise ValueError(
                f"reduce_every='step' with reduce_dtype={self.reduce_dtype!r}: gradients are "
                "summed over microbatches in float32 and reduced in float32; use "
                "reduce_dtype='float32' or None"
            )
        compute = PRECISIONS[self.precision].compute_dtype
        if self.reduce_dtype is not None and self.reduce_dtype not in (compute, "float32"):
            choices = " or ".join(sorted({repr(compute), repr("float32")}))
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} with precision={self.precision!r}: gradients "
                f"are computed in {compute}; choose {choices}"
            )

    def _check_grads_dtype(self) -> None:
        """Check that the step stores gradients, and may store them in `grads_dtype`."""
        if self.grads_dtype is None:
            return
        given = f"grads_dtype={self.grads_dtype!r}"
        if self.update == "in_backward":
            raise ValueError(
                f"{given} with update='in_backward': each layer is updated as soon as its gradient "
                "is computed, and gradients are never stored; use grads_dtype=None, or "
                "update='in_forward'"
            )
        if self.grads_dtype == "bfloat16" and self.precision == "fp16":
            raise ValueError(
                f"{given} with precision='fp16': its gradients have 11 significant bits, and "
                "bfloat16 keeps 8; use grads_dtype=None, or precision='bf16'"
            )
        if not streams(self):
            raise ValueError(
                f"{given} needs a streamed step: a resident step does not store its gradients "
                "between backward and update; use grads_dtype=None, or move params, grads, "
                "opt_state or activations of a LayeredModel off the device"
            )


def _check_names(layers: Segment | ZeroConfig) -> None:
    """Raise ValueError unless both fields are tuples of names, and no name is in both."""
    for name in ("saved_names", "offloaded_names"):
        value = getattr(layers, name)
        if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
            raise ValueError(
                f"{name}={shown(value)}: a tuple of names is needed, such as ('mlp_hidden',)"
            )
    both = sorted(set(layers.saved_names) & set(layers.offloaded_names))
    if both:
        raise ValueError(
            f"saved_names and offloaded_names both hold {both}: a value can be kept in one "
            "place only"
        )


def resolve_activations(config: ZeroConfig) -> tuple[Activations, ...]:
    """Return what happens to the residuals: one entry per segment, or one entry for all layers."""
    if isinstance(config.activations, tuple):
        return tuple(segment.activations for segment in config.activations)
    return (config.activations,)


def _segments(config: ZeroConfig) -> tuple[Segment | ZeroConfig, ...]:
    """Return what holds the names of kept values: the segments, or the config itself."""
    return config.activations if isinstance(config.activations, tuple) else (config,)


def frozen_tier(config: ZeroConfig) -> Tier:
    """Return the tier of frozen weights."""
    return config.params if config.frozen is None else config.frozen


def reduces_in_float32(config: ZeroConfig) -> bool:
    """Return whether gradients are computed and reduced in float32 while compute is in 16 bits."""
    in_float32 = config.reduce_dtype == "float32" or config.reduce_every == "step"
    return in_float32 and PRECISIONS[config.precision].compute_dtype != "float32"


def reduces_once(config: ZeroConfig) -> bool:
    """Return whether each device sums several microbatches before gradients are reduced."""
    return config.reduce_every == "step" and config.num_microbatches > 1


def sums_in_float32(config: ZeroConfig) -> bool:
    """Return whether gradients are summed in float32 with any compute dtype.

    They are if they are reduced in float32, or summed over several microbatches.
    """
    return config.num_microbatches > 1 or reduces_in_float32(config)


def stored_grads_dtype(config: ZeroConfig) -> str:
    """Return the dtype in which gradients are stored between backward and update."""
    if config.grads_dtype is not None:
        return config.grads_dtype
    return "float32" if sums_in_float32(config) else PRECISIONS[config.precision].compute_dtype


def streams(config: ZeroConfig) -> bool:
    """Return whether a LayeredModel runs as the streamed step.

    The streamed step loops explicitly over the layers, and fetches and releases each of them.
    """
    off_device = {config.params, config.grads, config.opt_state, frozen_tier(config)} != {"device"}
    # Autodiff of the full loss can save or recompute without explicit loops. Choosing single
    # values, or a tier, needs them.
    keeps_by_choice = (
        config.activations not in ("everything", "save", "remat")
        or bool(config.saved_names)
        or bool(config.offloaded_names)
        or config.partition_activations
    )
    updates_in_a_pass = config.update in ("in_backward", "in_forward")
    return off_device or keeps_by_choice or updates_in_a_pass or config.gather_ahead


def moves_host_memory(config: ZeroConfig) -> bool:
    """Return whether a step moves data between device and host memory, for the disk tier too."""
    tiers = {
        config.params,
        config.grads,
        config.opt_state,
        frozen_tier(config),
        *resolve_activations(config),
    }
    if not tiers.isdisjoint(("pinned_host", "nvme")):
        return True
    return any(segment.offloaded_names for segment in _segments(config))


def uses_disk(config: ZeroConfig) -> bool:
    """Return whether any records are stored on disk."""
    return "nvme" in (
        config.params,
        config.grads,
        config.opt_state,
        *resolve_activations(config),
        config.frozen,
    )


def calls_host(config: ZeroConfig) -> bool:
    """Return whether a compiled step calls back into Python, for disk access or host updates."""
    return uses_disk(config) or config.update_on == "host"


def updates_by_parts(config: ZeroConfig) -> bool:
    """Return whether the optimizer runs on one layer or leaf at a time, so must be elementwise."""
    off_device = {config.params, config.grads, config.opt_state} != {"device"}
    return off_device or config.update in ("in_backward", "in_forward")


def require_built(config: ZeroConfig) -> None:
    """Raise NotImplementedError for a valid combination of settings that is not supported.

    The message names the settings.
    """
    if config.delayed_update and uses_disk(config):
        tiers = [
            (name, getattr(config, name)) for name in ("params", "grads", "opt_state", "frozen")
        ]
        tiers += [("activations", tier) for tier in resolve_activations(config)]
        name = next(name for name, tier in tiers if tier == "nvme")
        raise NotImplementedError(
            f"delayed_update=True is not supported with {name}='nvme': use "
            "delayed_update=False, or 'pinned_host'"
        )
    if config.update == "in_forward" and config.update_on == "host":
        _require_built_on_host(config)
    numbers = []
    for segment in _segments(config):
        offloaded = _numbered(segment.offloaded_names)
        if segment.activations == "everything" and offloaded:
            raise NotImplementedError(
                f"activations='everything' is not supported with offloaded_names={offloaded!r}: "
                "the values that it keeps have no numbers; name them by "
                "jax.ad_checkpoint.checkpoint_name, or use activations='save'"
            )
        numbers += _numbered(segment.saved_names) + offloaded
    if config.tensor_overlap and numbers:
        raise NotImplementedError(
            "tensor_overlap=True is not supported with values named by number, "
            f"{', '.join(map(repr, numbers))}: the values that rings keep depend on the mode; name "
            "the values by jax.ad_checkpoint.checkpoint_name, or set tensor_overlap=False"
        )


def _require_built_on_host(config: ZeroConfig) -> None:
    """Raise NotImplementedError if the host cannot update in forward."""
    unsupported = "update='in_forward' is not supported with update_on='host'"
    for name in ("params", "grads", "opt_state", "frozen"):
        if getattr(config, name) == "nvme":
            raise NotImplementedError(
                f"{unsupported} and {name}='nvme': use 'pinned_host', or update='after_backward'"
            )
    if config.precision == "fp32" and config.params == "device":
        raise NotImplementedError(
            f"{unsupported}, precision='fp32' and params='device': the host has no weights of its "
            "own to update; use params='pinned_host', or precision='bf16', or "
            "update='after_backward'"
        )


def _numbered(names: tuple[str, ...]) -> list[str]:
    """Return the names that are numbers of values, such as "#2"."""
    return [name for name in names if parse_name_number(name) is not None]


def parse_name_number(name: str) -> int | None:
    """Return the number in a value's name such as "#2", or None for any other name."""
    return int(name[1:]) if re.fullmatch(r"#[0-9]+", name) else None


def untiled_setting(config: ZeroConfig) -> str | None:
    """Return the setting that makes a streamed step move full layers, including tiles, or None."""
    if config.stage != 3:
        return f"stage={config.stage}"
    for name, tiled in (
        ("update_on", "device"),
        ("gather_ahead", False),
        ("opt_state_device_fraction", 0),
    ):
        value = getattr(config, name)
        if value != tiled:
            return f"{name}={value!r}"
    return None


def piecewise_update_setting(config: ZeroConfig) -> str:
    """Return the setting that makes the optimizer run on one layer or leaf at a time."""
    for name in ("opt_state", "params", "grads"):
        tier = getattr(config, name)
        if tier != "device":
            return f"{name}={tier!r}"
    return f"update={config.update!r}"


def check_unlayered(config: ZeroConfig) -> None:
    """Raise ValueError for a setting that needs the layers of a LayeredModel."""
    unlayered = {
        "params": ("device",),
        "grads": ("device",),
        "activations": ("everything", "save", "remat"),
        "update": (None, "after_backward"),
        "gather_ahead": (False,),
        "partition_activations": (False,),
        "sequence_parallel": (False,),
        "reduce_every": (None, "microbatch"),
        "delayed_update": (False,),
        "grads_dtype": (None,),
        "saved_names": ((),),
        "offloaded_names": ((),),
        "opt_state_device_fraction": (0,),
        "frozen": (None, "device"),
    }
    for name, choices in unlayered.items():
        value = getattr(config, name)
        if value not in choices:
            raise ValueError(
                f"{name}={value!r} works layer by layer, and the layers of a Model are not known: "
                f"use {name}={choices[0]!r}, or give a LayeredModel (zerojax.from_flax(embed=..., "
                "block=..., head=..., num_layers=...))"
            )
