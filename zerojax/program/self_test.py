"""One train step under checks that an ordinary step does without, for a device and a jaxlib that
have not run one before.

A streamed step rests on two promises of XLA that a wrong number would not reveal at once:

    offsets     a slice of host memory is read at the record that the schedule asks for. XLA fixes the address of each slice in
                advance; asked to, it compares that with the one which the device computes, slice by
                slice
    donation    what a step takes in host memory, it returns there. XLA says that it may reuse the memory; a copy would need the
                bytes of all states twice

`Program.self_test` runs a step so, and raises where one of them is broken.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

VERIFY_OFFSETS = "xla_gpu_experimental_dynamic_slice_fusion_verify_offsets"
"""The option with which XLA compares the offset of each slice with what the device computed; as of
jaxlib 0.11.
"""
_HOST = ("pinned_host", "unpinned_host")
_TOLD = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What a step under checks was found to do; both promises were kept where they were checked.

    Attributes:
      metrics: of the step, as `Program.step` returns them.
      offsets_verified: whether XLA compared the offset of each slice with the device's. Only on
        GPUs, from jaxlib 0.11 on.
      num_host_arrays: arrays of the state and of the step's scratch that rest in host memory; all
        came back where they were.
      host_bytes: of these on this process's devices.
    """

    metrics: Mapping[str, Any]
    offsets_verified: bool
    num_host_arrays: int
    host_bytes: int

    def __str__(self) -> str:
        """Return what was checked, in a line each."""
        offsets = (
            "compared by XLA, slice by slice"
            if self.offsets_verified
            else "not compared: this device or jaxlib cannot"
        )
        return "\n".join(
            [
                f"offsets in host memory: {offsets}",
                f"donated host memory: {self.num_host_arrays} arrays of {self.host_bytes:,} bytes were updated in place",
            ]
        )


@dataclasses.dataclass
class HostAddresses:
    """Where the arrays in host memory are before a step and after it.

    Attributes:
      before: bytes and addresses of the shards of each array that the step takes, by its name.
      after: the same of what it returns.
    """

    before: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)
    after: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    def read_before(self, tree: Any) -> None:
        """Read the addresses of what a step is about to take."""
        self.before = _addresses(tree)

    def read_after(self, tree: Any) -> None:
        """Read the addresses of what it returned."""
        self.after = _addresses(tree)

    @property
    def moved(self) -> list[str]:
        """Names of the arrays that came back in other memory."""
        return [
            name
            for name, (_, places) in self.before.items()
            if self.after.get(name, (0, []))[1] != places
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them on this process's devices."""
        return sum(size for size, _ in self.before.values())

    def check(self) -> None:
        """Raise RuntimeError if an array came back in other memory than it was given in."""
        if not (moved := self.moved):
            return
        size = sum(self.before[name][0] for name in moved)
        told = ", ".join(moved[:_TOLD]) + (
            f" and {len(moved) - _TOLD} more" if len(moved) > _TOLD else ""
        )
        raise RuntimeError(
            f"{len(moved)} of {len(self.before)} donated arrays in host memory came back elsewhere: {told}. XLA of jax "
            f"{jax.__version__} copied them, so a step needs {size:,} bytes more of host memory than program.memory says"
        )


def _addresses(tree: Any) -> dict[str, tuple[int, list[int]]]:
    """Return bytes and addresses of the shards of each array in host memory, by its path in a tree."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind in _HOST:
            shards = [shard.data for shard in leaf.addressable_shards]
            size = sum(shard.nbytes for shard in shards)
            found[jax.tree_util.keystr(path)] = (
                size,
                [shard.unsafe_buffer_pointer() for shard in shards],
            )
    return found


def verifies_offsets(mesh: jax.sharding.Mesh) -> bool:
    """Tell whether XLA can compare the offsets of slices on a mesh's devices."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda") and jax.__version_info__ >= (0, 11)


def wrong_offset(error: Exception) -> RuntimeError:
    """Return what to raise for an error of a step whose offsets XLA verified."""
    return RuntimeError(
        f"a step failed whose slices of host memory XLA verifies, under jax {jax.__version__}: {error}. If the error tells of "
        "an offset, records are read at wrong addresses: do not train with this jaxlib, and report it with the program's HLO "
        "(program.lower(batch).compile().as_text())"
    )
