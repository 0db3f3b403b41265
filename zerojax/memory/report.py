"""The result of `program.memory`: bytes by tier and kind, bytes sent, and bytes over the host link.

Two kinds of bytes are kept apart: the arguments of the compiled step, which must equal XLA's
report, and the memory that the step takes in addition while it runs.
"""

import dataclasses
from collections.abc import Mapping

from zerojax.sharding import PIPE, TENSOR

STATE_KINDS = ("params", "master", "opt_state", "frozen")
GRAD_KINDS = ("grads", "pending", "stashed")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of one step on each device, and in host memory for it.

    Attributes:
      tiers: {tier: {kind: bytes}}. The kinds "params", "master", "opt_state", "frozen", "batch" and
        "scalars" (which include the schedule's arrays, some of which XLA may drop) are arguments of
        the step. While it runs there are also

          - "grads": gradients between backward and update.
          - "unreduced": bytes of each device's own sums, with reduce_every="step", in addition to
            these shards.
          - "activations": saved activations between forward and backward; in a streamed step, of
            all microbatches; in a pipeline, of all slots, and x and its cotangent of one microbatch
            on their way between stages.
          - "gathered": the largest gathered layer or leaf; two layers with gather_ahead.
          - "in_flight": other records in flight between tiers, and a layer's gradient before it is
            stored, in the tick that holds the most. Together with "gathered" it is the peak of the
            schedule. In a pipeline it also has an estimate of what the computation of one layer, or
            of the head, needs.
          - "working": on a mesh with `context` or `expert` and without `pipe`, arrays that only a
            layer's derivative holds, such as whole keys or the cells of experts, as far as they do
            not fit into the bytes of "gathered" and "in_flight" that are free then.
          - "slots": on a GPU, memory in which records of the nvme tier, and the inputs and results
            of a host update, are in flight next to the program.

        In a streamed step, gradients and activations in "pinned_host" are arguments too, as are the
        "pending" gradients, which a delayed update or an update in forward leaves to the next step,
        in any tier. The following are not arguments: "stashed", the
        gradients that callbacks keep for a host update; "made", the parameters that a delayed
        update computes in addition to the old ones; and "buffers", of the nvme tier and, on a GPU,
        of the host update. On disk the masters are part of "opt_state", and bytes are file sizes.
      collectives: bytes that each device sends, by collective: "all_gather", "reduce_scatter",
        "all_reduce" and so on for states and gradients, and "tensor_all_gather",
        "tensor_reduce_scatter", "tensor_all_reduce" and "tensor_permute" for activations over
        `tensor`; and in a pipeline "pipe_permute" for activations between stages, "pipe_all_to_all"
        and "pipe_all_gather" for those of embedding and head.
      host_link: bytes that cross each device's link to the host in a step: "to_device" and
        "to_host".
      callback_link: the part of `host_link` that callbacks move, for a host update and for the nvme
        tier.
      num_params: number of parameters P; tensor-parallel shards are counted once.
    """

    tiers: Mapping[str, Mapping[str, int]]
    collectives: Mapping[str, int]
    host_link: Mapping[str, int]
    callback_link: Mapping[str, int]
    num_params: int

    @property
    def argument_bytes(self) -> int:
        """Bytes of a compiled step's arguments on the device."""
        device = self.tiers["device"]
        arguments = sum(device[kind] for kind in (*STATE_KINDS, "batch", "scalars"))
        return arguments + device.get("pending", 0)

    @property
    def host_argument_bytes(self) -> int:
        """Bytes of a compiled step's arguments in pinned host memory."""
        not_arguments = ("stashed", "made", "buffers")
        host = self.tiers["pinned_host"]
        return sum(n for kind, n in host.items() if kind not in not_arguments)

    @property
    def device_bytes(self) -> int:
        """Bytes of every kind on the device.

        Other than its saved activations, the temporary memory of a layer's computation is included
        only in a pipeline, and on a mesh with `context` or `expert`.
        """
        return sum(self.tiers["device"].values())

    @property
    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients, master weights and optimizer state, in all tiers."""
        total = 0
        for kinds in self.tiers.values():
            total += sum(kinds.get(kind, 0) for kind in (*STATE_KINDS, *GRAD_KINDS))
        return total

    def __str__(self) -> str:
        """Return the bytes as a table."""
        rows = [f"{self.num_params:,} parameters; bytes on each device"]
        for tier, kinds in self.tiers.items():
            rows += [f"  {tier:<12} {kind:<12} {n:>20,}" for kind, n in kinds.items() if n]
        for name, n in self.collectives.items():
            axis, _, op = name.partition("_")
            over = "sent a step"
            if axis in (PIPE, TENSOR):
                name = op
                over = f"over {axis}"
            if n > 0:
                rows.append(f"  {over:<12} {name:<14} {n:>18,}")
        rows += [
            f"  {'host link':<12} {name:<14} {n:>18,}" for name, n in self.host_link.items() if n
        ]
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class RunningBytes:
    """Bytes in addition to the arguments while a step runs, and bytes over the host link.

    Attributes:
      device: bytes on the device, by kind.
      host: bytes in host memory, by kind.
      link: bytes that the compiled program copies, "to_device" and "to_host".
      called: bytes that callbacks copy, "to_device" and "to_host".
    """

    device: dict[str, int]
    host: dict[str, int]
    link: dict[str, int]
    called: dict[str, int]
