"""The equations of the ZeRO papers that a plan rests on, beside those of bytes in `zerojax.memory`.

ZeRO (arXiv:1910.02054, table 2): a device of M bytes holds at most M / b parameters, where b, the
bytes of one on it, is 16, 4 + 12/N, 2 + 14/N and 16/N at stages 0 to 3. Each of t model-parallel
devices has its own, so a model has t M / b.

ZeRO-Offload (arXiv:2101.06840, section 3): a step is a graph of data flow, in bytes a parameter,

    params 2 --4--> forward and backward --2--> grads 2 --2--> update 12 --2--> params

whose nodes rest on device or host, forward and backward on the device. The link carries the edges
that are cut. A cut carries 4 bytes or at least 6, and of those of 4 the one with gradients and
update on the host leaves least on the device, 2 bytes.

ZeRO-Infinity (arXiv:2104.07857), where b sequences of T tokens a device take 8 b T FLOPs a
parameter, recomputation included:

    working memory of states        4 h 4h                       equation 4: the largest operator, parameters and gradients
    of activations                  b T ci (16 h + 2 a T)        equation 5: ci layers between two checkpoints
    FLOPs a byte   params, grads    8 b T / 8 = b T              read forward, backward and again, and gradients stored
                   optimizer states 8 b T / 32 = b T / 4         16 bytes read and written
                   checkpoints      96 b T L h^2 / (4 b T h L / ci) = 24 h ci
    efficiency                      ait bw / (ait bw + peak)     equation 6: nothing overlaps
"""

import dataclasses
from collections.abc import Collection

from zerojax.formulas.memory import StateBytes, model_state_bytes, state_bytes

OFFLOADED = ("params", "grads", "update")
"""Nodes of ZeRO-Offload's graph that may rest on the host; "update" is the optimizer with the state
that it alone uses.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCut:
    """What a partition of ZeRO-Offload's graph costs, in bytes a parameter.

    Attributes:
      device: bytes that rest on the device.
      host: bytes that rest on the host.
      link: bytes that cross the link in a step, both ways summed.
    """

    device: int
    host: int
    link: int


def offload_cut(host: Collection[str], per_param: StateBytes | None = None) -> OffloadCut:
    """Return the cost of a partition: table 1 of ZeRO-Offload, and all that it leaves out.

    Args:
      host: the nodes on the host, of `OFFLOADED`; all others are on the device.
      per_param: bytes of one parameter; mixed precision with Adam (16) by default.

    Raises:
      ValueError: a node is unknown.
    """
    if unknown := sorted(set(host) - set(OFFLOADED)):
        raise ValueError(f"host={unknown}: the graph has the nodes {', '.join(OFFLOADED)}")
    b = per_param or state_bytes()
    nodes = {"params": b.params, "grads": b.grads, "update": b.master + b.moments}
    edges = {
        ("params", "forward and backward"): 2 * b.params,  # once for each
        ("forward and backward", "grads"): b.grads,
        ("grads", "update"): b.grads,
        ("update", "params"): b.params,
    }
    on_host = sum(size for node, size in nodes.items() if node in host)
    link = sum(size for (start, end), size in edges.items() if (start in host) != (end in host))
    return OffloadCut(device=sum(nodes.values()) - on_host, host=on_host, link=link)


def largest_params(
    device_bytes: float,
    stage: int,
    num_shards: int,
    *,
    tensor: int = 1,
    per_param: StateBytes | None = None,
) -> float:
    """Return the parameters whose model states fill the devices' memory, and nothing else does
    (ZeRO, table 2).

    Args:
      device_bytes: bytes of memory of a device.
      stage: 0 to 3.
      num_shards: N, the size of the axis `fsdp`.
      tensor: model-parallel devices, each with its part of the parameters.
      per_param: bytes of one parameter; mixed precision with Adam (16) by default.
    """
    return tensor * device_bytes / model_state_bytes(1, stage, num_shards, per_param)["total"]


def states_working_bytes(hidden: int, width: int | None = None, itemsize: int = 2) -> int:
    """Return the least memory in which parameters and gradients of a layer's largest operator fit
    (ZeRO-Infinity, equation 4).

    That is MSWM. A device needs it in one piece once all else is offloaded, unless the operator is
    tiled (`zj.TiledDense`).

    Args:
      hidden: h.
      width: of the operator's other side; 4 h by default.
      itemsize: bytes of a parameter, and of a gradient.
    """
    return 2 * itemsize * hidden * (4 * hidden if width is None else width)


def activations_working_bytes(
    batch: int, seq: int, hidden: int, heads: int, interval: int = 1
) -> int:
    """Return the activations between two checkpoints, which backward makes again in 16 bits
    (ZeRO-Infinity, equation 5).

    That is AWM. What zerojax keeps of a layer is less: `zerojax.memory.layer_activation_bytes`.

    Args:
      batch: b, sequences on a device.
      seq: T, tokens of a sequence.
      hidden: h.
      heads: a.
      interval: ci, layers between two checkpoints.
    """
    return batch * seq * interval * (16 * hidden + 2 * heads * seq)


def arithmetic_intensity(batch: int, seq: int, hidden: int, interval: int = 1) -> dict[str, float]:
    """Return a step's FLOPs for each byte that moves, by what moves: ZeRO-Infinity, section 4.1.

    Args:
      batch: b, sequences on a device.
      seq: T, tokens of a sequence.
      hidden: h.
      interval: ci, layers between two checkpoints.

    Returns:
      "params" (with their gradients): b T. "opt_state": b T / 4. "activations": 24 h ci.
    """
    return {
        "params": float(batch * seq),
        "opt_state": batch * seq / 4,
        "activations": float(24 * hidden * interval),
    }


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Return the share of a step in which a device computes, if no transfer overlaps it
    (ZeRO-Infinity, equation 6).

    Args:
      intensity: FLOPs for each byte that moves.
      bandwidth: bytes a second of a device.
      peak: FLOP/s that a device attains where nothing moves.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Return the bytes a second of a device with which `efficiency` is `share`: share / (1 - share)
    peak / intensity.

    Args:
      share: the efficiency, above 0 and below 1.
      intensity: FLOPs for each byte that moves.
      peak: FLOP/s that a device attains where nothing moves.

    Raises:
      ValueError: no bandwidth has that efficiency.
    """
    if not 0 < share < 1:
        raise ValueError(
            f"share = {share}: an efficiency above 0 and below 1 is needed; 1 takes no time to move"
        )
    return share / (1 - share) * peak / intensity
