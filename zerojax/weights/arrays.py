"""Read a tree of arrays in memory like a file of weights: box by box, each process its own part.

    state = zj.import_params(program, {"embed": {"table": array}, ...}, key=jax.random.key(0))

An init function that returns such arrays would put them as constants into the program that creates
the first state: each device would hold all of them, in addition to the state. Here a box is sliced
on the device that holds the array, and only the box crosses to the host.
"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from host_offload.disk import Box
from zerojax.checkpoint import CheckpointError
from zerojax.trees import Tree
from zerojax.weights.names import Tensor, split_path


class ArrayTree:
    """Arrays in memory, used like a file of weights.

    Attributes:
      path: what errors call the tree.
      tensors: the arrays' shapes and dtypes, by name as in safetensors.
      tiled: empty, since it is not known which arrays are tiles.
    """

    def __init__(self, tree: Tree) -> None:
        """Name the leaves of a tree.

        Args:
          tree: tree of numpy or JAX arrays.

        Raises:
          ValueError: a leaf is not an array, or not available in this process; or two leaves have
            the same name.
        """
        self.path = "the tree of arrays"
        self.tiled = frozenset[str]()
        self._arrays: dict[str, np.ndarray | jax.Array] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            try:
                name = ".".join(split_path(f"weights{jax.tree_util.keystr(path)}"))
            except CheckpointError as error:
                raise ValueError(f"the tree of arrays: {error}") from error
            if name in self._arrays:
                raise ValueError(
                    f"the tree of arrays holds two leaves that are both {name}: rename one of them"
                )
            self._arrays[name] = _array(name, leaf)
        self.tensors = {
            name: Tensor(tuple(a.shape), np.dtype(a.dtype).name) for name, a in self._arrays.items()
        }

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of an array.

        Args:
          name: name of the array.
          box: (start, stop) of the part along each dim.
        """
        array = self._arrays[name]
        if not isinstance(array, jax.Array):
            return array[tuple(slice(*ends) for ends in box)]
        out = np.empty([stop - start for start, stop in box], array.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            held_box = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held_box, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            # The start is an argument: boxes of the same shape share a compiled slice.
            starts = [a - c for (a, _), (c, _) in zip(common, held_box, strict=True)]
            sizes = [b - a for a, b in common]
            # The program's mesh is in scope, and need not contain this device.
            with jax.set_mesh(Mesh(np.asarray([shard.device]), ("device",))):
                piece = jax.lax.dynamic_slice(shard.data, starts, sizes) if sizes else shard.data
            target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
            out[target] = np.asarray(piece)
        return out


def _array(name: str, leaf: Any) -> np.ndarray | jax.Array:
    """Return a leaf as an array that can be sliced.

    Raises:
      ValueError: the leaf is not an array of numbers, or cannot be read in this process.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | str | bytes):
        raise ValueError(
            f"the tree of arrays: {name} is a {type(leaf).__name__}, and an array is needed"
        )
    if not isinstance(leaf, jax.Array):
        array = np.asanyarray(leaf)
        if array.dtype == object:
            raise ValueError(
                f"the tree of arrays: {name} is a {type(leaf).__name__}, and an array is needed"
            )
        return array
    if isinstance(leaf, Tracer):
        raise ValueError(f"the tree of arrays: {name} is traced; import_params runs outside of jit")
    if leaf.is_deleted():
        raise ValueError(f"the tree of arrays: {name} was donated or deleted")
    if leaf.is_fully_replicated and not leaf.is_fully_addressable:
        return leaf.addressable_data(0)
    if not leaf.is_fully_addressable:
        raise ValueError(
            f"the tree of arrays: {name} {list(leaf.shape)} is partly on other processes' devices: "
            "pass numpy arrays that each process holds, or write the arrays to a file and import "
            "the file"
        )
    return leaf
