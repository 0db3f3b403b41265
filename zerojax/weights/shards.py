"""Safetensors split over several files with an index, as Hugging Face publishes large models.

    model.safetensors.index.json    {"metadata": .., "weight_map": {tensor: file next to the index}}

All files stay open, and each tensor is read from the file that holds it.
"""

import os

import numpy as np

from host_offload.disk import Box, ReadFile
from host_offload.fields import Field, parse_json
from zerojax.checkpoint import CheckpointError, explained, first_few
from zerojax.weights.names import Tensor
from zerojax.weights.safetensors import SafetensorsFile

INDEX = ".safetensors.index.json"
"""Suffix of the name of an index of shards."""
INDEX_NAME = "model" + INDEX
"""Name of the index in a folder of one model."""
WHOLE = "model.safetensors"
"""Name of the file in a folder whose weights are in one file."""
_MOST_INDEX = 64 << 20


def weights_in(folder: str) -> str | None:
    """Return the path of a folder's `model.safetensors` or safetensors index, or None.

    transformers looks in the same order. An index with another name counts if there is nothing
    else.

    Args:
      folder: path of the folder.

    Raises:
      OSError: the folder cannot be read.
    """
    names = sorted(os.listdir(folder))
    candidates = [name for name in (WHOLE, INDEX_NAME) if name in names]
    candidates += [name for name in names if name.endswith(INDEX)]
    return os.path.join(folder, candidates[0]) if candidates else None


class ShardedSafetensors:
    """Safetensors files under one index.

    Attributes:
      path: path of the index.
      files: names of the shards, sorted.
      shard_of: name of the shard of each tensor, by tensor name.
      tensors: shapes and dtypes, by name.
      tiled: names of the tensors that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the index, and the header of each file.

        Args:
          path: path of the index.

        Raises:
          CheckpointError: the file is not a safetensors index, a shard is missing or damaged, or a
            tensor is in another file than the index says.
        """
        self.path = path
        try:
            index = Field(parse_json(ReadFile(path).read_all(_MOST_INDEX)))
            shard_names = {name: shard.text() for name, shard in index["weight_map"].fields()}
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors index: {error}") from error
        self.files = tuple(sorted(set(shard_names.values())))
        wrong = [
            repr(name)
            for name in self.files
            if os.path.basename(name) != name or not name.endswith(".safetensors")
        ]
        if wrong:
            raise CheckpointError(f"{path} names {first_few(wrong)}: files next to it are needed")
        folder = os.path.dirname(path)
        absent = [name for name in self.files if not os.path.exists(os.path.join(folder, name))]
        if absent:
            raise CheckpointError(
                f"{path} names {len(self.files)} files, {len(absent)} missing next to it: "
                f"{first_few(absent)}"
            )
        self._shards = {name: SafetensorsFile(os.path.join(folder, name)) for name in self.files}
        self.shard_of: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        for shard, file in self._shards.items():
            for name, tensor in file.tensors.items():
                first = self.shard_of.setdefault(name, shard)
                if first != shard:
                    raise CheckpointError(f"{path}: {name} is both in {first} and in {shard}")
                self.tensors[name] = tensor
        wrong = [
            f"{name} in {shard}"
            for name, shard in shard_names.items()
            if self.shard_of.get(name) != shard
        ]
        if wrong:
            raise CheckpointError(f"{path} lists tensors that are not there: {first_few(wrong)}")
        self.tiled = frozenset[str]().union(*(file.tiled for file in self._shards.values()))

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor's file cannot be read.
        """
        return self._shards[self.shard_of[name]].read(name, box)
