"""Declare the nvme tier of one program: its records, and the bytes they and their buffers take.

Each record of a kind holds one layer's leaves on one device. The stacked layers have four kinds:
"params", "grads", "opt_state" (with the float32 masters) and "activations". Each unstacked leaf has
its own kinds of one record each for its parameter and its state: "params.3" and "opt_state.3".
Kinds are declared while programs are built and traced, so that a program can be lowered and its
bytes counted for a mesh that does not exist on this machine. Nothing here touches a disk: folder,
buffers and threads belong to a `zerojax.runtime.SwapSession`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from host_offload.engine import DiskRecords, Lifetime, Swap, User, num_buffers, shared_bytes
from zerojax.config import ZeroConfig
from zerojax.sharding import Spec


class DiskLayout:
    """The kinds of records of one program.

    Attributes:
      config: configuration of the program.
      mesh: the device mesh.
      swap: the object that the callbacks of the program's fetches and stores work on.
      kinds: the latest declaration of each kind, by name.
    """

    def __init__(self, config: ZeroConfig, mesh: Mesh) -> None:
        """Start without any kinds."""
        self.config = config
        self.mesh = mesh
        self.swap = Swap(mesh)
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
        """Declare a kind, and return its records: the same object for the same shapes.

        Args:
          kind: name of the kind, and of its folder.
          num_layers: number of records on each device.
          names: names of the leaves.
          shapes: unsharded shape of each leaf of one layer, as ShapeDtypeStruct.
          specs: sharding spec of each leaf.
          lifetime: whether the records outlive a step.
          used_by: whether programs fetch and store the records, or the host works on them.
          in_place: whether the host updates the records in the buffers into which they are read.
          in_turn: whether programs use all kinds declared so one after the other, which lets them
            share buffers.
          written_once: whether the records never change after the first write.
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
        # Every trace of a step declares its kinds again. The first object is kept as long as it
        # fits the files.
        previous = self.kinds.get(kind)
        if previous is not None and previous.can_share_files(records):
            return previous
        self.kinds[kind] = records
        return records

    def shared_bytes(self, records: DiskRecords) -> int:
        """Return the bytes of the buffers that a kind shares with others, or 0 if none."""
        if not records.in_turn:
            return 0
        sizes = [r.num_bytes for r in self.kinds.values() if r.in_turn]
        size = shared_bytes(sizes, self.config.prefetch_distance, records.in_place)
        # The few records that are larger than the shared buffers have their own buffers.
        return size if records.num_bytes <= size else 0

    def buffer_bytes(self, kinds: Iterable[DiskRecords]) -> int:
        """Return the bytes per device of the read and write buffers of some kinds.

        Args:
          kinds: records of each kind.
        """
        distance = self.config.prefetch_distance
        shared = 0
        unshared = 0
        for records in kinds:
            size = self.shared_bytes(records)
            if size:
                # Counted once for all kinds, because they are never in use at the same time. As
                # `Engine.add` allocates them: `distance` buffers to read ahead, one for the record
                # in use, and as many to write.
                shared = 2 * (distance + 1) * size
            else:
                count = num_buffers(distance, records.num_layers, records.in_place)
                unshared += count * records.num_bytes
        return unshared + shared

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, in total over this process's devices."""
        return len(self.ranks()) * sum(r.num_layers * r.num_bytes for r in self.kinds.values())

    def ranks(self) -> list[int]:
        """Return the positions in the mesh of this process's devices."""
        local = set(self.mesh.local_devices)
        return [rank for rank, device in enumerate(self.mesh.devices.flat) if device in local]
