"""The names and dtypes of weights in other formats.

    in a checkpoint             keys                        Orbax                        safetensors
    weights['blocks']['w1']     ("blocks", "w1")            {"blocks": {"w1": a}}        blocks.w1
    weights['layers'][0].bias   ("layers", "0", "bias")     {"layers": {"0": {"bias"}}}  layers.0.bias

A checkpoint's name is JAX's `keystr`, which tells dicts, lists and attributes apart. Other formats
do not, so two names may become one: that is an error, never a choice. Names are only translated
from left to right: an import looks for the keys of each weight that the program has, and need not
know what kind of node a key of the file was.
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
"""What weights may be written in, and its name in safetensors."""
TILED = "zerojax.tiled"
"""In the metadata of either format: JSON list of the names of weights that are stacks of tiles,
which shapes do not tell.
"""
ABOUT = "zerojax.about"
"""In the metadata of either format: JSON object of what the model tells of itself
(`zerojax.Model.about`), in no weight.
"""
_KEY = re.compile(
    r"""\.([^\W\d]\w*)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+)\]|\[<flat index (\d+)>\]"""
)
_WEIGHTS = "weights"
_EMA = ".ema_params"
"""The field of `zerojax.Ema`'s state whose leaves are named as the weights are."""


def path_of(name: str) -> tuple[str, ...]:
    """Return the keys of a weight, from its name in a checkpoint: "weights['a'][0].b" -> ("a", "0",
    "b").

    Raises:
      CheckpointError: a key is neither text, nor a number, nor an attribute.
    """
    keys, at = [], len(_WEIGHTS)
    while at < len(name):
        if (match := _KEY.match(name, at)) is None:
            raise CheckpointError(
                f"{name}: {name[at:]} is no key that other formats know: use text or numbers as keys"
            )
        # `key` is a Python literal: an integer, or text in quotes, with its escapes.
        attribute, key, number = match.groups()
        keys.append(attribute or number or str(ast.literal_eval(key)))
        at = match.end()
    return tuple(keys)


def weights_of(saved: SavedState, ema: bool = False) -> dict[tuple[str, ...], str]:
    """Return the names of the weights, or of their averages, by the weights' keys, in order.

    Raises:
      CheckpointError: there is none, or two that other formats do not tell apart; or not one
        average of each weight.
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
                f"{saved.folder}: {weight} is frozen, and rests in {array.split('.')[0]}, "
                "which other formats do not hold: program.iter_params(state) gives it decoded, piece by piece"
            )
        path = path_of(name)
        if not path:
            raise CheckpointError(
                f"{saved.folder}: its parameters are one array, which has no name: put it into a dict"
            )
        if (other := name_of.setdefault(".".join(path), name)) != name:
            raise CheckpointError(
                f"{other} and {name} are both {'.'.join(path)} in other formats: rename one of them"
            )
        # A frozen weight is its own average.
        weights[path] = _average_of(name, saved) if ema and name not in frozen else name
    if not weights:
        raise CheckpointError(f"{saved.folder} holds no weights")
    return dict(sorted(weights.items(), key=lambda item: ".".join(item[0])))


def _average_of(name: str, saved: SavedState) -> str:
    """Return the name of the average of a weight."""
    end = _EMA + name.removeprefix(_WEIGHTS)
    averages = [
        other for other in saved.leaves if other.startswith("opt_state") and other.endswith(end)
    ]
    if len(averages) != 1:
        raise CheckpointError(
            f"{saved.folder} holds {len(averages)} averages of {name}, and one is needed: it is kept by an optimizer with "
            f"zerojax.Ema last, as in optax.chain(tx, zerojax.Ema(0.999))"
        )
    return averages[0]


def tiled_names(saved: SavedState, tensors: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that are stacks of tiles."""
    return [tensor for tensor, name in tensors.items() if saved.leaves[name].is_tiled]


def tiled_in(text: str | None) -> frozenset[str]:
    """Return the names that a file's metadata have under `TILED`.

    Raises:
      FieldError: they are none.
    """
    if text is None:
        return frozenset()
    try:
        names = Field(parse_json(text.encode()), TILED)
    except ValueError as error:
        raise FieldError(f"{TILED} is no JSON: {error}") from error
    return frozenset(name.text() for name in names.items())


def metadata_of(saved: SavedState, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return what either format says of a checkpoint's weights beside their numbers, given the
    weight of each tensor.
    """
    metadata = {TILED: json.dumps(tiled_names(saved, tensors))}
    return metadata | ({ABOUT: json.dumps(saved.about)} if saved.about else {})


def about_in(text: str | None) -> dict[str, Any]:
    """Return what a file's metadata have under `ABOUT`; nothing if they have none.

    Raises:
      FieldError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        about = Field(parse_json(text.encode()), ABOUT)
    except ValueError as error:
        raise FieldError(f"{ABOUT} is no JSON: {error}") from error
    return {name: entry.value for name, entry in about.fields()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a file says of a tensor.

    Attributes:
      shape: of the whole tensor.
      dtype: name of numpy or ml_dtypes, or the file's own where it is no floating one.
    """

    shape: tuple[int, ...]
    dtype: str


class WeightFile(Protocol):
    """A file of weights, of any format, or arrays in its place.

    Attributes:
      path: what to call it in errors.
      tensors: by name.
      tiled: names of those that are known to be stacks of tiles.
    """

    path: str
    tensors: dict[str, Tensor]
    tiled: frozenset[str]

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor.

        Raises:
          CheckpointError: it cannot be read.
        """
        ...


def known_dtype(name: str) -> Any:
    """Return the numpy dtype of a name in a file, or void for one that is not read."""
    return numpy_dtype(name) if name in DTYPES else np.dtype(np.void)
