"""From shapes to sharding specs: which dim of each leaf is split over the ZeRO axes.

The axes are `fsdp`, and `pipe`, `expert` and `context` on a mesh that has them, except for the axes
in the leaf's own spec. A stack of layers is never split over `pipe` here. They split one dim
together. The rule, per leaf: among the dims that the product of
their sizes divides and that nothing else splits, choose the largest, or, in a layer's leaf, the
first. If there is none, choose a dim that is already split and whose local size the product
divides. If there is none either, the leaf stays replicated and is reported.

A layer's leaf is split over its first dim, since an all_gather then writes each shard as one
contiguous piece. If a later dim is split, XLA transposes the gathered leaf, and in a loop over
layers it transposes the full stack before the loop: a streamed step held such leaves twice (a
transformer of 24 x 4096 on 8 H200s: 5.29 GB per device instead of 4.66, jax 0.10.2). In other
leaves, the model's own scan may slice the first dim, which must then stay unsharded.

    W[D, F]          -> W[D_fsdp, F]              D is the largest dim
    W[D, F_tensor]   -> W[D_fsdp, F_tensor]       the user's spec is kept
    b[F_tensor]      -> b[F_(tensor, fsdp)]
    blocks W[L, D, F]-> W[L, D_fsdp, F]           the layer dim is never split: a scan slices it
    W[E_expert, D, F]-> W[E_expert, D_fsdp, F]    experts, which their own spec splits
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.sharding.mesh import EXPERT, OPTIONAL_AXES, PIPE, TENSOR, batch_axes
from zerojax.sharding.specs import Spec, as_entry, list_axes, pad_spec, parse_axes, without_axes
from zerojax.trees import Params, Tree


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """A leaf that the ZeRO axes do not split.

    Attributes:
      name: path of the leaf.
      num_bytes: bytes of the leaf in float32, on each device.
      why: the reason, with numbers.
    """

    name: str
    num_bytes: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSpec:
    """How one parameter leaf may be split.

    Attributes:
      base: the user's spec (tensor and expert parallelism), padded to one entry per dim. An
        all_gather restores it.
      sharded: `base`, with the leaf's ZeRO axes added to one dim.
      replicated: why `sharded` equals `base`, or None if the ZeRO axes split the leaf.
    """

    base: Spec
    sharded: Spec
    replicated: str | None

    @property
    def added_axes(self) -> tuple[str, ...]:
        """The axes that `sharded` names, and `base` does not."""
        own = set(list_axes(self.base))
        return tuple(axis for axis in list_axes(self.sharded) if axis not in own)


def leaf_spec(
    shape: Sequence[int],
    mesh: Mesh,
    axes: tuple[str, ...],
    base: Spec | None = None,
    *,
    first_dim: int = 0,
    min_shard_bytes: int = 0,
) -> LeafSpec:
    """Choose the dim of one leaf that `axes` split.

    Args:
      shape: shape of the unsharded leaf.
      mesh: the device mesh.
      axes: the axes to add, such as `zerojax.sharding.zero_axes(mesh)`. Those that `base` names are
        left out.
      base: the user's spec, one entry per dim, or None.
      first_dim: first dim that may be split (1 for stacked layers, 2 for stacks of tiles in
        layers).
      min_shard_bytes: a leaf with fewer bytes in float32 stays replicated.
    """
    base = pad_spec(base or (), len(shape))
    named_axes = list_axes(base)
    axes = tuple(axis for axis in axes if axis not in named_axes)
    size = math.prod(mesh.shape[axis] for axis in axes)
    # Local dim sizes on one device, as the user's spec splits them.
    local = [n // _num_shards(entry, mesh) for n, entry in zip(shape, base, strict=True)]
    if size == 1:
        return LeafSpec(base, base, None)
    # The latency of a small leaf's collectives outweighs the bytes that splitting it would save.
    if 4 * math.prod(shape) < min_shard_bytes:
        return LeafSpec(base, base, f"smaller than min_shard_bytes={min_shard_bytes}")
    dims = [d for d in range(first_dim, len(shape)) if local[d] and local[d] % size == 0]
    if not dims:
        sizes = _describe_sizes(axes, mesh)
        return LeafSpec(base, base, f"no dim of {tuple(local[first_dim:])} divides by {sizes}")
    free = [d for d in dims if base[d] is None]
    split_dim = (free or dims)[0] if first_dim else max(free or dims, key=lambda d: local[d])
    # The added axes are last within their dim, so removing them leaves the user's own split.
    sharded = list(base)
    sharded[split_dim] = as_entry((*parse_axes(base[split_dim]), *axes))
    return LeafSpec(base, tuple(sharded), None)


def _describe_sizes(axes: Sequence[str], mesh: Mesh) -> str:
    """Return the axes with their sizes, such as "fsdp=2 x context=4"."""
    return " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def _num_shards(entry: Any, mesh: Mesh) -> int:
    """Return the number of shards into which an entry of a spec splits its dim."""
    return math.prod(mesh.shape[axis] for axis in parse_axes(entry))


def param_specs(
    abstract_params: Params,
    user_specs: Any,
    mesh: Mesh,
    axes: tuple[str, ...],
    *,
    first_dims: Mapping[str, int] = MappingProxyType({}),
    min_shard_bytes: int = 0,
) -> dict[str, LeafSpec]:
    """Choose specs for a parameter tree.

    Args:
      abstract_params: tree of ShapeDtypeStruct.
      user_specs: None, or a tree of PartitionSpec or None that has the structure of the parameters
        or is a prefix of it.
      mesh: the device mesh.
      axes: the ZeRO axes, `zerojax.sharding.zero_axes(mesh)`.
      first_dims: number of leading dims (layers and tiles) that are never split, by path; 0 for
        missing paths.
      min_shard_bytes: leaves with fewer bytes in float32 stay replicated.

    Returns:
      LeafSpec by path (`jax.tree_util.keystr`).

    Raises:
      ValueError: a user's spec names an unknown axis or one that only ZeRO assigns, names an axis
        twice, has too many entries, or does not divide its leaf. All such leaves are listed.
    """
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    absent = [axis for axis in OPTIONAL_AXES if axis not in mesh.shape]
    bases = broadcast_specs(user_specs, abstract_params)
    specs = dict[str, LeafSpec]()
    misfits = list[str]()
    for (key_path, leaf), given in zip(leaves, bases, strict=True):
        # A model with experts is used on meshes without `expert` too.
        base = PartitionSpec(*without_axes(tuple(given), *absent))
        path = jax.tree_util.keystr(key_path)
        first_dim = first_dims.get(path, 0)
        # The stages of a pipeline hold different layers, so `pipe` does not split a layer.
        leaf_axes = tuple(axis for axis in axes if not first_dim or axis != PIPE)
        reason = misfit(path, leaf.shape, base, mesh, leaf_axes)
        if reason is not None:
            misfits.append(reason)
            continue
        specs[path] = leaf_spec(
            leaf.shape,
            mesh,
            leaf_axes,
            pad_spec(base, len(leaf.shape)),
            first_dim=first_dim,
            min_shard_bytes=min_shard_bytes,
        )
    if misfits:
        raise ValueError("\n".join(misfits))
    return specs


def broadcast_specs(prefix: Any, tree: Tree) -> list[PartitionSpec]:
    """Return one spec per leaf, from a tree of specs that may be a prefix of the tree.

    A spec in the prefix applies to every leaf below it.

    Args:
      prefix: tree of PartitionSpec or None; None is an empty spec.
      tree: tree whose leaves get the specs.

    Raises:
      ValueError: `prefix` is not a prefix of `tree`, or holds something other than specs and None.
    """

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    try:
        spec_lists = jax.tree.map(
            lambda s, sub: [s] * len(jax.tree.leaves(sub)), prefix, tree, is_leaf=is_spec
        )
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(
            f"specs must mirror the parameters, or be a prefix of their tree: {e}"
        ) from e
    specs = [
        PartitionSpec() if s is None else s for s in jax.tree.leaves(spec_lists, is_leaf=is_spec)
    ]
    wrong = [s for s in specs if not is_spec(s)]
    if wrong:
        raise ValueError(f"specs holds {wrong[0]!r}: PartitionSpec or None is needed")
    return specs


def misfit(
    path: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh, zero_axes: Sequence[str]
) -> str | None:
    """Return why a user's spec does not fit its leaf and the mesh, or None if it fits."""
    if len(spec) > len(shape):
        return f"{path}: spec {spec} has {len(spec)} entries for shape {tuple(shape)}"
    axes = list_axes(spec)
    if len(set(axes)) < len(axes):
        return f"{path}: spec {spec} names an axis twice"
    for dim, entry in enumerate(spec):
        split = 1
        for name in parse_axes(entry):
            if name not in mesh.shape:
                return (
                    f"{path}: spec {spec} names axis {name!r}; the mesh has {mesh.axis_names}. "
                    "specs and with_specs take mesh axes. Rules translate a model's own names: "
                    f"from_flax(..., axis_rules=(({name!r}, 'tensor'), ...)), "
                    "with None for an unsharded dim"
                )
            if name in zero_axes and name != EXPERT:
                return (
                    f"{path}: spec {spec} names {name!r}, which ZeRO assigns; give only "
                    f"{TENSOR!r}, or {EXPERT!r} in the dim that counts experts"
                )
            split *= mesh.shape[name]
        if shape[dim] % split and EXPERT in parse_axes(entry):
            noun, verb, fitting = "experts", "do", f"whose {EXPERT} divides {shape[dim]}"
            if shape[dim] == 1:
                noun, verb, fitting = "expert", "does", f"without {EXPERT}"
            sizes = _describe_sizes(parse_axes(entry), mesh)
            return (
                f"{path}: {shape[dim]} {noun} (dim {dim} of shape {tuple(shape)}) {verb} not "
                f"divide by {sizes}: choose a mesh {fitting}, or "
                f"{-(-shape[dim] // split) * split} experts"
            )
        if shape[dim] % split:
            return (
                f"{path}: dim {dim} of shape {tuple(shape)} does not divide by {split} "
                f"({entry} of spec "
                f"{spec}): pad it to {-(-shape[dim] // split) * split}, or leave it unsharded"
            )
    return None


