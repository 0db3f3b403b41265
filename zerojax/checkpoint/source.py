"""Where the numbers of a leaf come from when a checkpoint is restored."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import Box
from zerojax.checkpoint.contents import ROUNDING_STEP, StateLeaf
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.retile import Retiled

MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Where a leaf's numbers come from.

    Attributes:
      content: the leaf.
      saved: the checkpoint.
      value: the number, or numbers, themselves, where they are not in its records.
      tiles: how to read it if it was saved in other tiles.
    """

    content: StateLeaf
    saved: SavedState
    value: np.ndarray | None = None
    tiles: Retiled | None = None

    def fill(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a part of the leaf; its shape may lack the box's leading dims of 1.

        Raises:
          DamagedError: a file cannot be read.
        """
        shape = tuple(stop - start for start, stop in box)
        if self.value is not None:
            out[...] = self.value
            return
        try:
            if self.tiles is not None:
                self.tiles.read(self.saved.records, self.content.name, box, out.reshape(shape))
            else:
                self.saved.records.read(self.content.name, box, out.reshape(shape))
        except (OSError, KeyError) as error:
            raise DamagedError(f"the checkpoint {self.saved.folder} is damaged: {error}") from error

    def array(self, abstract: Any) -> jax.Array:
        """Return the whole leaf where it rests."""
        if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
            assert self.value is not None
            key = jax.random.wrap_key_data(jnp.asarray(self.value), impl=self.saved.keys.get(self.content.name))
            return jax.device_put(key, abstract.sharding)
        return self._made(abstract.shape, abstract.sharding, lambda box: box)

    def record(self, index: Sequence[int], sharding: Any) -> jax.Array:
        """Return one record of the leaf on the device."""
        own = tuple((i, i + 1) for i in index)
        return self._made(self.content.shape[self.content.lead :], sharding, lambda box: own + box)

    def _made(self, shape: Sequence[int], sharding: Any, whole: Callable[[Box], Box]) -> jax.Array:
        made: dict[Box, np.ndarray] = {}

        def shard(index: Any) -> np.ndarray:
            box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            if box not in made:
                out = np.empty([stop - start for start, stop in box], self.content.dtype)
                self.fill(whole(box), out)
                made[box] = out
            return made[box]

        return jax.make_array_from_callback(tuple(shape), sharding, shard)


def unconverted(sources: Sequence[LeafSource]) -> list[str]:
    """Return what to say of leaves that belong to a weight which is read in other tiles, and are not like it.

    Such are the row and column sums of a factored moment: they may have the same shape for other tiles, and other meaning.
    """
    read = {s.content.name.removeprefix("weights"): s.tiles for s in sources if s.content.name.startswith("weights")}
    told = []
    for source in sources if any(read.values()) else ():
        name, shape = source.content.name, list(source.content.shape)
        owner = max((path for path in read if name.endswith(path)), key=len, default=None)
        if owner is not None and read[owner] is not None and source.tiles is None and math.prod(shape) > 1:
            told.append(f"{name} {shape}, which is not like its weight, and so is not converted to other tiles")
    return told


def may_be_left(name: str, saved: SavedState) -> bool:
    """Tell whether a leaf of a checkpoint may be left unread by states of another config.

    Raises:
      CheckpointError: it holds an update that was not done yet.
    """
    if name.startswith("pending."):
        if saved.values["pending.ready"]:
            raise CheckpointError(
                f"the checkpoint {saved.folder} holds an update that was not done yet (delayed_update=True): restore it under "
                "delayed_update=True"
            )
        return True
    return name.startswith("loss_scale.") or name == ROUNDING_STEP
