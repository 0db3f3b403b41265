"""Read the weights of a zerojax checkpoint like a file of weights.

The checkpoint may come from any mesh, stage, tier and optimizer.

    # the newest intact step
    state = zj.import_params(program, "runs/gpt/checkpoints", key=jax.random.key(0))

Names are the ones that `export_safetensors` writes. Weights in 8 or 4 bits have arrays that no
other format holds; they are copied bit for bit into the program's own arrays. So are integer and
boolean weights, and untrained model state.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import (
    ENCODED,
    CheckpointError,
    SavedLeaf,
    SavedState,
    StateLeaf,
    first_few,
    open_together,
)
from zerojax.weights.exporting import read_part
from zerojax.weights.names import DTYPES, Tensor, split_path

_WEIGHTS = "weights"
_MODEL_STATE = "model_state"


class CheckpointWeights:
    """The weights of a checkpoint, used like a file of weights.

    Attributes:
      path: folder of the step.
      tensors: weights by name, without weights in 8 or 4 bits and without integers and booleans.
      tiled: names of the weights that are stacks of tiles.
      saved: the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str], mesh: Mesh) -> None:
        """Open the checkpoint; all processes of the mesh must do this together.

        Args:
          path: folder of a step, or a directory of steps, whose newest intact step is opened.
          mesh: mesh of the program.

        Raises:
          CheckpointError: the checkpoint cannot be read, an update of its weights is still to be
            applied, or two weights have the same name.
          DamagedError: the checkpoint is damaged.
        """
        self.saved = open_together(path, mesh)
        try:
            self.saved.check_settled()
            self.path = os.path.dirname(self.saved.folder)
            self._leaves = self._named()
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, Tensor] = {}
        for name, leaf in self._leaves.items():
            saved_leaf = self.saved.leaves[leaf]
            self.tensors[name] = Tensor(saved_leaf.shape, saved_leaf.dtype)
        self.tiled = frozenset(
            name for name, leaf in self._leaves.items() if self.saved.leaves[leaf].is_tiled
        )

    def _named(self) -> dict[str, str]:
        """Return the leaf of each unencoded floating weight, by its name in a file."""
        leaves: dict[str, str] = {}
        for leaf, saved_leaf in self.saved.leaves.items():
            if not leaf.startswith(_WEIGHTS) or ENCODED in leaf or saved_leaf.dtype not in DTYPES:
                continue
            name = ".".join(split_path(leaf))
            namesake = leaves.setdefault(name, leaf)
            if namesake != leaf:
                raise CheckpointError(
                    f"{self.path}: {namesake} and {leaf} are both {name}: rename one of them"
                )
        return leaves

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a weight.

        Args:
          name: name of the weight.
          box: (start, stop) of the part along each dim.

        Raises:
          DamagedError: a file is missing, or its bytes are lost.
          CheckpointError: a file cannot be read now.
        """
        out = np.empty([stop - start for start, stop in box], numpy_dtype(self.tensors[name].dtype))
        read_part(self.saved, self._leaves[name], box, out)
        return out

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.saved.close()


@dataclasses.dataclass(frozen=True)
class Untouched:
    """Leaves of a checkpoint that a program copies unchanged.

    Attributes:
      leaves: leaves whose bytes are in records, by name: arrays of weights in 8 or 4 bits, integer
        or boolean weights, and untrained model state.
      values: small leaves of the untrained model state, by name.
      keys: implementations of the random keys in the untrained model state, by name.
      weights: paths of the weights in 8 or 4 bits, in the parameter tree.
    """

    leaves: Mapping[str, SavedLeaf] = dataclasses.field(default_factory=dict)
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weights: frozenset[str] = frozenset()


def untouched(saved: SavedState, state_leaves: Iterable[StateLeaf]) -> Untouched:
    """Return the leaves of a checkpoint that a program copies unchanged.

    Args:
      saved: the checkpoint.
      state_leaves: leaves of the program's state.

    Raises:
      CheckpointError: a weight is in 8 or 4 bits in the checkpoint, and in another format in the
        program.
    """
    leaves = list(state_leaves)
    formats: dict[str, str] = {}
    arrays: dict[str, SavedLeaf] = {}
    for name, leaf in saved.leaves.items():
        if not name.startswith(_WEIGHTS):
            continue
        if ENCODED not in name and leaf.dtype not in DTYPES:
            arrays[name] = leaf
        if ENCODED in name:
            weight, _, array = name.partition(ENCODED)
            formats[weight.removeprefix(_WEIGHTS)] = array.split(".")[0]
            arrays[name] = leaf
    program_formats: dict[str, str] = {}
    for leaf in leaves:
        if leaf.encodes:
            program_formats[leaf.encodes] = leaf.name.partition(ENCODED)[2].split(".")[0]

    def in_format(format: str | None) -> str:
        return "not encoded" if format is None else f"in {format}"

    wrong = []
    for path, format in sorted(formats.items()):
        if program_formats.get(path) != format:
            wrong.append(
                f"{'.'.join(split_path(_WEIGHTS + path))} in {format}, and here it is "
                f"{in_format(program_formats.get(path))}"
            )
    if wrong:
        raise CheckpointError(
            f"{saved.folder} holds {first_few(wrong)}. Frozen weights in 8 or 4 bits are "
            "copied bit for bit: import into a program with "
            f"frozen_dtype={next(iter(formats.values()))!r}, or import the folder that "
            "the base came from"
        )
    names = {leaf.name for leaf in leaves if leaf.name.startswith(_MODEL_STATE)}
    model_state = {name: leaf for name, leaf in saved.leaves.items() if name in names}
    values = {name: value for name, value in saved.values.items() if name in names}
    keys = {name: key for name, key in saved.keys.items() if name in names}
    return Untouched(arrays | model_state, values, keys, frozenset(formats))
