"""Find the mesh axes that a collective runs over, from its device groups in any HLO notation.

    replica_groups={{0,1},{2,3}}
        lists; {} is one group of all devices
    replica_groups=[4,2]<=[2,4]T(1,0)
        arange(8).reshape(2, 4).T, reshaped: 4 groups of 2
    replica_groups=mesh['a'=4,'b'=2] {'a'}
        over axes of a mesh of XLA's own; a part of an axis is 'a':(2)2
    replica_groups=mesh['a'=8], device_ids=([4,2]T(1,0)) {'a'}
        over axes of a mesh whose devices are permuted
    source_target_pairs={{0,1},{1,0}}
        the pairs of a permute

What the numbers count depends on the collective (XLA's CollectiveOpGroupMode): replicas,
partitions, or all devices, numbered replica by replica. A program of `jax.jit` has one replica, and
its partition p is the p-th device of `mesh.devices.flat`.

Groups run over a set of axes if each group contains all devices that differ only in these axes. XLA
may also form other groups, such as halves of an axis.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerojax.hlo.parse import Instruction, parse_ints

OTHER = "other"
NONE = "none"
"""Values used instead of axis names.

OTHER: the groups are no product of mesh axes. NONE: each group is a single device.
"""

_INTS = r"\[([\d,]*)\]"
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(rf"replica_groups={_INTS}<={_INTS}(?:T\(([\d,]*)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<]([^\]>]*)[\]>](?:, )?(?:device_ids=)?(?:\((.*?\)?)\))? \{([^}]*)\}"
)
_PERMUTED = re.compile(rf"^(?:devices={_INTS}<=)?{_INTS}(?:T\(([\d,]*)\))?$")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:=(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BY_PARTITION = ("collective-permute", "all-to-all", "ragged-all-to-all")
"""Collectives that count partitions if they have a channel.

All other collectives then count replicas, each with all its partitions.
"""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a program, as a mesh arranges them.

    Attributes:
      sizes: sizes of the mesh's axes by name, in the mesh's order.
      replicas: number of replicas of the program.
      partitions: number of partitions of the program; devices are replicas x partitions.
    """

    sizes: Mapping[str, int]
    replicas: int
    partitions: int

    def axes(self, kind: str, i: Instruction) -> str:
        """Return the axes over which a collective runs, such as "tensor" or "data+fsdp".

        Args:
          kind: kind of collective, such as "all-gather".
          i: the collective's instruction.

        Returns:
          Names of the axes joined by "+", or `OTHER` or `NONE`.

        Raises:
          ValueError: the groups are in an unknown notation, or have different sizes.
        """
        if kind == "collective-permute":
            pairs = np.asarray(parse_ints(_match(_PAIRS, i)[1]), int).reshape(-1, 2)
            return self._axis_names(self._device_numbers(kind, i, pairs), is_group=False)
        groups = self._device_numbers(kind, i, self._groups(kind, i))
        return self._axis_names(groups, is_group=True)

    def _groups(self, kind: str, i: Instruction) -> np.ndarray:
        """Return the groups as they are written, [groups, devices]."""
        lists = _LISTS.search(i.text)
        if lists is not None:
            groups = [parse_ints(group) for group in re.findall(r"\{([\d,]*)\}", lists[1])]
            if len({len(group) for group in groups}) > 1:
                raise ValueError(f"{i.result}: groups of different sizes, {lists[0]}")
            if groups:
                return np.asarray(groups, int)
        if lists is not None or "replica_groups=" not in i.text:
            return np.arange(self._count(kind, i))[None]  # one group of all
        iota = _IOTA.search(i.text)
        if iota is not None:
            return _transposed_iota(parse_ints(iota[2]), iota[3]).reshape(parse_ints(iota[1]))
        mesh = _match(_MESH, i)
        return _mesh_groups(mesh[1], mesh[2], mesh[3])

    def _count(self, kind: str, i: Instruction) -> int:
        """Return the number of replicas, partitions or devices that a collective counts."""
        if "use_global_device_ids=true" in i.text:
            return self.replicas * self.partitions
        counts_partitions = "channel_id=" in i.text and kind in _BY_PARTITION
        return self.partitions if counts_partitions else self.replicas

    def _device_numbers(self, kind: str, i: Instruction, groups: np.ndarray) -> np.ndarray:
        """Return groups of device numbers, given groups of whatever the collective counts."""
        if "use_global_device_ids=true" in i.text:
            return groups
        replicas = np.arange(self.replicas)
        partitions = np.arange(self.partitions)
        group_size = groups.shape[1]
        if "channel_id=" not in i.text:  # each partition separately
            numbers = groups[None] * self.partitions + partitions[:, None, None]
            return numbers.reshape(-1, group_size)
        if kind in _BY_PARTITION:  # each replica separately
            numbers = replicas[:, None, None] * self.partitions + groups[None]
            return numbers.reshape(-1, group_size)
        numbers = groups[:, :, None] * self.partitions + partitions
        return numbers.reshape(len(groups), -1)

    def _axis_names(self, groups: np.ndarray, is_group: bool) -> str:
        """Return the axes in which the devices of a group, or of a permute's pair, differ."""
        sizes = tuple(self.sizes.values())
        coordinates = np.stack(np.unravel_index(groups, sizes))  # [axes, groups, devices]
        differ = (coordinates != coordinates[:, :, :1]).any((1, 2))
        names = [name for name, differs in zip(self.sizes, differ, strict=True) if differs]
        if not names:
            return NONE
        is_product = math.prod(self.sizes[name] for name in names) == groups.shape[1]
        return "+".join(names) if is_product or not is_group else OTHER