def replicated_leaves(abstract_params: Params, specs: dict[str, LeafSpec]) -> list[Replicated]:
    """List the leaves that the ZeRO axes do not split, largest first."""
    replicated = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params)[0]:
        path = jax.tree_util.keystr(key_path)
        why = specs[path].replicated
        if why is not None:
            replicated.append(Replicated(path, 4 * math.prod(leaf.shape), why))
    return sorted(replicated, key=lambda r: -r.num_bytes)


def local_elements(shape: Sequence[int], spec: Spec, mesh: Mesh) -> int:
    """Return how many elements of a leaf one device holds.

    A dim that does not divide is padded, so its local size is rounded up.
    """
    pairs = zip(shape, pad_spec(spec, len(shape)), strict=True)
    return math.prod(-(-n // _num_shards(entry, mesh)) for n, entry in pairs)


def stored_spec(spec: LeafSpec, sharded: bool) -> Spec:
    """Return `spec.sharded` if the stage table shards this kind of state, else `spec.base`."""
    return spec.sharded if sharded else spec.base


def row_axes(mesh: Any, unsharded: Sequence[Any] | PartitionSpec) -> tuple[str, ...]:
    """Return the axes that split the rows of a leaf's unreduced gradient.

    They are the batch's axes and `pipe`, without the axes that split the leaf itself: with experts
    over `expert`, the devices of an expert group hold the gradients of different experts, and the
    stages of a pipeline hold those of different layers.

    Args:
      mesh: the device mesh.
      unsharded: partition spec of the unsharded leaf: its axes `tensor`, `expert` and `pipe`.
    """
    own_axes = list_axes(unsharded)
    first, *others = batch_axes(mesh)
    stages = [PIPE] if PIPE in mesh.axis_names else []
    return tuple(axis for axis in (first, *stages, *others) if axis not in own_axes)


def count_rows(mesh: Any, unsharded: Sequence[Any] | PartitionSpec) -> int:
    """Return the number of rows of a leaf's unreduced gradient, for arguments as in `row_axes`."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh, unsharded))
