"""Check a model, an optimizer, a config and a mesh against each other, and build the program."""

import dataclasses
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from zerojax.activations import SequenceParallelism, sequence_parallel, watch_attention
from zerojax.aot import is_there
from zerojax.compat import check_gpu_version
from zerojax.config import ZeroConfig, check_unlayered, require_built, resolve_activations, streams
from zerojax.models import LayeredModel, Model
from zerojax.optim import RecordUpdate, by_layer, check_ema, keep_in_bfloat16
from zerojax.pipeline import PipelineStep, check_pipeline
from zerojax.program.fingerprint import build_parts
from zerojax.program.gathering import Gather, GatheredEarly, build_gather
from zerojax.program.program import Program
from zerojax.program.step import Step
from zerojax.resident import ResidentStep
from zerojax.runtime import find_peers
from zerojax.sharding import (
    CONTEXT,
    DATA,
    EXPERT,
    TENSOR,
    Axes,
    context_size,
    list_axes,
    num_stages,
    own_mesh,
    parse_axes,
    without_mesh,
)
from zerojax.state import (
    Layout,
    StateRecords,
    build_layout,
    check_optimizer,
    tiles_by_path,
    widen_model,
)
from zerojax.streamed import StreamedStep
from zerojax.trees import Batch


@without_mesh
def build_train_step(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    config: ZeroConfig,
    mesh: Mesh,
    *,
    batch: Batch = None,
    axes: Axes | None = None,
) -> Program:
    """Build a sharded train step.

    Args:
      model: a Model or a LayeredModel; `zerojax.from_flax` makes both.
      tx: any optax transformation. Put clipping into `config.clip_norm`, where a non-finite
        gradient is caught before it.
      config: stage, tiers, precision and other settings.
      mesh: a mesh from `zerojax.make_mesh`, or any other whose axes `axes` names; devices of a
        compile-only topology will do.
      batch: an example batch or its tree of ShapeDtypeStruct. With it the loss is traced and
        checked now; without it, at the first step.
      axes: for your own mesh, the mesh axis to use as each axis of this package, such as `{"fsdp":
        "x"}`, or a tuple of several neighboring axes. Explicit axes are treated as automatic ones.
        Axes that are not named must have size 1.

    Returns:
      The program. Nothing is allocated before `program.init`; the nvme tier's folder is claimed,
      and probed for a second. On a mesh of several processes, each process waits here for the
      others, and their arguments are compared.

    Raises:
      ValueError: a combination that cannot work, with names, numbers and the remedy; or another
        process has a different model, optimizer, config or mesh.
      RuntimeError: another process left, or the devices are GPUs and jaxlib is older than 0.11.1.
      NotImplementedError: a setting that this version does not support.
      SwapError: the nvme tier's folder cannot be written to, or another program uses it.
    """
    mesh = own_mesh(mesh, axes)
    check_gpu_version(mesh.devices.flat[0].platform, runs=is_there(mesh))
    parts = assemble(model, tx, config, mesh)
    program = Program(
        model,
        parts.tx,
        parts.records,
        parts.step,
        parts.gathered_early,
        parts.sequence,
        parts.state_model,
    )
    if batch is not None:
        program.check(batch)
    peers = find_peers(mesh) if is_there(mesh) else None
    if peers is not None:
        with jax.set_mesh(mesh):
            parts_alike = build_parts(program.layout)
        program.calls = peers.program(parts_alike)
    # Last: the claim keeps other programs out of the folder, and nothing after it can fail and
    # leave it claimed.
    if program.swap is not None and is_there(mesh):
        program.swap.claim()
    return program


class Parts(NamedTuple):
    """The parts of a program, before anything is claimed or compiled.

    Attributes:
      tx: optimizer, as the step applies it.
      records: how the state is stored.
      step: equations of the step.
      gathered_early: parameters that stage 3 could not gather on use.
      sequence: what sequence parallelism did to the blocks.
      state_model: the model whose layers are the state's records: the given one, or one whose
        layers are several layers side by side (`zerojax.state.wide`).
    """

    tx: optax.GradientTransformation
    records: StateRecords
    step: Step
    gathered_early: GatheredEarly
    sequence: SequenceParallelism
    state_model: Model | LayeredModel


