"""The device mesh: its axes, and which of them split batches and state.

    pipe       pipeline parallelism: each stage holds some of the layers (`zerojax.pipeline`)
    data       replicas of the state
    fsdp       ZeRO shards
    expert     expert parallelism: each shard holds some of the experts (`zerojax.experts`)
    context    context parallelism: each shard holds some tokens of a sequence (`zerojax.context`)
    tensor     tensor parallelism

The axes are in this order. The last one is the innermost, so neighboring devices share a tensor
group, then a context group. A mesh has `pipe`, `expert` and `context` only if they have more than
one device. With devices listed host by host, `fsdp` = GPUs per node and `data` = nodes is hybrid
sharding (MiCS, arXiv:2205.00119; hpZ of ZeRO++, arXiv:2306.10209): state is sharded inside a node
and replicated across nodes, and only gradients cross nodes.

Two functions say what the axes split, and the rest of the package asks them:

    batch_axes(mesh)   data, fsdp, expert            dim 0 of a batch, and of what depends on it
    zero_axes(mesh)    pipe, fsdp, expert, context   state, except for the axes in a leaf's own spec

`pipe` splits the layers of a stack by their numbers, so ZeRO splits only embedding and head over
it.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zerojax.user_values import as_integer

logger = logging.getLogger("zerojax")
Axes = Mapping[str, str | tuple[str, ...]]
"""For each axis of this package, the axis or axes of a user's mesh that it stands for."""
PIPE = "pipe"
DATA = "data"
FSDP = "fsdp"
EXPERT = "expert"
CONTEXT = "context"
TENSOR = "tensor"
AXES = (PIPE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)
"""All axes, the outermost first."""
OPTIONAL_AXES = (PIPE, EXPERT, CONTEXT)
"""Axes that a mesh has only if they have more than one device."""
_BATCH_AXES = (DATA, FSDP, EXPERT)
_ZERO_AXES = (PIPE, FSDP, EXPERT, CONTEXT)


