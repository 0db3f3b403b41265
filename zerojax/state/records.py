"""Read and write one record inside a jitted loop: how layers and tiles move between tiers.

A stack holds one leaf of all layers, `[L, ...]`, in its tier. Reading layer l slices the stack and
moves the slice to the device; writing moves a value to the tier and updates the stack in place. An
index is linear in its loop's counter, so that XLA for GPUs knows the address of each record, and
copy engines move it (`host_offload.device.self_test`).

    for t in ticks:     take = ring[t mod d];  ring[t mod d] = read(stack, l(t + d));  tick(take)

A stack of tiles, `[L, T, ...]`, has one record for each tile. Inside a tick of the loop over
layers, the index of a tile is a pair; in a loop over all tiles it is the tile's number l T + k.

A fetch is issued in the tick that frees its slot, and its result is used `distance` ticks later. If
a phase writes the stacks that it fetches from, a write waits for the fetch of its tick, because XLA
copies a stack whose reads and writes it cannot order.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from host_offload.engine import DiskRecords
from zerojax.sharding import Spec, named, place
from zerojax.state.train_state import OnDisk, Split

Array = jax.Array


class Tile(NamedTuple):
    """The index of one tile of one layer.

    Attributes:
      layer: i32[], number of the layer.
      tile: i32[], number of the tile in its layer.
      of: T, the number of tiles in a layer.
    """

    layer: Array
    tile: Array
    of: int


class TileNumber(NamedTuple):
    """The index of one tile among the tiles of all layers.

    Attributes:
      number: i32[], l T + k.
    """

    number: Array


class OnDevice(NamedTuple):
    """The index of a layer whose optimizer state and masters stay on the device.

    In a Split, such a layer is in the first part.

    Attributes:
      layer: i32[], number of the layer.
    """

    layer: Array


Index = Array | OnDevice | Tile | TileNumber
"""The index of a record in a stack: i32[] layer, a layer that stays on the device, or a tile."""


@dataclasses.dataclass(frozen=True)
class RecordSpec:
    """How one leaf of one layer is stored.

    Attributes:
      mesh: the device mesh.
      spec: sharding spec of the leaf, without the layer dim, and without the tile dim in a stack of
        tiles.
      tier: tier where the leaf is stored; for a Split stack, the tier of its second part.
      disk_records: the records that hold the leaf in the nvme tier, else None.
      leaf: position of the leaf among the leaves of `disk_records`.
    """

    mesh: Mesh
    spec: Spec
    tier: str
    disk_records: DiskRecords | None = None
    leaf: int = 0

    @property
    def is_away(self) -> bool:
        """Whether the leaf is stored off the device."""
        return self.tier != "device"

    @property
    def sharding(self) -> NamedSharding:
        """The leaf's sharding on the device."""
        return named(self.mesh, self.spec)

    def read(self, stack: Any, index: Index) -> Array:
        """Return one record of a stack, on the device.

        Args:
          stack: [L, ...], a Split, or [L, T, ...] if the index is the index of a tile.
          index: index of the record.
        """
        if isinstance(index, Tile):
            # Tiles are never in a Split: only full layers stay on the device
            # (`zerojax.config.untiled_setting`).
            tile_shape = stack.shape[2:]
            start = (index.layer, index.tile, *(0,) * len(tile_shape))
            value = jax.lax.dynamic_slice(stack, start, (1, 1, *tile_shape)).reshape(tile_shape)
            return self.load(value) if self.is_away else value
        if isinstance(index, TileNumber):
            # One dim over all tiles: with two dims, the indices would not be linear in the number.
            return self.read(stack.reshape(-1, *stack.shape[2:]), index.number)
        if isinstance(stack, Split) and isinstance(index, OnDevice):
            return jax.lax.dynamic_index_in_dim(stack.device, index.layer, 0, keepdims=False)
        # Sliced in its tier, then moved: one record crosses the link, not the full stack.
        layers, number = _off_device(stack, index)
        value = jax.lax.dynamic_index_in_dim(layers, number, 0, keepdims=False)
        return self.load(value) if self.is_away else value

    def write(self, stack: Any, index: Index, value: Array) -> Any:
        """Return the stack with `value` as its record at `index`, updated in place."""
        if isinstance(index, Tile):
            start = (index.layer, index.tile, *(0,) * value.ndim)
            return jax.lax.dynamic_update_slice(stack, self.store(value)[None, None], start)
        if isinstance(index, TileNumber):
            tiles = stack.reshape(-1, *value.shape)
            return self.write(tiles, index.number, value).reshape(stack.shape)
        if isinstance(stack, Split) and isinstance(index, OnDevice):
            value = jax.lax.with_sharding_constraint(value, self.sharding)
            layers = jax.lax.dynamic_update_index_in_dim(stack.device, value, index.layer, 0)
            return Split(layers, stack.host)
        layers, number = _off_device(stack, index)
        layers = jax.lax.dynamic_update_index_in_dim(layers, self.store(value), number, 0)
        return Split(stack.device, layers) if isinstance(stack, Split) else layers

    def load(self, value: Any) -> Array:
        """Move a value from its tier to the device.

        In the nvme tier, the value is a leaf with its own record.
        """
        if isinstance(value, OnDisk):
            return read_layer([self], [value], jnp.int32(0))[0]
        if not self.is_away:
            return value
        return jax.device_put(value, place(self.mesh, self.spec, "device"))

    def store(self, value: Array, old: Any = None) -> Any:
        """Move a value from the device to its tier; in the nvme tier, `old` is overwritten."""
        if isinstance(old, OnDisk):
            return write_layer([self], [old], jnp.int32(0), [value])[0]
        value = jax.lax.with_sharding_constraint(value, self.sharding)
        if not self.is_away:
            return value
        return jax.device_put(value, place(self.mesh, self.spec, self.tier))