def assemble(
    model: Model | LayeredModel, tx: optax.GradientTransformation, config: ZeroConfig, mesh: Mesh
) -> Parts:
    """Check a model, an optimizer, a config and a mesh, and return the parts of a program.

    Nothing is allocated, compiled or claimed: `zerojax.planner` calls this for many configs.

    Args:
      model: a Model or a LayeredModel.
      tx: any optax transformation.
      config: stage, tiers, precision and other settings.
      mesh: mesh with this package's axes.

    Raises:
      ValueError: a combination that cannot work, with names, numbers and the remedy.
      NotImplementedError: a setting that this version does not support.
    """
    _check_arguments(model, config)
    mesh = own_mesh(mesh)
    check_optimizer(tx)
    # Wrapped before anything looks at the optimizer's state: layout, update and checkpoints see the
    # wrapper's state.
    if config.moments == "bfloat16":
        tx = keep_in_bfloat16(tx)
    state_model = model
    if num_stages(mesh) > 1:
        model, config, order = check_pipeline(model, config, mesh)
        state_model = widen_model(model, order)
    elif mesh.shape[TENSOR] == 1:  # nothing to split, and no reason to stream
        config = dataclasses.replace(config, partition_activations=False)
    with jax.set_mesh(mesh):
        records = StateRecords(build_layout(state_model, tx, config, mesh, by_layer))
        gathered_early = GatheredEarly()
        _check_axes(state_model, records.layout)
        _check_reductions(records.layout)
        tx = records.layout.tx  # a rule that combines elements of a leaf is applied to each layer
        check_ema(records.layout)
        sequence = SequenceParallelism()
        # The state is stored as the given model's. Only the step's computation is split
        # differently.
        step_model = watch_attention(model, mesh)
        if isinstance(step_model, LayeredModel) and config.sequence_parallel:
            saves_values = {*resolve_activations(config)} <= {"everything", "save", "selective"}
            step_model = sequence_parallel(
                step_model, mesh, sequence, config.tensor_overlap, recomputed=not saves_values
            )
        step = build_step(step_model, tx, records, build_gather(records.layout, gathered_early))
    return Parts(tx, records, step, gathered_early, sequence, state_model)


def _check_arguments(model: Model | LayeredModel, config: ZeroConfig) -> None:
    """Raise ValueError or NotImplementedError for a model and a config that cannot be built."""
    if not isinstance(model, Model | LayeredModel):
        raise ValueError(
            f"model must be a zerojax.Model or LayeredModel, got {type(model).__name__}; see "
            "zerojax.from_flax"
        )
    if not isinstance(config, ZeroConfig):
        raise ValueError(f"config must be a zerojax.ZeroConfig, got {type(config).__name__}")
    if isinstance(model, Model):
        check_unlayered(config)
    require_built(config)
    if config.device_budget_bytes is not None and (isinstance(model, Model) or not streams(config)):
        raise ValueError(
            f"device_budget_bytes={config.device_budget_bytes} bounds the records that a streamed "
            "step has in flight, but this step does not stream: leave it None, or move params, "
            "grads, opt_state or activations of a LayeredModel off the device"
        )


def _check_axes(model: Model | LayeredModel, layout: Layout) -> None:
    """Raise an error if the axes `expert` and `context` do not fit the model and the config.

    Raises:
      ValueError: no leaf of the model names `expert`.
      NotImplementedError: rings of tensor parallelism on a mesh with `context`; or experts in
        groups on a mesh with `expert`.
    """
    mesh = layout.mesh
    if mesh.shape.get(EXPERT, 1) > 1:
        for name, tiles in tiles_by_path(model, layout.abstract_whole).items():
            if tiles and EXPERT in list_axes(layout.specs[name].base):
                raise NotImplementedError(
                    f"experts in groups (expert_groups), such as {name}, do not run on a mesh with "
                    f"{EXPERT}={mesh.shape[EXPERT]}: use expert_groups=1, or put these devices on "
                    "fsdp"
                )
    if EXPERT in mesh.shape:
        named_axes = set[str]()
        for leaf in layout.all_leaves:
            named_axes.update(list_axes(leaf.spec.base))
        if EXPERT not in named_axes:
            raise ValueError(
                f"the mesh has {EXPERT}={mesh.shape[EXPERT]}, but no weight of the model is split "
                f"over {EXPERT!r}: give the experts' weights a spec such as P('expert', None, "
                "'tensor'), as zerojax.MoE does, or put these devices on fsdp"
            )
    if context_size(mesh) > 1 and layout.config.tensor_overlap:
        raise NotImplementedError(
            f"tensor_overlap=True is not supported on a mesh with {CONTEXT}={context_size(mesh)}: "
            "set tensor_overlap=False"
        )


def _check_reductions(layout: Layout) -> None:
    """Raise ValueError if gradients cannot be reduced once a step, since `data` splits a leaf."""
    if not layout.reduces_once:
        return
    names = []
    for leaf in layout.all_leaves:
        if any(DATA in parse_axes(entry) for entry in leaf.spec.base):
            names.append(leaf.name)
    if names:
        raise ValueError(
            "reduce_every='step' sums gradients over 'data' and 'fsdp', and 'data' splits "
            f"{', '.join(names)}: use reduce_every='microbatch', or split them over 'tensor'"
        )


def build_step(
    model: Model | LayeredModel,
    tx: optax.GradientTransformation,
    records: StateRecords,
    gather: Gather,
) -> Step:
    """Return the step for a config; the only place that knows all kinds of steps."""
    update = RecordUpdate(tx, records) if records.layout.updates_by_record else None
    if isinstance(model, LayeredModel) and records.layout.order is not None:
        return PipelineStep(model, tx, records, update, gather)
    if isinstance(model, LayeredModel) and streams(records.layout.config):
        return StreamedStep(model, tx, records, update, gather)
    return ResidentStep(model, tx, records, update, gather)
