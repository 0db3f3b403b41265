"""Bytes in closed form: model states, activations and collectives.

ZeRO (arXiv:1910.02054, section 5) counts, for P parameters over N shards in mixed precision with Adam, bytes a device of

    stage 0   16P            params 2P, grads 2P, optimizer 12P (float32 master 4P, moments 8P)
    stage 1   4P + 12P/N
    stage 2   2P + 14P/N
    stage 3   16P/N

and ZeRO-Infinity (arXiv:2104.07857, section 3) 20 bytes a parameter, because it also keeps float32 gradients. So the bytes of a
parameter follow from the precision and from the dtype in which gradients rest, never from a constant: `StateBytes`.

`program_memory` counts the same per leaf, with the specs that were chosen: leaves that do not divide, tensor parallelism and
any optimizer's state are exact. Its `argument_bytes` are what a compiled step takes as arguments.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from host_offload.tiers import TIERS
from zerojax.gather import without_axis
from zerojax.layout import Layout
from zerojax.mesh import DATA, FSDP, num_batch_shards
from zerojax.model import BLOCKS, LayeredModel, Model
from zerojax.optim import stored_spec
from zerojax.partition import local_elements
from zerojax.precision import PRECISIONS
from zerojax.stages import STAGES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes that each kind of state takes for one parameter.

    Attributes:
      params: compute-dtype parameters.
      grads: gradients between backward and update.
      master: float32 master weights; 0 where the parameters are float32.
      moments: the optimizer's state; 8 for Adam.
    """

    params: int
    grads: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes of one parameter where nothing is sharded: 16 for ZeRO, 20 for ZeRO-Infinity."""
        return self.params + self.grads + self.master + self.moments


def state_bytes(
    precision: str = "bf16", *, moments: int = 8, num_microbatches: int = 1, keeps_fp32_grads: bool = False
) -> StateBytes:
    """Return the bytes of one parameter.

    Args:
      precision: a name in `zerojax.precision.PRECISIONS`.
      moments: bytes of optimizer state for one parameter.
      num_microbatches: gradients are accumulated in float32 where there is more than one.
      keeps_fp32_grads: count float32 gradients beside those of the compute dtype, as ZeRO-Infinity does.
    """
    p = PRECISIONS[precision]
    size = jnp.dtype(p.compute_dtype).itemsize
    grads = size if num_microbatches == 1 else 4
    return StateBytes(
        params=size, grads=grads + (4 if keeps_fp32_grads else 0), master=4 if p.has_master else 0, moments=moments
    )


def model_state_bytes(num_params: int, stage: int, num_shards: int, per_param: StateBytes | None = None) -> dict[str, float]:
    """Return the bytes of model states on each device: {"params", "grads", "master", "opt_state", "total"}.

    Args:
      num_params: P.
      stage: 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      per_param: bytes of one parameter; mixed precision with Adam (16) by default.
    """
    row, per_param = STAGES[stage], per_param or state_bytes()

    def held(num_bytes: int, sharded: bool) -> float:
        return num_params * num_bytes / (num_shards if sharded else 1)

    parts = {
        "params": held(per_param.params, row.params),
        "grads": held(per_param.grads, row.grads),
        "master": held(per_param.master, row.opt_state),
        "opt_state": held(per_param.moments, row.opt_state),
    }
    return parts | {"total": sum(parts.values())}


def collective_elements(num_params: int, stage: int, num_shards: int, num_microbatches: int = 1) -> dict[str, float]:
    """Return the elements that each device sends in a step, by collective (ZeRO, section 7).

    A ring all_gather or reduce_scatter of P elements sends P (N-1)/N; an all_reduce is one of each. Gradients are reduced,
    and at stage 3 parameters gathered twice, in every microbatch. Rows 0 to 3 sum to 2P, 2P, 2P and 3P.
    """
    row, ring = STAGES[stage], num_params * (num_shards - 1) / num_shards
    if not row.opt_state:
        return {"all_reduce": 2 * ring * num_microbatches, "all_gather": 0.0, "reduce_scatter": 0.0}
    gathers = 2 * num_microbatches if row.params else 1
    return {"all_reduce": 0.0, "all_gather": gathers * ring, "reduce_scatter": num_microbatches * ring}


def transformer_params(num_layers: int, hidden: int) -> int:
    """Return the parameters of a transformer's blocks, 12 L h^2 (ZeRO-Infinity, equation 1)."""
    return 12 * num_layers * hidden**2


