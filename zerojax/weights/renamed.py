"""Give the tensors of a file a model's names: renamed, transposed, and stacked over layers.

    "model.layers.{layer}.mlp.up_proj.weight": ("blocks.mlp.up_proj.kernel", (1, 0))

    blocks.mlp.up_proj.kernel[l, a:b, c:d]
      =  file["model.layers.l.mlp.up_proj.weight"][c:d, a:b].T

A box is read from the file in the file's layout, and its dims are then reordered. So only one layer
of a stack is in memory at a time, or the part of a layer that a device holds.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import CheckpointError, first_few
from zerojax.weights.names import DTYPES, Tensor, WeightFile

LAYER = "{layer}"
"""Placeholder for the number of a layer in a pattern of names."""


class Place(NamedTuple):
    """Where a tensor of a file belongs.

    Attributes:
      name: name of the parameter, its path joined with ".".
      layer: index along the first dim of the parameter, or None if layers are not stacked.
      axes: order of the file's dims, as for `numpy.transpose`; None keeps the order.
    """

    name: str
    layer: int | None = None
    axes: tuple[int, ...] | None = None


Rename = Mapping[str, Any] | Callable[[str], Any]
"""A table by patterns of the file's names, or a function of one name.

The values are names, pairs (name, axes), a `Place`, or None.
"""


def renaming(rename: Rename) -> Callable[[str], Place | None]:
    """Return `place(name)`, which returns where a tensor belongs, or None for one that is not read.

    Names that are not in the table stay the same.

    Args:
      rename: table or function, as for `import_params`.

    Raises:
      ValueError: `rename` is neither a table nor a function, or its values have another form.
    """
    if callable(rename):
        return lambda name: _place(rename(name), name)
    if not isinstance(rename, Mapping):
        raise ValueError(
            f"rename is a {type(rename).__name__}: a dict by names of the file, or a function of "
            "one, is needed"
        )
    exact = {
        pattern: _place(value, pattern) for pattern, value in rename.items() if LAYER not in pattern
    }
    patterns = []
    for pattern, value in rename.items():
        if LAYER in pattern:
            if pattern.count(LAYER) > 1:
                raise ValueError(f"rename has {pattern!r}: {LAYER} may occur only once")
            before, after = map(re.escape, pattern.split(LAYER))
            patterns.append((re.compile(f"{before}([0-9]+){after}"), _place(value, pattern)))

    def place(name: str) -> Place | None:
        if name in exact:
            return exact[name]
        for pattern, target in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                return None if target is None else target._replace(layer=int(match[1]))
        return Place(name)

    return place


def _place(value: Any, name: str) -> Place | None:
    """Return the value of a table or function for a name, as a Place.

    Raises:
      ValueError: the value has another form.
    """
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
        f"rename gives {value!r} for {name}: a name is needed, (name, axes), a "
        "zerojax.weights.Place, or None"
    )


class RenamedFile:
    """A file of weights whose tensors have a model's names and shapes.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes, by the model's names.
      tiled: empty, since it is not known which tensors are tiles.
    """

    def __init__(self, file: WeightFile, rename: Rename) -> None:
        """Find the place of each tensor.

        Args:
          file: file of weights.
          rename: table or function, as for `import_params`.

        Raises:
          ValueError: `rename` has another form.
          CheckpointError: two tensors have the same place, layers of a stack are missing or differ
            in shape, or axes do not fit.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self._file = file
        self._rename = rename
        place = renaming(rename)
        self._layers: dict[str, dict[int | None, tuple[str, Place]]] = {}
        for name in file.tensors:
            target = place(name)
            if target is None:
                continue
            layers = self._layers.setdefault(target.name, {})
            is_unstacked = None in layers or target.layer is None
            if target.layer in layers or (layers and is_unstacked):
                rival = next(iter(layers.values())) if is_unstacked else layers[target.layer]
                raise CheckpointError(
                    f"{file.path}: {rival[0]} and {name} both belong to {target.name}"
                )
            layers[target.layer] = (name, target)
        self.tensors = {name: self._tensor(name, layers) for name, layers in self._layers.items()}

    def _tensor(self, name: str, layers: Mapping[int | None, tuple[str, Place]]) -> Tensor:
        """Return the description of a parameter, from the tensors that belong to it.

        Raises:
          CheckpointError: layers are missing, or differ in shape.
        """
        shapes = {tensor: self._shape(tensor, place) for tensor, place in layers.values()}
        dtypes = {self._file.tensors[tensor].dtype for tensor in shapes}
        unread = sorted(dtypes - DTYPES.keys())
        # Layers of several dtypes are read as float32, unless one has an unsupported dtype.
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        if unread:
            dtype = unread[0]
        first, shape = next(iter(shapes.items()))
        if None in layers:
            return Tensor(shape, dtype)

        last = max(layer for layer in layers if layer is not None)
        absent = [layer for layer in range(last + 1) if layer not in layers]
        if absent:
            names = [self._name(name, layer) for layer in absent]
            raise CheckpointError(f"{self.path} lacks layers of {name}: {first_few(names)}")
        odd = next((tensor for tensor in shapes if shapes[tensor] != shape), None)
        if odd is not None:
            raise CheckpointError(
                f"{self.path}: layers of {name} must have the same shape, but {first} is "
                f"{list(self._file.tensors[first].shape)} and {odd} is "
                f"{list(self._file.tensors[odd].shape)}"
            )
        return Tensor((len(layers), *shape), dtype)

    def _shape(self, tensor: str, place: Place) -> tuple[int, ...]:
        shape = self._file.tensors[tensor].shape
        if place.axes is None:
            return shape
        if sorted(place.axes) != list(range(len(shape))):
            raise CheckpointError(
                f"{self.path}: {tensor} is {list(shape)}, which axes {place.axes} do not permute"
            )
        return tuple(shape[axis] for axis in place.axes)

    def _name(self, name: str, layer: int | None) -> str:
        """Return the file's name for a parameter or one of its layers, as far as it is known."""
        of_layer = "" if layer is None else f" of layer {layer}"
        if not isinstance(self._rename, Mapping):
            return f"{name}{of_layer}"
        for pattern, value in self._rename.items():
            target = _place(value, pattern)
            if target is not None and target.name == name:
                return pattern if layer is None else pattern.replace(LAYER, str(layer))
        return f"{name}{of_layer}"

    def missing_layers(self, name: str, num_layers: int) -> list[str]:
        """Return the file's names of a parameter's missing last layers.

        Layers count as missing only if other parameters have them.

        Args:
          name: name of the parameter.
          num_layers: number of layers of the model.
        """
        layers = self._layers.get(name, {})
        stacks = [stack for stack in self._layers.values() if None not in stack]
        has_all = any(len(stack) >= num_layers for stack in stacks)
        if not layers or None in layers or not has_all:
            return []
        return [self._name(name, layer) for layer in range(num_layers) if layer not in layers]

    def error_name(self, name: str) -> str:
        """Return a parameter's name, together with the file's name if it differs.

        Args:
          name: name of the parameter.
        """
        file_name = self._name(name, None)
        return name if file_name == name else f"{name} (in the file {file_name})"

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a parameter.

        Args:
          name: name of the parameter.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read.
        """
        layers = self._layers[name]
        if None in layers:
            return self._read(*layers[None], box)
        start, stop = box[0]
        layer_box = box[1:]
        if stop - start == 1:
            return self._read(*layers[start], layer_box)[None]
        out = np.empty([b - a for a, b in box], numpy_dtype(self.tensors[name].dtype))
        for layer in range(start, stop):
            out[layer - start] = self._read(*layers[layer], layer_box)
        return out

    def _read(self, tensor: str, place: Place, box: Box) -> np.ndarray:
        if place.axes is None:
            return np.asarray(self._file.read(tensor, box))
        file_box = tuple(box[place.axes.index(dim)] for dim in range(len(box)))
        return np.asarray(self._file.read(tensor, file_box)).transpose(place.axes)
