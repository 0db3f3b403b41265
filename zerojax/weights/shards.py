"""Safetensors in several files, as an index names them: what large models of Hugging Face are
published in.

    model.safetensors.index.json    {"metadata": .., "weight_map": {tensor: file beside the index}}

All files stay open, and each tensor is read from the one that holds it.
"""

import os
from typing import Any

from host_offload.disk import Box, ReadFile
from host_offload.fields import Field, parse_json
from zerojax.checkpoint import CheckpointError, explained, first_few
from zerojax.weights.names import Tensor
from zerojax.weights.safetensors import SafetensorsFile

INDEX = ".safetensors.index.json"
"""How the name of an index of shards ends."""
INDEX_NAME = "model" + INDEX
"""Of a folder of one model."""
WHOLE = "model.safetensors"
"""The file of a folder whose weights are in one."""
_MOST_INDEX = 64 << 20


def weights_in(folder: str) -> str | None:
    """Return the path of a folder's `model.safetensors`, or of its index of safetensors; None where
    it has neither.

    transformers asks in this order, too. An index of another name counts where there is nothing
    else.

    Raises:
      OSError: the folder cannot be read.
    """
    names = sorted(os.listdir(folder))
    found = next((name for name in (WHOLE, INDEX_NAME) if name in names), None)
    found = found or next((name for name in names if name.endswith(INDEX)), None)
    return None if found is None else os.path.join(folder, found)


class ShardedSafetensors:
    """Safetensors files under one index.

    Attributes:
      path: of the index.
      files: names of the shards, in order.
      shard_of: by tensor, the name of its shard.
      tensors: by name.
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the index, and the header of each file.

        Raises:
          CheckpointError: it is no index of safetensors, a file is not there or is damaged, or a
            tensor is in another file than the index says.
        """
        self.path = path
        try:
            index = Field(parse_json(ReadFile(path).read_all(_MOST_INDEX)))
            told = {name: shard.text() for name, shard in index["weight_map"].fields()}
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is no index of safetensors: {error}") from error
        self.files = tuple(sorted(set(told.values())))
        if wrong := [
            name
            for name in self.files
            if os.path.basename(name) != name or not name.endswith(".safetensors")
        ]:
            raise CheckpointError(
                f"{path} names {first_few([repr(name) for name in wrong])}: files beside it are needed"
            )
        folder = os.path.dirname(path)
        if absent := [
            name for name in self.files if not os.path.exists(os.path.join(folder, name))
        ]:
            raise CheckpointError(
                f"{path} names {len(self.files)} files, of which {len(absent)} are not beside it: {first_few(absent)}"
            )
        self._shards = {name: SafetensorsFile(os.path.join(folder, name)) for name in self.files}
        self.shard_of: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        for shard, file in self._shards.items():
            for name, tensor in file.tensors.items():
                if (other := self.shard_of.setdefault(name, shard)) != shard:
                    raise CheckpointError(f"{path}: {name} is both in {other} and in {shard}")
                self.tensors[name] = tensor
        wrong = [
            f"{name} in {shard}" for name, shard in told.items() if self.shard_of.get(name) != shard
        ]
        if wrong:
            raise CheckpointError(f"{path} tells of tensors that are not there: {first_few(wrong)}")
        self.tiled = frozenset[str]().union(*(file.tiled for file in self._shards.values()))

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor.

        Raises:
          CheckpointError: its file cannot be read.
        """
        return self._shards[self.shard_of[name]].read(name, box)
