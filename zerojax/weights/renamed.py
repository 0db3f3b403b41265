"""A file of weights under the names of a model: its tensors renamed, transposed, and stacked over
layers as they are read.

    "model.layers.{layer}.mlp.up_proj.weight": ("blocks.mlp.up_proj.kernel", (1, 0))

    blocks.mlp.up_proj.kernel[l, a:b, c:d]  =  file["model.layers.l.mlp.up_proj.weight"][c:d, a:b].T

A box is read from the file as it lies there, and its dims are then put in order. So of a stack one
layer is in memory at a time, or the part of one that a device holds.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import CheckpointError, first_few
from zerojax.weights.names import DTYPES, Tensor, WeightFile

LAYER = "{layer}"
"""In a pattern of names, the number of a layer."""


class Place(NamedTuple):
    """Where a tensor of a file belongs.

    Attributes:
      name: of the parameter, its path joined by ".".
      layer: its index along the first dim of the parameter, or None.
      axes: the order of the file's dims, as `numpy.transpose` takes it; None: as they are.
    """

    name: str
    layer: int | None = None
    axes: tuple[int, ...] | None = None


Rename = Mapping[str, Any] | Callable[[str], Any]
"""A table by patterns of the file's names, or a function of one: a name, a pair of it and axes, a
`Place`, or None.
"""


def renaming(rename: Rename) -> Callable[[str], Place | None]:
    """Return `place(name)`, where a tensor of that name belongs; None for one that is not read.

    A name that a table does not have stays as it is.

    Raises:
      ValueError: the table has values of another form, or is no table.
    """
    if callable(rename):
        return lambda name: _place(rename(name), name)
    if not isinstance(rename, Mapping):
        raise ValueError(
            f"rename is a {type(rename).__name__}: a dict by names of the file, or a function of one, is needed"
        )
    exact = {
        pattern: _place(value, pattern) for pattern, value in rename.items() if LAYER not in pattern
    }
    patterns = []
    for pattern, value in rename.items():
        if LAYER in pattern:
            if pattern.count(LAYER) > 1:
                raise ValueError(f"rename has {pattern!r}: {LAYER} may be in it once")
            before, after = map(re.escape, pattern.split(LAYER))
            patterns.append((re.compile(f"{before}([0-9]+){after}"), _place(value, pattern)))

    def place(name: str) -> Place | None:
        if name in exact:
            return exact[name]
        for pattern, found in patterns:
            if (match := pattern.fullmatch(name)) is not None:
                return None if found is None else found._replace(layer=int(match[1]))
        return Place(name)

    return place


def _place(value: Any, name: str) -> Place | None:
    """Return what a table or function gives for a name as a Place."""
    if value is None or isinstance(value, Place):
        return value
    if isinstance(value, str):
        return Place(value)
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], tuple)
    ):
        return Place(value[0], axes=tuple(value[1]))
    raise ValueError(
        f"rename gives {value!r} for {name}: a name is needed, (name, axes), a zerojax.weights.Place, or None"
    )


class RenamedFile:
    """A file of weights whose tensors are those of a model.

    Attributes:
      path: of the file.
      tensors: by the model's names.
      tiled: nothing is known of tiles.
    """

    def __init__(self, file: WeightFile, rename: Rename) -> None:
        """Place each tensor.

        Raises:
          ValueError: `rename` is of another form.
          CheckpointError: two tensors have one place, layers of a stack are missing or differ in
            shape, or axes do not fit.
        """
        self.path, self.tiled, self._file, self._rename = file.path, frozenset[str](), file, rename
        place = renaming(rename)
        self._parts: dict[str, dict[int | None, tuple[str, Place]]] = {}
        for name in file.tensors:
            if (found := place(name)) is None:
                continue
            parts = self._parts.setdefault(found.name, {})
            if found.layer in parts or (parts and (None in parts or found.layer is None)):
                other = (
                    next(iter(parts.values()))
                    if None in parts or found.layer is None
                    else parts[found.layer]
                )
                raise CheckpointError(
                    f"{file.path}: {other[0]} and {name} both belong to {found.name}"
                )
            parts[found.layer] = (name, found)
        self.tensors = {name: self._tensor(name, parts) for name, parts in self._parts.items()}

    def _tensor(self, name: str, parts: Mapping[int | None, tuple[str, Place]]) -> Tensor:
        """Return what a parameter is, of the tensors that belong to it."""
        shapes = {tensor: self._shape(tensor, place) for tensor, place in parts.values()}
        dtypes = {self._file.tensors[tensor].dtype for tensor in shapes}
        unread = sorted(dtypes - DTYPES.keys())
        # Layers of several dtypes are read as the widest of those that weights have, unless one
        # cannot be read.
        dtype = unread[0] if unread else dtypes.pop() if len(dtypes) == 1 else "float32"
        first, shape = next(iter(shapes.items()))
        if None in parts:
            return Tensor(shape, dtype)
        last = max(layer for layer in parts if layer is not None)
        if absent := [layer for layer in range(last + 1) if layer not in parts]:
            names = [self._name(name, layer) for layer in absent]
            raise CheckpointError(f"{self.path} lacks layers of {name}: {first_few(names)}")
        if other := next((tensor for tensor, found in shapes.items() if found != shape), None):
            raise CheckpointError(
                f"{self.path}: layers of {name} are of one shape, and {first} is {list(self._file.tensors[first].shape)}, "
                f"{other} {list(self._file.tensors[other].shape)}"
            )
        return Tensor((len(parts), *shape), dtype)

    def _shape(self, tensor: str, place: Place) -> tuple[int, ...]:
        shape = self._file.tensors[tensor].shape
        if place.axes is None:
            return shape
        if sorted(place.axes) != list(range(len(shape))):
            raise CheckpointError(
                f"{self.path}: {tensor} is {list(shape)}, and axes {place.axes} of its dims are asked for"
            )
        return tuple(shape[axis] for axis in place.axes)

    def _name(self, name: str, layer: int | None) -> str:
        """Return what a parameter, or a layer of it, is called in the file, as far as that is
        known.
        """
        of = "" if layer is None else f" of layer {layer}"
        if not isinstance(self._rename, Mapping):
            return f"{name}{of}"
        for pattern, value in self._rename.items():
            if (found := _place(value, pattern)) is not None and found.name == name:
                return pattern if layer is None else pattern.replace(LAYER, str(layer))
        return f"{name}{of}"

    def missing_layers(self, name: str, num_layers: int) -> list[str]:
        """Return the file's names of the last layers of a parameter that it lacks, if other
        parameters have these layers.

        Args:
          name: of the parameter.
          num_layers: how many layers a model has.
        """
        parts = self._parts.get(name, {})
        stacks = [stack for stack in self._parts.values() if None not in stack]
        has_all = any(len(stack) >= num_layers for stack in stacks)
        if not parts or None in parts or not has_all:
            return []
        return [self._name(name, layer) for layer in range(num_layers) if layer not in parts]

    def told(self, name: str) -> str:
        """Return a parameter's name, with that in the file where it is another."""
        there = self._name(name, None)
        return name if there == name else f"{name} (in the file {there})"

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a parameter.

        Raises:
          CheckpointError: the file cannot be read.
        """
        parts = self._parts[name]
        if None in parts:
            return self._read(*parts[None], box)
        (start, stop), rest = box[0], box[1:]
        if stop - start == 1:
            return self._read(*parts[start], rest)[None]
        out = np.empty([b - a for a, b in box], numpy_dtype(self.tensors[name].dtype))
        for layer in range(start, stop):
            out[layer - start] = self._read(*parts[layer], rest)
        return out

    def _read(self, tensor: str, place: Place, box: Box) -> np.ndarray:
        if place.axes is None:
            return np.asarray(self._file.read(tensor, box))
        there = tuple(box[place.axes.index(dim)] for dim in range(len(box)))
        return np.asarray(self._file.read(tensor, there)).transpose(place.axes)