def make_mesh(
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    pipe: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arrange devices in a mesh with the axes of this package.

    In order, these are `pipe`, `data`, `fsdp`, `expert`, `context` and `tensor`. The mesh has
    `pipe`, `expert` and `context` only if they have more than one device.

    Args:
      data: number of replicas of the sharded state.
      fsdp: number of ZeRO shards.
      tensor: number of tensor-parallel shards. At most one of the axes may be -1, which stands for
        the remaining devices.
      context: number of shards of each sequence (`zerojax.attention`). They are ZeRO shards too.
      expert: number of shards of the experts (`zerojax.moe`). For the rest of the state they are
        ZeRO shards, and they split the batch as `fsdp` does.
      pipe: number of pipeline stages, each of which holds some of the layers. For embedding and
        head they are ZeRO shards.
      devices: the devices, host by host; `jax.devices()` by default. Devices of a compile-only
        topology are accepted.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {
        PIPE: pipe,
        DATA: data,
        FSDP: fsdp,
        EXPERT: expert,
        CONTEXT: context,
        TENSOR: tensor,
    }
    for axis, size in sizes.items():
        number = as_integer(size)
        if number is None or (number < 1 and number != -1):
            raise ValueError(
                f"{axis}={size!r}: a positive integer is needed, or -1 for the rest of the devices"
            )
        sizes[axis] = number
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        default = ". fsdp is -1 by default: pass fsdp=1" if FSDP in free else ""
        number = "both" if len(free) == 2 else "all"
        raise ValueError(
            f"{' and '.join(free)} are {number} -1: at most one axis may stand for the rest"
            f"{default}"
        )
    known = math.prod(size for size in sizes.values() if size != -1)
    present = {axis: size for axis, size in sizes.items() if size != 1 or axis not in OPTIONAL_AXES}
    product = " x ".join(f"{axis} {size}" for axis, size in present.items())
    if free and len(devices) % known:
        raise ValueError(
            f"{product}: {len(devices)} devices do not divide by {known}; choose axes that do"
        )
    if free:
        sizes[free[0]] = len(devices) // known
    elif known != len(devices):
        raise ValueError(
            f"{product} = {known}, but there are {len(devices)} devices; set one axis to -1 "
            "for the rest"
        )
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis not in OPTIONAL_AXES)
    grid = np.asarray(devices, dtype=object).reshape(tuple(sizes[axis] for axis in axes))
    # With Auto axes a model needs no annotations: the partitioner propagates shardings from the
    # constraints.
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def own_mesh(mesh: Mesh, axes: Axes | None = None) -> Mesh:
    """Return a mesh with this package's axes, all automatic, over any mesh's devices.

    The devices keep their order. As from `make_mesh`, the result has `pipe`, `expert` and `context`
    only if they have more than one device.

        own_mesh(Mesh(.., ("replica", "x", "y")), {"data": "replica", "fsdp": ("x", "y")})

    A mesh that already has this form is returned unchanged. Otherwise a log line reports how the
    axes were mapped.

    Args:
      mesh: a mesh with any axes, explicit or automatic.
      axes: for each axis of this package, the axis of `mesh` that it stands for, or several axes
        that are neighbors there, the outer one first. An omitted axis has size 1. None maps axes by
        their names.

    Raises:
      ValueError: `mesh` is not a mesh; an axis does not exist or is named twice; axes to be merged
        are not neighbors; or an axis of `mesh` that has more than one device is not named.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "mesh must be a jax.sharding.Mesh, such as from zerojax.make_mesh, got "
            f"{type(mesh).__name__}"
        )
    is_automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    if axes is None and is_automatic and set(mesh.axis_names) == set(_list_needed_axes(mesh.shape)):
        return mesh
    if axes is None:
        axes = {axis: axis for axis in AXES if axis in mesh.axis_names}
    names_by_axis = _list_axes(mesh, axes)
    order = _order_axes(mesh, names_by_axis)
    sizes = list[int]()
    for axis in order:
        sizes.append(math.prod(mesh.shape[name] for name in names_by_axis.get(axis, ())))
    devices = mesh.devices.reshape(sizes)
    merged = Mesh(devices, tuple(order), axis_types=(AxisType.Auto,) * len(order))
    logger.info(
        "the mesh %s is used as %s, with automatic axes and the same order of devices",
        _describe(mesh),
        dict(merged.shape),
    )
    return merged


def _list_needed_axes(sizes: Mapping[str, int]) -> list[str]:
    """Return the axes that a mesh with these axis sizes has in this package."""
    return [axis for axis in AXES if axis not in OPTIONAL_AXES or sizes.get(axis, 1) > 1]


def _order_axes(mesh: Mesh, names_by_axis: Mapping[str, Sequence[str]]) -> list[str]:
    """Return this package's axes in the order in which a mesh has them.

    Args:
      mesh: mesh with any axes.
      names_by_axis: for each axis of this package, the axes of `mesh` that form it.

    Raises:
      ValueError: axes to be merged are not neighbors; or an axis of `mesh` that has more than one
        device is not named.
    """
    # Axes of size 1 do not affect the order of devices.
    large = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    owner = dict[str, str]()
    for axis, names in names_by_axis.items():
        owner.update(dict.fromkeys(names, axis))
    lost = [name for name in large if name not in owner]
    if lost:
        sizes = ", ".join(f"{name!r} of {mesh.shape[name]} devices" for name in lost)
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has the axis {sizes}, which is none of "
            f"{', '.join(AXES)}: "
            f'map it, as in axes={{"{FSDP}": {lost[0]!r}}}, or pass a mesh without it'
        )
    for axis, names in names_by_axis.items():
        _check_neighbours(axis, [name for name in names if name in large], large)

    order = list(dict.fromkeys(owner[name] for name in large))
    position = 0
    for axis in AXES:
        if axis not in order and axis not in OPTIONAL_AXES:
            order.insert(position, axis)
        if axis in order:
            position = order.index(axis) + 1
    return order


def _list_axes(mesh: Mesh, axes: Axes) -> dict[str, tuple[str, ...]]:
    """Return, for each axis of this package, the axes of a mesh that form it.

    Raises:
      ValueError: an axis does not exist, or is named twice.
    """
    if not isinstance(axes, Mapping):
        raise ValueError(
            f'axes={axes!r}: a dict is needed, such as {{"{FSDP}": {mesh.axis_names[-1]!r}}}'
        )
    names_by_axis: dict[str, tuple[str, ...]] = {}
    for axis, value in axes.items():
        if axis not in AXES:
            raise ValueError(f"axes has the key {axis!r}, and the axes are {', '.join(AXES)}")
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"axes[{axis!r}]={value!r}: the name of a mesh axis is needed, or a tuple of names"
            )
        unknown = [name for name in names if name not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"axes[{axis!r}]={value!r}: the mesh has the axes {mesh.axis_names}, and no "
                f"{unknown[0]!r}"
            )
        names_by_axis[axis] = tuple(names)
    all_names = list(itertools.chain(*names_by_axis.values()))
    twice = [name for name in all_names if all_names.count(name) > 1]
    if twice:
        raise ValueError(
            f"axes={dict(axes)!r} names {twice[0]!r} twice: each axis of the mesh may be part "
            "of only one axis"
        )
    return names_by_axis


def _check_neighbours(axis: str, names: Sequence[str], large: Sequence[str]) -> None:
    """Raise ValueError unless axes are adjacent and in order in a mesh.

    Merging other axes would change the order of the mesh's devices.
    """
    if not names:
        return
    first = large.index(names[0])
    if list(names) != list(large[first : first + len(names)]):
        raise ValueError(
            f"axes[{axis!r}]={tuple(names)!r}: axes are merged only if they follow each other "
            "in the "
            f"mesh, in this order, and its axes of more than one device are {tuple(large)!r}: "
            "transpose its devices, jax.sharding.Mesh(mesh.devices.transpose(..), ..)"
        )


def _describe(mesh: Mesh) -> str:
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return "{" + ", ".join(f"{name!r}: {size} ({kind.name})" for (name, size), kind in kinds) + "}"


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh, concrete or abstract, that split dim 0 of a batch."""
    return tuple(axis for axis in _BATCH_AXES if axis in mesh.axis_names)


