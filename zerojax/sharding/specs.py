"""Partition specs as plain tuples, and the shardings built from them.

A spec here always has one entry per dim, and is compared and sliced like any tuple; jax's
PartitionSpec may be shorter than the array's ndim. A sharding is a spec on a mesh in a memory tier.
Two functions build one, because JAX treats the two cases differently: `named` for the arguments and
results of a program, `place` for moves inside it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_offload.tiers import memory_kind
from zerojax.trees import Tree

Spec = tuple[str | tuple[str, ...] | None, ...]
"""A PartitionSpec padded with None to one entry per dim."""


def pad_spec(spec: Sequence | PartitionSpec, ndim: int) -> Spec:
    """Return `spec` padded with None to one entry per dim."""
    return tuple(spec) + (None,) * (ndim - len(spec))


def parse_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes that split one dim, as a tuple."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def as_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return the entry of a spec for a dim that some mesh axes split; the inverse of parse_axes."""
    if len(axes) <= 1:
        return axes[0] if axes else None
    return tuple(axes)


def list_axes(spec: Sequence | PartitionSpec) -> list[str]:
    """Return the mesh axes that a spec names, in order of its dims."""
    return list(itertools.chain(*map(parse_axes, spec)))


def without_axes(spec: Spec, *axes: str) -> Spec:
    """Return `spec` with some mesh axes removed: the spec after an all_gather over them."""

    def drop(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return as_entry([a for a in parse_axes(entry) if a not in axes])

    return tuple(drop(entry) for entry in spec)


def named(mesh: Mesh, spec: Spec | PartitionSpec, tier: str = "device") -> NamedSharding:
    """Return the sharding of an array stored in `tier` that a program takes or returns.

    A mesh of absent GPUs (a compile-only topology) knows no memory kinds, but its abstract mesh
    does.
    """
    if tier == "device":
        return NamedSharding(mesh, PartitionSpec(*spec))
    sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind(tier))
    return sharding if sharding.memory_kind else place(mesh, spec, tier)


def explicit(tree: Tree) -> Any:
    """Return shardings with an explicit memory kind, if the mesh knows memory kinds.

    JAX pairs donated arguments with results by shape, and compares their memory kinds only if all
    of them are explicit.

    Args:
      tree: tree of NamedSharding.
    """

    def with_kind(sharding: NamedSharding) -> NamedSharding:
        if sharding.memory_kind is not None:
            return sharding
        on_device = NamedSharding(sharding.mesh, sharding.spec, memory_kind="device")
        return sharding if on_device.memory_kind is None else on_device

    return jax.tree.map(with_kind, tree)


def place(mesh: Mesh, spec: Spec | PartitionSpec, tier: str) -> NamedSharding:
    """Return the sharding with which `jax.device_put` moves an array inside a traced program.

    Its memory kind is explicit.
    """
    return NamedSharding(mesh.abstract_mesh, PartitionSpec(*spec), memory_kind=memory_kind(tier))