def read_devices(text: str, mesh: Any) -> Devices:
    """Return the devices of a compiled program.

    Args:
      text: the program's HLO, `compiled.as_text()`, whose first line states the number of devices.
      mesh: mesh that the program was compiled for, abstract or not.

    Raises:
      ValueError: the program has more or fewer devices than the mesh.
    """
    header = text[text.find("HloModule") :].partition("\n")[0]
    counts = [re.search(rf"{name}=(\d+)", header) for name in ("replica_count", "num_partitions")]
    replicas, partitions = (int(count[1]) if count else 1 for count in counts)
    if replicas * partitions != mesh.size:
        raise ValueError(
            f"the program runs on {replicas} x {partitions} devices (replicas x partitions), but "
            f"the mesh {dict(mesh.shape)} has {mesh.size}: give the mesh that it was compiled for"
        )
    return Devices(dict(mesh.shape), replicas, partitions)


def _match(pattern: re.Pattern[str], i: Instruction) -> re.Match[str]:
    match = pattern.search(i.text)
    if match is None:
        start = max(i.text.find("replica_groups="), i.text.find("source_target_pairs="), 0)
        raise ValueError(
            f"{i.result}: its device groups are in an unknown notation: "
            f"{i.text[start : start + 120]}"
        )
    return match


def _transposed_iota(dims: tuple[int, ...], order: str | None) -> np.ndarray:
    """Return 0, 1, .. as an array of these dims, transposed."""
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices.transpose(parse_ints(order)) if order else devices


@functools.lru_cache(maxsize=256)  # few distinct groups, many collectives each
def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Return the groups that a collective describes by axes of a mesh."""
    sizes = {name: int(size) for name, _, _, size in _AXIS.findall(mesh)}
    if device_ids is None:
        devices = np.arange(math.prod(sizes.values()))
    elif (iota := _PERMUTED.match(device_ids)) is not None:
        devices = _transposed_iota(parse_ints(iota[2]), iota[3])
    else:  # a list, preceded by its dims in an older notation
        devices = np.asarray(parse_ints(device_ids.rpartition("]")[2]))
    # Each axis becomes three dims, (before, part, after), since a collective may run over a part.
    factors = {}
    for name, before, part, _ in _AXIS.findall(axes):
        factors[name] = (int(before or 1), int(part or sizes[name]))
    dims = []
    group_dims = []
    for name, size in sizes.items():
        before, part = factors.get(name, (size, 1))
        group_dims.append(len(dims) + 1)
        dims += [before, part, size // (before * part)]
    devices = np.moveaxis(devices.reshape(dims), group_dims, range(-len(group_dims), 0))
    return devices.reshape(-1, math.prod(dims[d] for d in group_dims))