def num_batch_shards(mesh: Any) -> int:
    """Return the number of devices over which dim 0 of a batch is split."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def zero_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh over which ZeRO splits a leaf.

    A leaf is not split again over the axes that its own spec names: `zerojax.sharding.leaf_spec`.
    """
    return tuple(axis for axis in _ZERO_AXES if axis in mesh.axis_names)


def num_zero_shards(mesh: Any) -> int:
    """Return the number of devices over which ZeRO splits a leaf whose spec names none of them."""
    return math.prod(mesh.shape[axis] for axis in zero_axes(mesh))


def describe_optional_axes(mesh: Any) -> str:
    """Return the sizes of a mesh's optional axes for an error, or ""."""
    axes = [axis for axis in OPTIONAL_AXES if axis in mesh.axis_names]
    return " and ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def check_automatic(caller: str, mesh: Any) -> None:
    """Raise ValueError for a mesh in scope, concrete or abstract, with explicit axes.

    Args:
      caller: name of the function that was called, for the error.
      mesh: the mesh.
    """
    explicit = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    if explicit:
        raise ValueError(
            f"{caller}: the mesh in scope has explicit axes, {', '.join(explicit)}, and automatic "
            "ones are needed: use a mesh from zj.make_mesh, or "
            "axis_types=(AxisType.Auto,) * len(axis_names) in yours"
        )


def splits_activations(mesh: Any) -> bool:
    """Return whether axes split activations in other dims than the batch."""
    return mesh.shape[TENSOR] > 1 or context_size(mesh) > 1


def context_size(mesh: Any) -> int:
    """Return the number of shards of a sequence: the size of `context`, or 1."""
    return mesh.shape.get(CONTEXT, 1)


def num_stages(mesh: Any) -> int:
    """Return the number of pipeline stages: the size of `pipe`, or 1."""
    return mesh.shape.get(PIPE, 1)
