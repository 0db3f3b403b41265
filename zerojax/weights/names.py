"""The names and dtypes of weights in other formats.

    in a checkpoint             keys                     Orbax                        safetensors
    weights['blocks']['w1']     ("blocks", "w1")         {"blocks": {"w1": a}}        blocks.w1
    weights['layers'][0].bias   ("layers", "0", "bias")  {"layers": {"0": {"bias"}}}  layers.0.bias

A checkpoint's name is JAX's `keystr`, which distinguishes dicts, lists and attributes. Other
formats do not, so two names may become the same: that is an error, and zerojax never chooses one.
Names are only translated from left to right: an import looks up the keys of each of the program's
weights, and need not know what kind of node a key in the file was.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from host_offload.disk import Box, numpy_dtype
from host_offload.fields import Field, FieldError, parse_json
from zerojax.checkpoint import ENCODED, CheckpointError, SavedState

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Dtypes in which weights may be written, and their names in safetensors."""
TILED = "zerojax.tiled"
"""Key in the metadata of either format: JSON list of the weights that are stacks of tiles.

Shapes do not show which weights are tiles.
"""
ABOUT = "zerojax.about"
"""Key in the metadata of either format: JSON object of the settings that the model reports.

These (`zerojax.Model.about`) are in no weight.
"""
_KEY = re.compile(
    r"""\.([^\W\d]\w*)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+)\]|\[<flat index (\d+)>\]"""
)
_WEIGHTS = "weights"
_EMA = ".ema_params"
"""Field of `zerojax.Ema`'s state whose leaves are named like the weights."""


def split_path(name: str) -> tuple[str, ...]:
    """Return the keys in a weight's checkpoint name: "weights['a'][0].b" -> ("a", "0", "b").

    Raises:
      CheckpointError: a key is neither text, nor a number, nor an attribute.
    """
    keys = []
    offset = len(_WEIGHTS)
    while offset < len(name):
        match = _KEY.match(name, offset)
        if match is None:
            raise CheckpointError(
                f"{name}: {name[offset:]} is not a key that other formats support: "
                "use text or numbers as keys"
            )
        # `key` is a Python literal: an integer, or quoted text with its escapes.
        attribute, key, number = match.groups()
        keys.append(attribute or number or str(ast.literal_eval(key)))
        offset = match.end()
    return tuple(keys)


def map_weights(saved: SavedState, ema: bool = False) -> dict[tuple[str, ...], str]:
    """Return the checkpoint names of the weights, by the weights' keys, sorted.

    Args:
      saved: the checkpoint.
      ema: whether to return the names of the weights' averages instead.

    Raises:
      CheckpointError: there are no weights, or other formats cannot distinguish two of them; or a
        weight does not have exactly one average.
    """
    weights: dict[tuple[str, ...], str] = {}
    name_of: dict[str, str] = {}
    frozen = saved.frozen
    for name in saved.leaves:
        if not name.startswith(_WEIGHTS):
            continue
        if ENCODED in name and name in frozen:
            weight, _, array = name.partition(ENCODED)
            raise CheckpointError(
                f"{saved.folder}: {weight} is frozen, and stored in {array.split('.')[0]}, "
                "which other formats do not support: program.iter_params(state) yields it "
                "decoded, piece by piece"
            )
        path = split_path(name)
        if not path:
            raise CheckpointError(
                f"{saved.folder}: its parameters are one array, which has no name: "
                "put it into a dict"
            )
        namesake = name_of.setdefault(".".join(path), name)
        if namesake != name:
            raise CheckpointError(
                f"{namesake} and {name} are both {'.'.join(path)} in other formats: rename one "
                "of them"
            )
        # A frozen weight is its own average.
        weights[path] = find_average(name, saved) if ema and name not in frozen else name
    if not weights:
        raise CheckpointError(f"{saved.folder} holds no weights")
    return dict(sorted(weights.items(), key=lambda item: ".".join(item[0])))


def find_average(name: str, saved: SavedState) -> str:
    """Return the checkpoint name of a weight's average.

    Args:
      name: name of the weight in the checkpoint.
      saved: the checkpoint.

    Raises:
      CheckpointError: the weight does not have exactly one average.
    """
    suffix = _EMA + name.removeprefix(_WEIGHTS)
    averages = [
        leaf for leaf in saved.leaves if leaf.startswith("opt_state") and leaf.endswith(suffix)
    ]
    if len(averages) != 1:
        raise CheckpointError(
            f"{saved.folder} holds {len(averages)} averages of {name}, and one is needed: train "
            f"with an optimizer that ends in zerojax.Ema, as in optax.chain(tx, zerojax.Ema(0.999))"
        )
    return averages[0]


def tiled_names(saved: SavedState, tensors: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors that are stacks of tiles."""
    return [tensor for tensor, name in tensors.items() if saved.leaves[name].is_tiled]


def tiled_in(text: str | None) -> frozenset[str]:
    """Return the names listed under `TILED` in a file's metadata.

    Args:
      text: the metadata's text, or None if it has none.

    Raises:
      FieldError: the text is not a JSON list of names.
    """
    if text is None:
        return frozenset()
    try:
        names = Field(parse_json(text.encode()), TILED)
    except ValueError as error:
        raise FieldError(f"{TILED} is not JSON: {error}") from error
    return frozenset(name.text() for name in names.items())


def build_metadata(saved: SavedState, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that either format stores for a checkpoint's weights.

    Args:
      saved: the checkpoint.
      tensors: checkpoint name of each tensor.
    """
    metadata = {TILED: json.dumps(tiled_names(saved, tensors))}
    return metadata | ({ABOUT: json.dumps(saved.about)} if saved.about else {})


def about_in(text: str | None) -> dict[str, Any]:
    """Return the settings under `ABOUT` in a file's metadata, or an empty dict if it has none.

    Raises:
      FieldError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        about = Field(parse_json(text.encode()), ABOUT)
    except ValueError as error:
        raise FieldError(f"{ABOUT} is not JSON: {error}") from error
    return {name: entry.value for name, entry in about.fields()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A file's description of a tensor.

    Attributes:
      shape: shape of the full tensor.
      dtype: name in numpy or ml_dtypes; if it is not a supported floating dtype, the file's own
        name.
    """

    shape: tuple[int, ...]
    dtype: str


class WeightFile(Protocol):
    """A file of weights in any format, or arrays in its place.

    Attributes:
      path: what errors call the file.
      tensors: shapes and dtypes, by name.
      tiled: names of the tensors that are known to be stacks of tiles.
    """

    path: str
    tensors: dict[str, Tensor]
    tiled: frozenset[str]

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the tensor cannot be read.
        """
        ...


def known_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a name in a file, or void for an unsupported one."""
    return numpy_dtype(name) if name in DTYPES else np.dtype(np.void)
