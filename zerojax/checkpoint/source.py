"""Where a restore reads each leaf from, and whether the checkpoint belongs to this program's model
and optimizer at all.

    saved as                                  read from
    a leaf of the same shape                  its records, box by box
    a stack of other tiles                    its records, box by box of the dense weight (`zerojax.checkpoint.retile`)
    a weight in 8 or 4 bits for other shards  its records, block by block (the same)
    a small value                             the manifest
    nothing, and the config alone needs it    the value with which it starts: a loss scale, a count, no pending update

A leaf of the program that fits no row is a difference, and so is a saved leaf that the program does
not have. The error names the first few.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import Box
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    optimizer_difference,
    unreadable,
)
from zerojax.checkpoint.leaves import ENCODED, ROUNDING_STEP, StateLeaf
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.retile import Reblocked, Retiled, of_mlp, reblocked, retiled
from zerojax.precision import LossScaling, init_loss_scale

logger = logging.getLogger("zerojax")
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Where a leaf's numbers come from.

    Attributes:
      leaf: of the program's state.
      saved: the checkpoint.
      value: the number, or numbers, themselves, where they are not in its records.
      tiles: how to read it if it was saved in other tiles.
      blocks: how to read it if it is an array of a weight in 8 or 4 bits that was saved for other
        shards.
    """

    leaf: StateLeaf
    saved: SavedState
    value: np.ndarray | None = None
    tiles: Retiled | None = None
    blocks: Reblocked | None = None

    @property
    def is_converted(self) -> bool:
        """Whether what is read is not the saved leaf as it is: a value, other tiles, or other
        blocks.
        """
        return self.value is not None or self.tiles is not None or self.blocks is not None

    def fill(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a part of the leaf; its shape may lack the box's leading dims of 1.

        Raises:
          DamagedError: a file is not there, or its bytes are lost.
          CheckpointError: a file cannot be read now.
        """
        shape = tuple(stop - start for start, stop in box)
        if self.value is not None:
            part = (
                self.value[tuple(slice(*ends) for ends in box)] if self.value.shape else self.value
            )
            out[...] = part.reshape(out.shape) if part.shape else part
            return
        try:
            if self.tiles is not None:
                self.tiles.read(self.saved.records, self.leaf.name, box, out.reshape(shape))
            elif self.blocks is not None:
                self.blocks.read(self.saved.records, self.leaf.name, box, out.reshape(shape))
            else:
                self.saved.records.read(self.leaf.name, box, out.reshape(shape))
        except OSError as error:
            damage = f"the checkpoint {self.saved.folder} is damaged: {error}"
            raise unreadable(
                error, f"reading the checkpoint {self.saved.folder}", damage
            ) from error
        except KeyError as error:
            raise DamagedError(f"the checkpoint {self.saved.folder} is damaged: {error}") from error

    def array(self, abstract: Any) -> jax.Array:
        """Return the whole leaf where it rests."""
        if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
            assert self.value is not None
            impl = self.saved.keys.get(self.leaf.name)
            try:
                key = jax.random.wrap_key_data(jnp.asarray(self.value), impl=impl)
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self.saved.folder}: {self.leaf.name} {self.value.dtype}{list(self.value.shape)} is no random key of "
                    f"{impl or 'the default implementation'}: {error}"
                ) from error
            return jax.device_put(key, abstract.sharding)
        return self._array(abstract.shape, abstract.sharding, lambda box: box)

    def record(self, index: Sequence[int], sharding: Any) -> jax.Array:
        """Return one record of the leaf on the device."""
        front = tuple((i, i + 1) for i in index)
        return self._array(self.leaf.shape[self.leaf.lead :], sharding, lambda box: front + box)

    def _array(
        self, shape: Sequence[int], sharding: Any, box_of_leaf: Callable[[Box], Box]
    ) -> jax.Array:
        """Return an array that is a part of the leaf.

        Args:
          shape: of the array.
          sharding: of the array.
          box_of_leaf: where a box of the array is in the leaf.
        """
        shards: dict[Box, np.ndarray] = {}  # devices that hold the same read it once

        def shard(index: Any) -> np.ndarray:
            box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            if box not in shards:
                # In the dtype that the leaf has here: what is read is cast on its way.
                out = np.empty([stop - start for start, stop in box], self.leaf.dtype)
                self.fill(box_of_leaf(box), out)
                shards[box] = out
            return shards[box]

        return jax.make_array_from_callback(tuple(shape), sharding, shard)


def find_sources(
    leaves: Sequence[StateLeaf], saved: SavedState, loss_scaling: LossScaling
) -> list[LeafSource]:
    """Return what to read for each leaf.

    Args:
      leaves: of the program's state.
      saved: the checkpoint.
      loss_scaling: of the program, where the checkpoint has none.

    Raises:
      CheckpointError: leaves that differ.
    """
    differences: list[str] = []
    shapes = {leaf.name: leaf.shape for leaf in leaves}
    sources = [_source(leaf, shapes, saved, loss_scaling, differences) for leaf in leaves]
    # An import has none: its optimizer state is made for the program's own tiles.
    if saved.has_opt_state:
        differences += _unconverted(sources)
    # The other direction: what was saved, and nothing here reads.
    unread = sorted(
        name
        for name in [*saved.leaves, *saved.values]
        if name not in shapes and not _may_be_left(name, saved)
    )
    differences += [f"{name}, which this program's state has not" for name in unread]
    if differences and all(ENCODED in difference for difference in differences):
        raise CheckpointError(
            f"the checkpoint {saved.folder} holds frozen weights in 8 or 4 bits in other blocks than this program: "
            f"{differences[0]}{_why_encoded(differences)}"
        )
    if differences:
        raise CheckpointError(
            f"the checkpoint {saved.folder} is of another model, optimizer or setting. It holds: {first_few(differences)}"
            f"{_why_encoded(differences) or (_explained(leaves, saved, differences) if saved.has_opt_state else '')}"
        )
    return sources


def _why_encoded(differences: Sequence[str]) -> str:
    """Return what to do where weights in 8 or 4 bits differ."""
    if not any(ENCODED in difference for difference in differences):
        return ""
    return (
        ". Frozen weights in 8 or 4 bits are restored bit for bit or not at all: under the frozen_dtype that they were saved "
        "with, at a stage and on a mesh whose shards hold the same blocks. Restore them there, or import the base anew by "
        "zerojax.import_params"
    )


def _explained(leaves: Sequence[StateLeaf], saved: SavedState, differences: Sequence[str]) -> str:
    """Return what to say where the weights are the same, and others are frozen or another optimizer
    keeps its state.
    """
    if frozen := _frozen_differences(leaves, saved):
        return frozen
    if any(difference.removeprefix("no ").startswith("weights") for difference in differences):
        return ""
    names = [leaf.name for leaf in leaves]
    return optimizer_difference(
        names, [*saved.leaves, *saved.values], os.path.dirname(saved.folder)
    )


def _frozen_differences(leaves: Sequence[StateLeaf], saved: SavedState) -> str:
    """Return what to say where other weights are frozen here than in a checkpoint, or nothing."""
    here, there = {leaf.name for leaf in leaves if leaf.is_frozen}, saved.frozen
    if here == there:
        return ""
    parts = [
        f"frozen {where} alone: {first_few(sorted(names))}"
        for where, names in (("here", here - there), ("in the checkpoint", there - here))
        if names
    ]
    return (
        f". Other weights are frozen: {'; '.join(parts)}. Restore it with the same `frozen`; or take its weights alone, for a "
        f"fresh optimizer state: zerojax.import_params(program, {os.path.dirname(saved.folder)!r}, key=key)"
    )


def first_few(differences: Sequence[str]) -> str:
    """Return the first differences, and how many more there are."""
    more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    return f"{'; '.join(differences[:_MOST_NAMED])}{more}"


def _source(
    leaf: StateLeaf,
    shapes: Mapping[str, tuple[int, ...]],
    saved: SavedState,
    loss_scaling: LossScaling,
    differences: list[str],
) -> LeafSource:
    """Return what to read for a leaf; what it lacks is added to `differences`, so that all are
    found at once.
    """
    name = leaf.name
    if name in saved.values:
        value = saved.values[name]
        if value.shape != leaf.shape and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            differences.append(
                f"{name} {value.dtype}{list(value.shape)}, and here it is {list(leaf.shape)}"
            )
        return LeafSource(leaf, saved, value=value)
    if name in saved.leaves:
        shape = saved.leaves[name].shape
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            differences.append(f"{name} {list(shape)} in records, where no random key is")
            return LeafSource(leaf, saved)
        if shape == leaf.shape:
            return LeafSource(leaf, saved)
        try:
            if leaf.encodes:
                saved_shapes = {name: other.shape for name, other in saved.leaves.items()}
                return LeafSource(
                    leaf, saved, blocks=reblocked(name, shapes, saved_shapes, leaf.lead)
                )
            return LeafSource(leaf, saved, tiles=_retiled(leaf, shapes, saved))
        except ValueError as error:
            differences.append(f"{name} {list(shape)}, and here it is {list(leaf.shape)}{error}")
        # Stands in for the source until all differences are raised together.
        return LeafSource(leaf, saved)
    value = _initial_value(name, saved, loss_scaling)
    # Without a pending update its gradients are never read, so zeros will do.
    if value is None and not name.startswith("pending.grads"):
        differences.append(f"no {name} {list(leaf.shape)}")
    # Zeros stand in until all differences are raised; numpy has no dtype of random keys.
    dtype = np.uint32 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.dtype
    return LeafSource(leaf, saved, value=np.zeros((), dtype) if value is None else value)


def _retiled(leaf: StateLeaf, shapes: Mapping[str, tuple[int, ...]], saved: SavedState) -> Retiled:
    saved_leaf = saved.leaves[leaf.name]
    saved_shapes = {name: other.shape for name, other in saved.leaves.items()}
    return retiled(
        saved_leaf.shape,
        leaf.shape,
        stacked=saved_leaf.lead > 0 and leaf.lead > 0,
        tiled=(saved_leaf.is_tiled, leaf.tiles),
        is_mlp=of_mlp(leaf.name, shapes) and of_mlp(leaf.name, saved_shapes),
    )


def _initial_value(name: str, saved: SavedState, loss_scaling: LossScaling) -> np.ndarray | None:
    """Return the value of a leaf that states of another config do not have."""
    if name.startswith("loss_scale."):
        logger.info("the checkpoint holds no loss scale: it starts as the config says")
        return np.asarray(getattr(init_loss_scale(loss_scaling), name.partition(".")[2]))
    if name == ROUNDING_STEP:
        # Moments in float32 are not rounded and have no count of it, so the count starts at the
        # step.
        return saved.values.get("step")
    if name.startswith("pending.") and not name.startswith("pending.grads"):
        return np.zeros((), np.float32)  # no update is pending
    return None


def _unconverted(sources: Sequence[LeafSource]) -> list[str]:
    """Return what to say of leaves that belong to a weight which is read in other tiles, and are
    not like it.

    Such are the row and column sums of a factored moment: they may have the same shape for other
      tiles, and other meaning.
    """
    tiles = {
        s.leaf.name.removeprefix("weights"): s.tiles
        for s in sources
        if s.leaf.name.startswith("weights")
    }
    differences = []
    for source in sources if any(tiles.values()) else ():
        name, shape = source.leaf.name, list(source.leaf.shape)
        # The longest, since one weight's path may end in another's.
        owner = max((path for path in tiles if name.endswith(path)), key=len, default=None)
        if (
            owner is not None
            and tiles[owner] is not None
            and source.tiles is None
            and math.prod(shape) > 1
        ):
            differences.append(
                f"{name} {shape}, which is not like its weight, and so is not converted to other tiles"
            )
    return differences


def _may_be_left(name: str, saved: SavedState) -> bool:
    """Tell whether a leaf of a checkpoint may be left unread by states of another config.

    Raises:
      CheckpointError: it holds an update that was not done yet.
    """
    if name.startswith("pending."):
        if np.any(saved.values.get("pending.ready", True)):
            raise CheckpointError(
                f"the checkpoint {saved.folder} holds an update that was not done yet (delayed_update=True): restore it under "
                "delayed_update=True"
            )
        return True
    return name.startswith("loss_scale.") or name == ROUNDING_STEP
