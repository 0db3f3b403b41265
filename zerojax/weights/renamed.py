"""Give the tensors of a file a model's names: renamed, transposed, stacked, divided.

    "model.layers.{layer}.mlp.up_proj.weight": ("blocks.mlp.up_proj.kernel", (1, 0))

    blocks.mlp.up_proj.kernel[l, a:b, c:d]
      =  file["model.layers.l.mlp.up_proj.weight"][c:d, a:b].T

A box is read from the file in the file's layout, and its dims are then reordered. So only one layer
of a stack is in memory at a time, or the part of a layer that a device holds.

One parameter may hold several tensors, and one tensor several parameters:

    "layers.{layer}.experts.{expert}.up.weight": ("blocks.up", (1, 0))       blocks.up[L, E, ..]
    "layers.{layer}.qkv.weight": [                                           rows of one tensor
        Place("blocks.q.kernel", axes=(1, 0), part=Part(0, 0, q)),
        Place("blocks.k.kernel", axes=(1, 0), part=Part(0, q, q + k)),
    ]

`DividedFile` makes each part a tensor of its own, which `RenamedFile` then renames and stacks. An
export joins the parts again (`DividedFile.join`).
"""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from host_offload.disk import Box, numpy_dtype
from zerojax.checkpoint import CheckpointError, first_few
from zerojax.weights.names import DTYPES, Tensor, WeightFile

LAYER = "{layer}"
"""Placeholder for the number of a layer in a pattern of names."""
EXPERT = "{expert}"
"""Placeholder for the number of an expert in a pattern of names."""
REST = "{rest}"
"""Placeholder for the end of a name, in patterns of tensors that are not read."""
_PLACEHOLDERS = {LAYER: "(?P<layer>[0-9]+)", EXPERT: "(?P<expert>[0-9]+)", REST: ".+"}


class Part(NamedTuple):
    """The part of a tensor that a parameter holds, along one dim.

    Attributes:
      dim: dim of the tensor in the file.
      start: first index of the part.
      stop: index after the last one.
      period: if positive, the part is `start` to `stop` in each run of that many indices, such as
        `Part(0, 0, 1, 2)` for every second row.
    """

    dim: int
    start: int
    stop: int
    period: int = 0

    def count(self, index: int) -> int:
        """Return how many indices of the part are below `index`."""
        if not self.period:
            return min(max(index - self.start, 0), self.stop - self.start)
        runs, rest = divmod(index, self.period)
        width = self.stop - self.start
        return runs * width + min(max(rest - self.start, 0), width)

    def indices(self, first: int, last: int) -> np.ndarray:
        """Return the tensor's indices of elements `first` to `last` of the part."""
        elements = np.arange(first, last)
        if not self.period:
            return elements + self.start
        width = self.stop - self.start
        return elements // width * self.period + self.start + elements % width


class Place(NamedTuple):
    """Where a tensor of a file belongs.

    Attributes:
      name: name of the parameter, its path joined with ".".
      layer: index along the first dim of the parameter, or None if layers are not stacked.
      axes: order of the file's dims, as for `numpy.transpose`; None keeps the order.
      expert: index along the next dim of the parameter, or None if experts are not stacked.
      part: part of the tensor that belongs there, or None for all of it.
    """

    name: str
    layer: int | None = None
    axes: tuple[int, ...] | None = None
    expert: int | None = None
    part: Part | None = None

    @property
    def member(self) -> tuple[int, ...]:
        """Indices along the stacked dims of the parameter: its layer and its expert, if any."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)


Rename = Mapping[str, Any] | Callable[[str], Any]
"""A table by patterns of the file's names, or a function of one name.

