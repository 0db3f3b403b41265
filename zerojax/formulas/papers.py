"""Equations of the ZeRO papers that plans use, in addition to those in `zerojax.formulas.memory`.

ZeRO (arXiv:1910.02054, table 2): a device with M bytes of memory holds at most M / b parameters,
where b, the bytes per parameter, is 16, 4 + 12/N, 2 + 14/N and 16/N at stages 0 to 3. Each of t
model-parallel devices holds its own parameters, so a model has at most t M / b.

ZeRO-Offload (arXiv:2101.06840, section 3): a step is a data flow graph, in bytes per parameter:

    params 2 --4--> forward and backward --2--> grads 2 --2--> update 12 --2--> params

Forward and backward run on the device; every other node is placed on the device or the host. The
host link carries the edges that are cut. A cut carries either 4 bytes or at least 6. Among the cuts
that carry 4 bytes, placing gradients and update on the host leaves the least on the device, 2
bytes.

ZeRO-Infinity (arXiv:2104.07857): with b sequences of T tokens per device, a step takes 8 b T FLOPs
per parameter, recomputation included:

    working memory, states          4 h 4h                   equation 4: parameters and gradients of
                                                             the largest operator
    working memory, activations     b T ci (16 h + 2 a T)    equation 5: ci layers between two
                                                             checkpoints
    FLOPs per byte, params, grads   8 b T / 8 = b T          parameters read in forward, backward,
                                                             recomputation; gradients stored
    FLOPs per byte, optimizer       8 b T / 32 = b T / 4     16 bytes read and written
    FLOPs per byte, checkpoints     96 b T L h^2 / (4 b T h L / ci) = 24 h ci
    efficiency                      ait bw / (ait bw + peak)     equation 6: nothing overlaps
"""

import dataclasses
from collections.abc import Collection

from zerojax.formulas.memory import StateBytes, model_state_bytes, state_bytes

OFFLOADED = ("params", "grads", "update")
"""Nodes of ZeRO-Offload's graph that can be placed on the host.

"update" is the optimizer together with the state that only it uses.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCut:
    """Cost of a partition of ZeRO-Offload's graph, in bytes per parameter.

    Attributes:
      device: bytes stored on the device.
      host: bytes stored on the host.
      link: bytes that cross the host link per step, both directions summed.
    """

    device: int
    host: int
    link: int


def offload_cut(host: Collection[str], per_param: StateBytes | None = None) -> OffloadCut:
    """Return the cost of a partition: table 1 of ZeRO-Offload, and the partitions that it omits.

    Args:
      host: nodes on the host, from `OFFLOADED`; the remaining nodes are on the device.
      per_param: bytes per parameter; mixed precision with Adam (16) by default.

    Raises:
      ValueError: a node is unknown.
    """
    if unknown := sorted(set(host) - set(OFFLOADED)):
        raise ValueError(f"host={unknown}: unknown nodes; choose from {', '.join(OFFLOADED)}")
    b = per_param or state_bytes()
    nodes = {"params": b.params, "grads": b.grads, "update": b.master + b.moments}
    edges = {
        ("params", "forward and backward"): 2 * b.params,  # once for forward, once for backward
        ("forward and backward", "grads"): b.grads,
        ("grads", "update"): b.grads,
        ("update", "params"): b.params,
    }
    on_host = sum(size for node, size in nodes.items() if node in host)
    cut = [(start, end) for start, end in edges if (start in host) != (end in host)]
    link = sum(edges[edge] for edge in cut)
    return OffloadCut(device=sum(nodes.values()) - on_host, host=on_host, link=link)


def largest_params(
    device_bytes: float,
    stage: int,
    num_shards: int,
    *,
    tensor: int = 1,
    per_param: StateBytes | None = None,
) -> float:
    """Return the number of parameters whose model states alone fill device memory (ZeRO, table 2).

    Args:
      device_bytes: bytes of memory per device.
      stage: ZeRO stage, 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      tensor: number of model-parallel devices, each with its part of the parameters.
      per_param: bytes per parameter; mixed precision with Adam (16) by default.
    """
    return tensor * device_bytes / model_state_bytes(1, stage, num_shards, per_param)["total"]


def states_working_bytes(hidden: int, width: int | None = None, itemsize: int = 2) -> int:
    """Return the bytes of the largest operator's parameters and gradients.

    This is MSWM, equation 4 of ZeRO-Infinity: the contiguous memory that a device needs even if
    everything else is offloaded, unless the operator is tiled (`zj.TiledDense`).

    Args:
      hidden: h, the model width.
      width: size of the operator's other dim; 4 h by default.
      itemsize: bytes per parameter element and per gradient element.
    """
    return 2 * itemsize * hidden * (4 * hidden if width is None else width)


def activations_working_bytes(
    batch: int, seq: int, hidden: int, heads: int, interval: int = 1
) -> int:
    """Return the bytes per device of the 16-bit activations recomputed between two checkpoints.

    This is AWM, equation 5 of ZeRO-Infinity. zerojax saves less per layer: see
    `zerojax.formulas.layer_activation_bytes`.

    Args:
      batch: b, sequences per device.
      seq: T, tokens per sequence.
      hidden: h, the model width.
      heads: a, number of attention heads.
      interval: ci, layers between two checkpoints.
    """
    return batch * seq * interval * (16 * hidden + 2 * heads * seq)


def arithmetic_intensity(batch: int, seq: int, hidden: int, interval: int = 1) -> dict[str, float]:
    """Return a step's FLOPs per byte moved, by kind of state (ZeRO-Infinity, section 4.1).

    Args:
      batch: b, sequences per device.
      seq: T, tokens per sequence.
      hidden: h, the model width.
      interval: ci, layers between two checkpoints.

    Returns:
      FLOPs per byte: "params" (with their gradients) b T, "opt_state" b T / 4, "activations" 24 h
      ci.
    """
    return {
        "params": float(batch * seq),
        "opt_state": batch * seq / 4,
        "activations": float(24 * hidden * interval),
    }


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Return the fraction of a step in which a device computes if no transfer overlaps compute.

    This is equation 6 of ZeRO-Infinity.

    Args:
      intensity: FLOPs per byte moved.
      bandwidth: bytes per second per device.
      peak: FLOP/s that a device attains if nothing moves.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Return the bytes per second per device at which `efficiency` equals `share`.

    This is share / (1 - share) peak / intensity.

    Args:
      share: target efficiency, above 0 and below 1.
      intensity: FLOPs per byte moved.
      peak: FLOP/s that a device attains if nothing moves.

    Raises:
      ValueError: `share` is not above 0 and below 1, so no bandwidth reaches it.
    """
    if not 0 < share < 1:
        raise ValueError(
            f"share = {share} must be above 0 and below 1: an efficiency of 1 would need transfers "
            "to take no time"
        )
    return share / (1 - share) * peak / intensity