def read_layer(records: Sequence[RecordSpec], stacks: Sequence[Any], index: Index) -> list[Array]:
    """Return one record of several stacks, on the device.

    Args:
      records: how each leaf is stored; the leaves on disk are all leaves of one kind, in the kind's
        order.
      stacks: one stack for each leaf: [L, ...], a Split, or OnDisk; [L, T, ...] if the index is the
        index of a tile.
      index: index of the record.
    """
    on_disk = [i for i, stack in enumerate(stacks) if _on_disk(stack, index) is not None]
    fetched: dict[int, Array] = {}
    if on_disk:
        # One fetch for all leaves of the kind: a record is read from disk as a unit.
        first = on_disk[0]
        leaf = _on_disk(stacks[first], index)
        assert leaf is not None
        disk_records = _disk_records(records[first])
        arrays = disk_records.fetch(leaf.token, _number(stacks[first], index))
        fetched = dict(zip(on_disk, arrays, strict=True))
    values = []
    for i, (record, stack) in enumerate(zip(records, stacks, strict=True)):
        values.append(fetched[i] if i in fetched else record.read(stack, index))
    return values


def write_layer(
    records: Sequence[RecordSpec], stacks: Sequence[Any], index: Index, values: Sequence[Array]
) -> list[Any]:
    """Return the stacks with `values` as their record at `index`.

    Args:
      records: how each leaf is stored; the leaves on disk are all leaves of one kind, in the kind's
        order.
      stacks: one stack for each leaf, as in `read_layer`.
      index: index of the record.
      values: one array for each leaf, on the device.
    """
    on_disk = [i for i, stack in enumerate(stacks) if _on_disk(stack, index) is not None]
    token = None
    if on_disk:
        # All leaves of the kind form one record, which one callback moves.
        first = on_disk[0]
        leaf = _on_disk(stacks[first], index)
        assert leaf is not None
        shards = [jax.lax.with_sharding_constraint(values[i], records[i].sharding) for i in on_disk]
        disk_records = _disk_records(records[first])
        token = disk_records.store(leaf.token, _number(stacks[first], index), shards)
    stacks_after = []
    for record, stack, value in zip(records, stacks, values, strict=True):
        leaf = _on_disk(stack, index)
        if leaf is None:
            stacks_after.append(record.write(stack, index, value))
            continue
        assert token is not None
        # All leaves of the kind carry the token of this store, so any later read of one of them
        # follows it.
        leaf = dataclasses.replace(leaf, token=token)
        stacks_after.append(Split(stack.device, leaf) if isinstance(stack, Split) else leaf)
    return stacks_after


def load_leaves(records: Sequence[RecordSpec], values: Sequence[Any]) -> list[Array]:
    """Move unstacked leaves to the device.

    Args:
      records: how each leaf is stored; leaves on disk are all leaves of one kind, in the kind's
        order.
      values: the stored leaves.
    """
    if values and isinstance(values[0], OnDisk):
        return read_layer(records, values, jnp.int32(0))
    return [r.load(value) for r, value in zip(records, values, strict=True)]


def store_leaves(
    records: Sequence[RecordSpec], values: Sequence[Array], old: Sequence[Any]
) -> list[Any]:
    """Move unstacked leaves from the device to their tiers.

    Args:
      records: how each leaf is stored; leaves on disk are all leaves of one kind, in the kind's
        order.
      values: new values, on the device.
      old: the stored leaves before; leaves on disk are overwritten.
    """
    if old and isinstance(old[0], OnDisk):
        return write_layer(records, old, jnp.int32(0), values)
    stored = zip(records, values, old, strict=True)
    return [record.store(value, before) for record, value, before in stored]


def _off_device(stack: Any, index: Array | OnDevice) -> tuple[Any, Array]:
    """Return the array or OnDisk that holds a layer off the device, and its number in it."""
    # An OnDevice index also serves stacks that are not Split, such as gradients: the layer alone is
    # their index.
    layer = index.layer if isinstance(index, OnDevice) else index
    if isinstance(stack, Split):
        return stack.host, layer - stack.device.shape[0]
    return stack, layer


def _on_disk(stack: Any, index: Index) -> OnDisk | None:
    """Return the part of a stack that is on disk, if it holds the record at `index`."""
    if isinstance(stack, Split):
        stack = None if isinstance(index, OnDevice) else stack.host
    return stack if isinstance(stack, OnDisk) else None


def _number(stack: Any, index: Index) -> Array:
    """Return the number of a record on disk."""
    if isinstance(index, Tile):
        return index.layer * index.of + index.tile
    if isinstance(index, TileNumber):
        return index.number
    return _off_device(stack, index)[1]


def _disk_records(record: RecordSpec) -> DiskRecords:
    assert record.disk_records is not None
    return record.disk_records


def pick(values: Sequence[Any] | Mapping[int, Any], indices: Sequence[int]) -> list[Any]:
    """Return `values` at `indices`."""
    return [values[i] for i in indices]
