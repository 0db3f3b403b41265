"""Run one train step with extra checks, for a device and a jaxlib that have not run one before.

A streamed step relies on two promises of XLA. If XLA broke one, no wrong number would reveal it
immediately:

    offsets     a slice of host memory is read at the record that the schedule asks for. XLA fixes
                each slice's address in advance; on request it compares that address with the one
                the device computes, slice by slice
    donation    a step returns its arrays in host memory where it took them. XLA only says that it
                may reuse the memory; a copy would need the bytes of all states twice

`Program.self_test` runs a step with both checks, and raises if a promise is broken.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zerojax.trees import Tree

VERIFY_OFFSETS = "xla_gpu_experimental_dynamic_slice_fusion_verify_offsets"
"""XLA option that compares each slice's offset with the offset that the device computes.

It has this name in jaxlib 0.11.
"""
_HOST = ("pinned_host", "unpinned_host")
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The result of a step with checks; both promises were kept as far as they were checked.

    Attributes:
      metrics: metrics of the step, as `Program.step` returns them.
      offsets_verified: whether XLA compared each slice's offset with the device's. It can do so
        only on GPUs, from jaxlib 0.11 on.
      num_host_arrays: number of arrays of the state and of the step's scratch in host memory; all
        of them came back in the same memory.
      host_bytes: bytes of these arrays on this process's devices.
    """

    metrics: Mapping[str, Any]
    offsets_verified: bool
    num_host_arrays: int
    host_bytes: int

    def __str__(self) -> str:
        """Return the checks that were made, one per line."""
        offsets = "not compared: not supported by this device or jaxlib"
        if self.offsets_verified:
            offsets = "compared by XLA, slice by slice"
        return (
            f"offsets in host memory: {offsets}\n"
            f"donated host memory: {self.num_host_arrays} arrays of {self.host_bytes:,} bytes "
            "were updated in place"
        )


@dataclasses.dataclass
class HostAddresses:
    """The addresses of arrays in host memory before and after a step.

    Attributes:
      before: bytes, and addresses of the shards, of each array that the step takes, by name.
      after: bytes, and addresses of the shards, of each array that the step returns, by name.
    """

    before: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)
    after: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    def read_before(self, tree: Tree) -> None:
        """Read the addresses of the arrays that a step is about to take."""
        self.before = _addresses(tree)

    def read_after(self, tree: Tree) -> None:
        """Read the addresses of the arrays that a step returned."""
        self.after = _addresses(tree)

    @property
    def moved(self) -> list[str]:
        """Names of the arrays that came back in other memory."""
        moved = []
        for name, (_, addresses) in self.before.items():
            _, addresses_after = self.after.get(name, (0, []))
            if addresses_after != addresses:
                moved.append(name)
        return moved

    @property
    def num_bytes(self) -> int:
        """Total bytes of the arrays on this process's devices."""
        return sum(size for size, _ in self.before.values())

    def check(self) -> None:
        """Raise RuntimeError if an array came back in other memory than it was given in."""
        moved = self.moved
        if not moved:
            return
        size = sum(self.before[name][0] for name in moved)
        names = ", ".join(moved[:_SHOWN])
        if len(moved) > _SHOWN:
            names += f" and {len(moved) - _SHOWN} more"
        raise RuntimeError(
            f"{len(moved)} of {len(self.before)} donated arrays in host memory came back "
            f"elsewhere: {names}. XLA of jax {jax.__version__} copied them, so a step needs "
            f"{size:,} bytes more host memory than program.memory reports"
        )


def _addresses(tree: Tree) -> dict[str, tuple[int, list[int]]]:
    """Return the bytes and shard addresses of each array in host memory, by its path in a tree."""
    addresses = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind in _HOST:
            shards = [shard.data for shard in leaf.addressable_shards]
            size = sum(shard.nbytes for shard in shards)
            pointers = [shard.unsafe_buffer_pointer() for shard in shards]
            addresses[jax.tree_util.keystr(path)] = (size, pointers)
    return addresses


def verifies_offsets(mesh: jax.sharding.Mesh) -> bool:
    """Return whether XLA can compare the offsets of slices on a mesh's devices."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda") and jax.__version_info__ >= (0, 11)


def wrong_offset(error: Exception) -> RuntimeError:
    """Return the exception to raise for an error in a step whose offsets XLA verified."""
    return RuntimeError(
        "a step failed while XLA verified its slices of host memory, under jax "
        f"{jax.__version__}: {error}. If the error names an offset, records are read at wrong "
        "addresses: do not train with this jaxlib, and report it with the program's HLO "
        "(program.lower(batch).compile().as_text())"
    )