The values are names, pairs (name, axes), a `Place`, a list of these for a tensor that holds several
parameters, or None.
"""


def build_places(rename: Rename) -> Callable[[str], tuple[Place, ...]]:
    """Return `places(name)`, which returns where the parts of a tensor belong.

    A tensor that is not read has no place. Names that are not in the table stay the same.

    Args:
      rename: table or function, as for `import_params`.

    Raises:
      ValueError: `rename` is neither a table nor a function, or its values have another form.
    """
    if callable(rename):
        return lambda name: read_places(rename(name), name)
    if not isinstance(rename, Mapping):
        raise ValueError(
            f"rename is a {type(rename).__name__}: a dict by names of the file, or a function of "
            "one, is needed"
        )
    exact: dict[str, tuple[Place, ...]] = {}
    patterns: list[tuple[re.Pattern[str], tuple[Place, ...]]] = []
    for pattern, value in rename.items():
        targets = read_places(value, pattern)
        if not any(placeholder in pattern for placeholder in _PLACEHOLDERS):
            exact[pattern] = targets
            continue
        for placeholder in _PLACEHOLDERS:
            if pattern.count(placeholder) > 1:
                raise ValueError(f"rename has {pattern!r}: {placeholder} may occur only once")
        if REST in pattern and (targets or not pattern.endswith(REST)):
            raise ValueError(
                f"rename has {pattern!r}: {REST} ends the names of tensors that are not read, "
                "whose value is None"
            )
        expression = re.escape(pattern)
        for placeholder, group in _PLACEHOLDERS.items():
            expression = expression.replace(re.escape(placeholder), group)
        patterns.append((re.compile(expression), targets))

    def places(name: str) -> tuple[Place, ...]:
        if name in exact:
            return exact[name]
        for pattern, targets in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                numbers = {key: int(number) for key, number in match.groupdict().items()}
                return tuple(target._replace(**numbers) for target in targets)
        return (Place(name),)

    return places


def renaming(rename: Rename) -> Callable[[str], Place | None]:
    """Return `place(name)`, which returns where a tensor belongs, or None for one that is not read.

    `build_places` also takes tables with tensors that hold several parameters.

    Args:
      rename: table or function, as for `import_params`.

    Raises:
      ValueError: `rename` is neither a table nor a function, or its values have another form.
    """
    places = build_places(rename)

    def place(name: str) -> Place | None:
        found = places(name)
        if len(found) > 1:
            raise ValueError(f"{name} holds {len(found)} parameters: use build_places")
        return found[0] if found else None

    return place


def read_places(value: Any, name: str) -> tuple[Place, ...]:
    """Return the value of a table or function for a name, as places.

    Raises:
      ValueError: the value has another form.
    """
    if value is None:
        return ()
    if isinstance(value, Place):
        return (value,)
    if isinstance(value, str):
        return (Place(value),)
    if isinstance(value, list) or (
        isinstance(value, tuple) and all(isinstance(item, Place) for item in value)
    ):
        return tuple(place for item in value for place in read_places(item, name))
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], tuple)
    ):
        return (Place(value[0], axes=tuple(value[1])),)
    raise ValueError(
        f"rename gives {value!r} for {name}: a name is needed, (name, axes), a "
        "zerojax.weights.Place, a list of these, or None"
    )


class DividedFile:
    """A file of weights in which each part of a tensor is a tensor of its own.

    Attributes:
      path: path of the file.
      tensors: shapes and dtypes of the parts, by their names. An undivided tensor keeps its name,
        and the first 64 rows of `qkv` are `qkv[0:64]`. Tensors that are not read are left out.
      tiled: empty, since it is not known which tensors are tiles.
      places: place of each part, by name.
      parts: names of the parts of each tensor that is read.
    """

    def __init__(self, file: WeightFile, rename: Rename) -> None:
        """Find the place of each tensor and of its parts.

        Args:
          file: file of weights.
          rename: table or function, as for `import_params`.

        Raises:
          ValueError: `rename` has another form.
          CheckpointError: the parts of a tensor do not make up the tensor.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self.tensors: dict[str, Tensor] = {}
        self.places: dict[str, Place] = {}
        self.parts: dict[str, list[str]] = {}
        self._file = file
        self._tensor_of: dict[str, str] = {}
        find = build_places(rename)
        for name, tensor in file.tensors.items():
            places = find(name)
            if not places:
                continue
            _check_parts(file.path, name, tensor.shape, places)
            self.parts[name] = [self._add(name, tensor, place) for place in places]

    def _add(self, name: str, tensor: Tensor, place: Place) -> str:
        """Add a part of a tensor, and return its name."""
        shape = list(tensor.shape)
        part_name = name
        if place.part is not None:
            dim = place.part.dim
            shape[dim] = place.part.count(shape[dim])
            part_name = f"{name}[{_shown(place.part)}]"
        self.tensors[part_name] = Tensor(tuple(shape), tensor.dtype)
        self.places[part_name] = place
        self._tensor_of[part_name] = name
        return part_name

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Args:
          name: name of the tensor.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read.
        """
        part = self.places[name].part
        if part is None:
            return self._file.read(name, box)
        before, after = box[: part.dim], box[part.dim + 1 :]
        indices = part.indices(*box[part.dim])
        start = int(indices[0]) if indices.size else 0
        stop = int(indices[-1]) + 1 if indices.size else 0
        array = self._file.read(self._tensor_of[name], (*before, (start, stop), *after))
        if stop - start == indices.size:
            return array
        return np.take(array, indices - start, axis=part.dim)

    def join(self, tensor: str, box: Box, read: Callable[[str, Box], np.ndarray]) -> np.ndarray:
        """Return a box of one of the file's own tensors, made up of boxes of its parts.

        Args:
          tensor: name of the tensor in the file.
          box: (start, stop) along each of its dims.
          read: function of a part's name and a box in it; returns the numbers there.
        """
        names = self.parts[tensor]
        if self.places[names[0]].part is None:
            return read(names[0], box)
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        dim = 0
        for name in names:
            part = self.places[name].part
            assert part is not None
            dim = part.dim
            start, stop = box[dim]
            first, last = part.count(start), part.count(stop)
            if first < last:
                piece = read(name, (*box[:dim], (first, last), *box[dim + 1 :]))
                pieces.append((part.indices(first, last) - start, piece))
        kind = np.result_type(*(piece.dtype for _, piece in pieces))
        out = np.empty([b - a for a, b in box], kind)
        for indices, piece in pieces:
            out[(*(slice(None),) * dim, indices)] = piece
        return out


def _shown(part: Part) -> str:
    every = f" of {part.period}" if part.period else ""
    return ":, " * part.dim + f"{part.start}:{part.stop}{every}"


def _check_parts(path: str, name: str, shape: tuple[int, ...], places: tuple[Place, ...]) -> None:
    """Raise CheckpointError unless the parts of a tensor make up the tensor."""
    parts = [place.part for place in places if place.part is not None]
    if not parts and len(places) == 1:
        return
    dims = {part.dim for part in parts}
    names = ", ".join(place.name for place in places)
    if len(parts) < len(places) or len(dims) > 1 or not 0 <= min(dims) < len(shape):
        raise CheckpointError(
            f"{path}: {name} {list(shape)} holds {names}: give each a zerojax.weights.Part of the "
            "same dim"
        )
    (dim,) = dims
    size = shape[dim]
    periods = {part.period or size for part in parts}
    ends = sorted((part.start, part.stop) for part in parts)
    is_whole = ends[0][0] == 0 and len(periods) == 1 and ends[-1][1] == max(periods)
    is_whole = is_whole and all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    if not is_whole or size % max(max(periods), 1):
        shown = ", ".join(f"{place.name}[{_shown(place.part)}]" for place in places if place.part)
        raise CheckpointError(
            f"{path}: {name} {list(shape)} is not made up of its parts along dim {dim}, {shown}"
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
          CheckpointError: two tensors have the same place, layers or experts of a stack are missing
            or differ in shape, axes do not fit, or the parts of a tensor do not make it up.
        """
        self.path = file.path
        self.tiled = frozenset[str]()
        self._file = DividedFile(file, rename)
        self._rename = rename
        self._members: dict[str, dict[tuple[int, ...], str]] = {}
        kinds: dict[str, tuple[bool, bool]] = {}
        for tensor, place in self._file.places.items():
            members = self._members.setdefault(place.name, {})
            kind = (place.layer is not None, place.expert is not None)
            is_other = kinds.setdefault(place.name, kind) != kind
            if place.member in members or is_other:
                rival = members.get(place.member, next(iter(members.values())))
                raise CheckpointError(
                    f"{file.path}: {rival} and {tensor} both belong to {place.name}"
                )
            members[place.member] = tensor
        self._has_layers = {name for name, kind in kinds.items() if kind[0]}
        self.tensors = {name: self._tensor(name) for name in self._members}

    def _tensor(self, name: str) -> Tensor:
        """Return the description of a parameter, from the tensors that belong to it.

        Raises:
          CheckpointError: layers or experts are missing, or differ in shape.
        """
        members = self._members[name]
        shapes = {tensor: self._shape(tensor) for tensor in members.values()}
        dtypes = {self._file.tensors[tensor].dtype for tensor in shapes}
        unread = sorted(dtypes - DTYPES.keys())
        # Tensors of several dtypes are read as float32, unless one has an unsupported dtype.
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        if unread:
            dtype = unread[0]
        first, shape = next(iter(shapes.items()))
        counts = tuple(1 + max(numbers) for numbers in zip(*members, strict=True))
        absent = [index for index in itertools.product(*map(range, counts)) if index not in members]
        kinds = "layers" if name in self._has_layers else "experts"
        if absent:
            names = [self._name(name, index) for index in absent]
            kinds = "layers" if len(counts) == 1 and kinds == "layers" else "experts"
            raise CheckpointError(f"{self.path} lacks {kinds} of {name}: {first_few(names)}")
        odd = next((tensor for tensor in shapes if shapes[tensor] != shape), None)
        if odd is not None:
            raise CheckpointError(
                f"{self.path}: {kinds} of {name} must have the same shape, but {first} is "
                f"{list(self._file.tensors[first].shape)} and {odd} is "
                f"{list(self._file.tensors[odd].shape)}"
            )
        return Tensor((*counts, *shape), dtype)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        shape = self._file.tensors[tensor].shape
        axes = self._file.places[tensor].axes
        if axes is None:
            return shape
        if sorted(axes) != list(range(len(shape))):
            raise CheckpointError(
                f"{self.path}: {tensor} is {list(shape)}, which axes {axes} do not permute"
            )
        return tuple(shape[axis] for axis in axes)

    def _name(self, name: str, index: tuple[int, ...]) -> str:
        """Return the file's name for a parameter, or for a member of its stack, if it is known."""
        has_layer = bool(index) and name in self._has_layers
        numbers = dict(zip((LAYER, EXPERT) if has_layer else (EXPERT,), index, strict=False))
        member = "".join(f" of {key.strip('{}')} {number}" for key, number in numbers.items())
        if not isinstance(self._rename, Mapping):
            return f"{name}{member}"
        for pattern, value in self._rename.items():
            if any(place.name == name for place in read_places(value, pattern)):
                for placeholder, number in numbers.items():
                    pattern = pattern.replace(placeholder, str(number))
                return pattern
        return f"{name}{member}"

    def missing_layers(self, name: str, num_layers: int) -> list[str]:
        """Return the file's names of a parameter's missing last layers.

        Layers count as missing only if other parameters have them.

        Args:
          name: name of the parameter.
          num_layers: number of layers of the model.
        """
        if name not in self._has_layers:
            return []
        most = max(self.tensors[stack].shape[0] for stack in self._has_layers)
        if most < num_layers:
            return []
        layers = range(self.tensors[name].shape[0], num_layers)
        experts = sorted({index[1:] for index in self._members[name]})
        return [self._name(name, (layer, *expert)) for layer in layers for expert in experts]

    def error_name(self, name: str) -> str:
        """Return a parameter's name, together with the file's name if it differs.

        Args:
          name: name of the parameter.
        """
        file_name = self._name(name, ())
        return name if file_name == name else f"{name} (in the file {file_name})"

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a parameter.

        Args:
          name: name of the parameter.
          box: (start, stop) of the part along each dim.

        Raises:
          CheckpointError: the file cannot be read.
        """
        members = self._members[name]
        lead = len(next(iter(members)))
        front, inner = box[:lead], box[lead:]
        starts = tuple(start for start, _ in front)
        if all(stop - start == 1 for start, stop in front):
            array = self._read(members[starts], inner)
            return array.reshape((1,) * lead + array.shape)
        out = np.empty([b - a for a, b in box], numpy_dtype(self.tensors[name].dtype))
        for index in itertools.product(*(range(start, stop) for start, stop in front)):
            at = tuple(i - start for i, start in zip(index, starts, strict=True))
            out[at] = self._read(members[index], inner)
        return out

    def _read(self, tensor: str, box: Box) -> np.ndarray:
        axes = self._file.places[tensor].axes
        if axes is None:
            return np.asarray(self._file.read(tensor, box))
        file_box = tuple(box[axes.index(dim)] for dim in range(len(box)))
        return np.asarray(self._file.read(tensor, file_box)).transpose(axes)
