"""What `program.memory` returns: bytes by tier and kind, bytes sent, and bytes over the host link.

Two kinds of bytes are kept apart: the arguments of the compiled step, which must equal what XLA
reports, and the memory that the step takes beside them while it runs.
"""

import dataclasses
from collections.abc import Mapping

STATE_KINDS = ("params", "master", "opt_state", "frozen")
GRAD_KINDS = ("grads", "pending", "stashed")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of one step on each device, and in host memory for it.

    Attributes:
      tiers: {tier: {kind: bytes}}. Kinds "params", "master", "opt_state", "frozen", "batch" and
        "scalars" (with the schedule's arrays, of which XLA may drop some) are arguments of the
        step. While it runs there are also

          - "grads": between backward and update.
          - "unreduced": what each device's own sums, of reduce_every="step", take beside those shards.
          - "activations": between forward and backward; of a streamed step, those of all microbatches.
          - "gathered": the largest layer or leaf held whole; two layers with gather_ahead.
          - "in_flight": other records on their way between tiers, and a layer's gradient before it is stored, in the tick that
            holds the most. With "gathered" it is the peak of the schedule.
          - "slots": on a GPU, where records of the nvme tier, and what an update on the host is given and makes, are on their
            way beside the program.

        Gradients and activations of a streamed step in "pinned_host" are arguments too, as are the "pending" gradients of a
        delayed update. No argument are the gradients that callbacks keep for an update on the host, "stashed", the
        parameters that a delayed one makes beside the old ones, "made", and the "buffers" of the nvme tier and, on a
        GPU, of the update on the host. On disk the masters are part of "opt_state", and bytes are those of files.
      collectives: bytes that each device sends, by collective: "all_gather", "reduce_scatter",
      "all_reduce" and so on of states
        and gradients, and of activations over `tensor` "tensor_all_gather",
        "tensor_reduce_scatter", "tensor_all_reduce" and "tensor_permute".
      host_link: bytes that cross each device's link to the host in a step: "to_device" and
      "to_host". callback_link: those of them that callbacks move, for an update on the host and for
      the nvme tier. num_params: P, tensor-parallel shards counted once.
    """

    tiers: Mapping[str, Mapping[str, int]]
    collectives: Mapping[str, int]
    host_link: Mapping[str, int]
    callback_link: Mapping[str, int]
    num_params: int

    @property
    def argument_bytes(self) -> int:
        """Bytes that a compiled step takes as device arguments."""
        return sum(self.tiers["device"][kind] for kind in (*STATE_KINDS, "batch", "scalars"))

    @property
    def host_argument_bytes(self) -> int:
        """Bytes that a compiled step takes as arguments in pinned host memory."""
        return sum(
            n
            for kind, n in self.tiers["pinned_host"].items()
            if kind not in ("stashed", "made", "buffers")
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of every kind on the device.

        What a layer needs to compute, beside what is kept of it, is not part of it.
        """
        return sum(self.tiers["device"].values())

    @property
    def model_state_bytes(self) -> int:
        """Bytes of model states in every tier: parameters, gradients, master weights, optimizer
        state.
        """
        return sum(
            t.get(kind, 0) for t in self.tiers.values() for kind in (*STATE_KINDS, *GRAD_KINDS)
        )

    def __str__(self) -> str:
        rows = [f"{self.num_params:,} parameters; bytes on each device"]
        for tier, kinds in self.tiers.items():
            rows += [f"  {tier:<12} {kind:<12} {n:>20,}" for kind, n in kinds.items() if n]
        for name, n in self.collectives.items():
            over = "over tensor" if name.startswith("tensor_") else "sent a step"
            rows += [f"  {over:<12} {name.removeprefix('tensor_'):<14} {n:>18,}"] * (n > 0)
        rows += [
            f"  {'host link':<12} {name:<14} {n:>18,}" for name, n in self.host_link.items() if n
        ]
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class RunningBytes:
    """Bytes beside the arguments, while a step runs: by kind on the device and on the host, and
    over the link.

    `link` is what the compiled program copies, `called` what its callbacks do.
    """

    device: dict[str, int]
    host: dict[str, int]
    link: dict[str, int]
    called: dict[str, int]
