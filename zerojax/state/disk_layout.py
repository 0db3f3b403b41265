"""The nvme tier of one program, declared: which records there are, and how many bytes they and
their buffers take.

Records of a kind hold one layer's leaves on one device. The stacked layers are four kinds,
"params", "grads", "opt_state" (with the float32 masters) and "activations"; of a leaf that is no
stack of layers, parameter and state are kinds of one record each: "params.3" and "opt_state.3".
Kinds are declared while programs are built and traced, so that a program can be lowered and its
bytes counted on a mesh that is not there. Nothing here touches a disk: folder, buffers and threads
are those of a `zerojax.runtime.SwapSession`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from host_offload.engine import DiskRecords, Lifetime, Swap, User, num_buffers, shared_bytes
from zerojax.config import ZeroConfig
from zerojax.sharding import Spec


class DiskLayout:
    """Kinds of records of one program.

    Attributes:
      config: of the program.
      mesh: the device mesh.
      swap: what the callbacks of the program's fetches and stores will work on.
      kinds: what was declared last under each name.
    """

    def __init__(self, config: ZeroConfig, mesh: Mesh) -> None:
        self.config, self.mesh, self.swap = config, mesh, Swap(mesh)
        self.kinds: dict[str, DiskRecords] = {}

    def declare(
        self,
        kind: str,
        num_layers: int,
        names: Sequence[str],
        shapes: Sequence[Any],
        specs: Sequence[Spec],
        *,
        lifetime: Lifetime = "state",
        used_by: User = "program",
        in_place: bool = False,
        in_turn: bool = False,
        written_once: bool = False,
    ) -> DiskRecords:
        """Return the records of a kind, the same for the same shapes.

        Args:
          kind: name of its folder.
          num_layers: records on each device.
          names: of the leaves.
          shapes: of each leaf of one layer, whole: ShapeDtypeStruct.
          specs: of each.
          lifetime: whether they outlive a step.
          used_by: whether programs fetch and store them, or the host works on them.
          in_place: whether the host updates them in the buffers into which they are read.
          in_turn: whether programs use all such kinds one after the other, so that they may share
            buffers.
          written_once: whether a state's records stay as they were first written.
        """
        records = DiskRecords(
            self.swap,
            kind,
            num_layers,
            tuple(names),
            tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes),
            tuple(PartitionSpec(*s) for s in specs),
            lifetime,
            used_by,
            in_place,
            in_turn,
            written_once,
        )
        # Every trace of a step declares its kinds anew. The first object stays as long as its files
        # are the right ones.
        previous = self.kinds.get(kind)
        if previous is not None and previous.has_files_of(records):
            return previous
        self.kinds[kind] = records
        return records

    def shared_bytes(self, records: DiskRecords) -> int:
        """Return the bytes of the buffers that a kind shares with others, or 0 if it has its own."""
        sizes = [r.num_bytes for r in self.kinds.values() if r.in_turn]
        size = (
            shared_bytes(sizes, self.config.prefetch_distance, records.in_place)
            if records.in_turn
            else 0
        )
        # The few records that are larger than the shared buffers have buffers of their own.
        return size if records.num_bytes <= size else 0

    def buffer_bytes(self, kinds: Iterable[DiskRecords]) -> int:
        """Return the bytes of the buffers of some kinds on one device, to read and to write."""
        distance, shared, unshared = self.config.prefetch_distance, 0, 0
        for records in kinds:
            if size := self.shared_bytes(records):
                # Counted once for all kinds: they are never in use at the same time. As
                # `Engine.add` allocates them: `distance` to read ahead, one for the record in use,
                # and as many to write.
                shared = 2 * (distance + 1) * size
            else:
                unshared += (
                    num_buffers(distance, records.num_layers, records.in_place) * records.num_bytes
                )
        return unshared + shared

    @property
    def num_bytes(self) -> int:
        """Bytes on disk of this process's devices."""
        return len(self.ranks()) * sum(r.num_layers * r.num_bytes for r in self.kinds.values())

    def ranks(self) -> list[int]:
        """Return the positions in the mesh of this process's devices."""
        local = set(self.mesh.local_devices)
        return [rank for rank, device in enumerate(self.mesh.devices.flat) if device in local]