def transformer_activation_bytes(
    batch: int, seq: int, hidden: int, heads: int, num_layers: int, *, remat: bool, tensor: int = 1, itemsize: int = 2
) -> float:
    """Return the activation bytes that a transformer keeps from forward to backward, on each device.

    Args:
      batch: sequences on one device.
      seq: tokens of a sequence.
      hidden: h.
      heads: attention heads.
      num_layers: L.
      remat: only each layer's input is kept: b s h bytes times itemsize (ZeRO-Infinity, equation 3). Else all that backward
        needs: s b h (10 + 24/t + 5 a s / (h t)) in 16 bits (Korthikanti et al., arXiv:2205.05198, equation 2).
      tensor: t, tensor-parallel shards.
      itemsize: bytes of an activation; the second formula scales with it, its dropout masks included.
    """
    if remat:
        return float(num_layers * batch * seq * hidden * itemsize)
    each = 10 + 24 / tensor + 5 * heads * seq / (hidden * tensor)
    return num_layers * seq * batch * hidden * each * itemsize / 2


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of one step on each device.

    Attributes:
      tiers: {tier: {kind: bytes}}. Kinds "params", "master", "opt_state", "batch" and "scalars" are arguments of the step;
        "grads", "gathered" (the largest layer or leaf held whole) and "activations" (residuals between forward and
        backward) live while it runs.
      collectives: bytes that each device sends, by collective.
      num_params: P, tensor-parallel shards counted once.
    """

    tiers: Mapping[str, Mapping[str, int]]
    collectives: Mapping[str, int]
    num_params: int

    @property
    def argument_bytes(self) -> int:
        """Bytes that a compiled step takes as device arguments."""
        return sum(self.tiers["device"][kind] for kind in ("params", "master", "opt_state", "batch", "scalars"))

    @property
    def model_state_bytes(self) -> int:
        """Bytes of model states in every tier: parameters, gradients, master weights, optimizer state."""
        return sum(t.get(kind, 0) for t in self.tiers.values() for kind in ("params", "grads", "master", "opt_state"))

    def __str__(self) -> str:
        rows = [f"{self.num_params:,} parameters; bytes on each device"]
        for tier, kinds in self.tiers.items():
            rows += [f"  {tier:<12} {kind:<12} {n:>20,}" for kind, n in kinds.items()]
        rows += [f"  {'sent a step':<12} {name:<14} {n:>18,}" for name, n in self.collectives.items() if n]
        return "\n".join(rows)


def program_memory(layout: Layout, loss: Any, abstract_batch: Any, model: Model | LayeredModel) -> MemoryReport:
    """Count the bytes of a step, leaf by leaf. `loss` is the plain loss, which is traced for its residuals."""
    config, mesh = layout.config, layout.mesh
    stage, precision = STAGES[config.stage], PRECISIONS[config.precision]
    itemsize = jnp.dtype(precision.compute_dtype).itemsize
    state = layout.abstract_state
    leaves = {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(layout.abstract_params)[0]}

    def elements(sharded: bool) -> int:
        return sum(local_elements(leaf.shape, stored_spec(layout.specs[path], sharded), mesh) for path, leaf in leaves.items())

    layers = model.num_layers if isinstance(model, LayeredModel) else 1
    whole: dict[str, int] = {}
    for path, leaf in leaves.items():
        block = isinstance(model, LayeredModel) and path.startswith(f"['{BLOCKS}']")
        size = local_elements(leaf.shape, without_axis(layout.specs[path].sharded, FSDP), mesh) * itemsize
        unit = path.split("]")[0] if isinstance(model, LayeredModel) else path
        whole[unit] = whole.get(unit, 0) + (size // layers if block else size)
    kinds = {
        "params": _held(state.params),
        "master": _held(state.master),
        "opt_state": _held(state.opt_state),
        "batch": _held(abstract_batch),
        "scalars": _held((state.step, state.skipped, state.key, state.loss_scale)),
        "grads": elements(stage.opt_state) * (itemsize if config.num_microbatches == 1 else 4),
        "gathered": max(whole.values()) if stage.params and mesh.shape[FSDP] > 1 else 0,
        "activations": _residual_bytes(layout, loss, abstract_batch),
    }
    return MemoryReport(
        tiers={tier: kinds if tier == "device" else {} for tier in TIERS},
        collectives=_collectives(layout, leaves, itemsize),
        num_params=sum(math.prod(leaf.shape) for leaf in leaves.values()),
    )


def _held(tree: Any) -> int:
    """Return the bytes of one device's part of a tree of ShapeDtypeStruct with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def _collectives(layout: Layout, leaves: Mapping[str, jax.ShapeDtypeStruct], itemsize: int) -> dict[str, int]:
    """Return bytes sent by each device: the closed form over the leaves that `fsdp` splits, all_reduce for the rest."""
    mesh, config = layout.mesh, layout.config
    shards, replicas, count = mesh.shape[FSDP], mesh.shape[DATA], config.num_microbatches
    sent: dict[str, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for path, leaf in leaves.items():
        spec = layout.specs[path]
        elements = local_elements(leaf.shape, spec.base, mesh)
        split = STAGES[config.stage].opt_state and spec.sharded != spec.base
        own = collective_elements(elements, config.stage if split else 0, shards * (1 if split else replicas), count)
        for name, n in own.items():
            sent[name] += n * itemsize
        if split and replicas > 1:
            sent["all_reduce"] += 2 * elements / shards * (replicas - 1) / replicas * itemsize * count
    return {name: int(n) for name, n in sent.items()}


def _residual_bytes(layout: Layout, loss: Any, abstract_batch: Any) -> int:
    """Return the bytes that a microbatch keeps from forward to backward on each device, parameters excluded.

    The loss is traced, not run. Residuals that are arguments are not counted; the rest is split as the batch is.
    """
    config = layout.config
    count = config.num_microbatches
    micro = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]) if len(a.shape) else a.shape, a.dtype),
        abstract_batch,
    )
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), layout.abstract_state.params)

    def residuals(params: Any, batch: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch, None), params)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, micro).jaxpr
    kept: Any = {v for v in jaxpr.outvars if isinstance(v, jex.Var)} - set(jaxpr.invars)
    total = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in kept)
    return total // num_batch_shards(layout.mesh)
