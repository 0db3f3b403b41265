"""Find the checkpoint parameter for each tensor of a folder, and read its numbers.

    tensor of `like` [out, in]   <-   record [in, out] of one layer, transposed, or some of its rows

As in an import, the table of names gives the parameter. A tensor that holds several parameters is
divided into its parts first (`zerojax.weights.DividedFile`). A checkpoint stores a quantized weight
as several arrays, none of which shows the weight's shape. It is taken to be the tensor's shape, if
quantizing that shape gives arrays of the stored shapes.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping

import jax
import numpy as np

from host_offload.disk import Box, numpy_dtype
from pallas_kernels import storage
from zerojax.checkpoint import (
    ENCODED,
    CheckpointError,
    Retiled,
    SavedState,
    first_few,
    of_mlp,
    retiled,
)
from zerojax.hf.importing import ADAPTER, count_experts, count_layers
from zerojax.hf.mixtures.stacks import stack_of
from zerojax.weights import (
    DTYPES,
    DividedFile,
    Place,
    Tensor,
    find_average,
    read_part,
    split_path,
)

_ARRAY = re.compile(r"(int8|nf4)(?:\.dim(-[0-9]+))?\.([a-z]+)")
"""Pattern of an array's name after the weight's name and `ENCODED`."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The parameter that a tensor of a folder corresponds to.

    Attributes:
      leaf: name in the checkpoint; for a quantized weight, without the suffix of its arrays.
      place: place of the tensor among the parameters.
      shape: shape of the untiled parameter, over all layers.
      is_frozen: whether the parameter was frozen in training.
      num_groups: number of groups of experts in which a quantized weight was stored; 1 if in none.
      group: number of the group to which the source is restricted; None: all of the weight.
      arrays: names in the checkpoint of a quantized weight's arrays, by the arrays' own names; else
        empty.
      layout: layout of a quantized weight, or of one layer of it, in these arrays.
    """

    leaf: str
    place: Place
    shape: tuple[int, ...]
    is_frozen: bool
    num_groups: int = 1
    group: int | None = None
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: storage.Layout | None = None


def map_leaves(saved: SavedState, ema: bool = False) -> dict[str, tuple[str, bool]]:
    """Return a checkpoint's weights by the names used in files.

    The values are the name in the checkpoint, and whether the weight is quantized.

    Args:
      saved: checkpoint.
      ema: whether to name the averages of the trained weights in place of the weights.

    Raises:
      CheckpointError: a trained weight does not have exactly one average.
    """
    frozen = saved.frozen
    leaves: dict[str, tuple[str, bool]] = {}
    for name in saved.leaves:
        if name.startswith("weights"):
            leaf, mark, _ = name.partition(ENCODED)
            source = find_average(name, saved) if ema and name not in frozen else leaf
            leaves[".".join(split_path(leaf))] = (source, bool(mark))
    return leaves


def map_sources(
    saved: SavedState,
    base: DividedFile,
    leaves: Mapping[str, tuple[str, bool]],
    like: str | os.PathLike[str],
) -> dict[str, Source]:
    """Return the parameter of each part of a folder's tensors.

    Args:
      saved: checkpoint.
      base: weights of the folder.
      leaves: weights of the checkpoint, as `map_leaves` returns them.
      like: path of the folder.

    Raises:
      CheckpointError: a tensor has no parameter, its shape differs, or a weight has no tensor in
        `like`; the error names the first ones.
    """
    places = base.places
    sources: dict[str, Source] = {}
    differences: list[str] = []
    frozen = saved.frozen
    num_layers = count_layers(places)
    num_experts = count_experts(places)
    for name, place in places.items():
        tensor = base.tensors[name]
        if tensor.dtype not in DTYPES:
            differences.append(
                f"{name} of {tensor.dtype} in {like}, which is not a supported floating dtype"
            )
            continue
        layers = num_layers.get(stack_of(place.name), 0)
        shape = _param_shape(tensor, place, layers, num_experts.get(place.name))
        if place.name not in leaves:
            differences.append(f"no {place.name}, which is {name} {list(tensor.shape)} there")
            continue
        leaf, is_encoded = leaves[place.name]
        source = Source(leaf, place, shape, is_encoded or leaf in frozen)
        try:
            if is_encoded:
                source = _encoded(saved, source)
            elif saved.leaves[leaf].shape != shape:
                _retiled(saved, source)
        except (ValueError, KeyError, StopIteration):
            has = "in 8 or 4 bits" if is_encoded else list(saved.leaves[leaf].shape)
            differences.append(f"{place.name} {has}, but {name} there makes it {list(shape)}")
        sources[name] = source
    used = {place.name for place in places.values()}
    for name in sorted(leaves):
        if name not in used and ADAPTER not in name:
            differences.append(f"{name}, which is not a tensor there")
    if differences:
        raise CheckpointError(
            f"{saved.folder} holds another model than {os.fspath(like)}. It holds: "
            f"{first_few(differences)}"
        )
    return sources


def _param_shape(
    tensor: Tensor, place: Place, num_layers: int, num_experts: int | None
) -> tuple[int, ...]:
    """Return the shape of the parameter to which a tensor belongs."""
    shape = tensor.shape
    if place.axes is not None:
        shape = tuple(shape[axis] for axis in place.axes)
    if num_experts is not None:
        shape = (num_experts, *shape)
    return shape if place.layer is None else (num_layers, *shape)


def _encoded(saved: SavedState, source: Source) -> Source:
    """Return the source of a quantized weight with its arrays and its layout.

    The layout follows from the names and shapes of the arrays.

    Raises:
      ValueError: a weight of this shape would have other arrays.
    """
    arrays: dict[str, str] = {}
    matches: list[re.Match[str]] = []
    for name in saved.leaves:
        leaf, _, suffix = name.partition(ENCODED)
        match = _ARRAY.fullmatch(suffix)
        if leaf == source.leaf and match is not None:
            arrays[match[3]] = name
            matches.append(match)
    first_array = next(iter(arrays.values()))
    match = matches[0]
    lead = int(source.place.layer is not None)
    num_groups = 1
    stored_shape = source.shape
    if saved.leaves[first_array].is_tiled:
        # Each group of experts was quantized by itself: [L, E, ..] -> [L, G, E / G, ..].
        num_groups = saved.leaves[first_array].shape[lead]
        group_size, rest = divmod(source.shape[lead], num_groups)
        if rest:
            raise ValueError("")
        stored_shape = (*source.shape[:lead], num_groups, group_size, *source.shape[lead + 1 :])
        lead += 1
    shape = stored_shape[lead:]
    moved = None if match[2] is None else int(match[2])
    if moved is not None:
        shape = (*shape[: len(shape) + moved], *shape[len(shape) + moved + 1 :], shape[moved])
    # An array's row is the merge of the weight's last dims: the array has that many dims fewer.
    merged = len(stored_shape) - len(saved.leaves[first_array].shape)
    inner = shape[len(shape) - merged :] if merged else ()
    group = (1, 1)
    if match[1] == "nf4":
        *_, rows, blocks = (1, *saved.leaves[arrays["scales"]].shape)
        *_, group_rows, group_blocks = (1, *saved.leaves[arrays["steps"]].shape)
        group = (rows // max(1, group_rows), blocks // max(1, group_blocks))
    layout = storage.Layout(format=match[1], inner=inner, moved=moved, group=group)  # pyright: ignore[reportArgumentType]
    expected = jax.tree_util.tree_flatten_with_path(
        storage.abstract_encoded(layout, stored_shape).q
    )[0]
    expected_shapes = {
        jax.tree_util.keystr(path, simple=True): tuple(array.shape) for path, array in expected
    }
    if expected_shapes != {name: saved.leaves[leaf].shape for name, leaf in arrays.items()}:
        raise ValueError("")
    return dataclasses.replace(source, num_groups=num_groups, arrays=arrays, layout=layout)


def _retiled(saved: SavedState, source: Source) -> Retiled:
    """Return a reader of a tiled weight in its untiled shape.

    Raises:
      ValueError: the shapes do not fit.
    """
    leaf = saved.leaves[source.leaf]
    shapes = {name: saved_leaf.shape for name, saved_leaf in saved.leaves.items()}
    return retiled(
        leaf.shape,
        source.shape,
        stacked=source.place.layer is not None,
        tiled=(leaf.is_tiled, False),
        is_mlp=of_mlp(source.leaf, shapes),
    )


def read_weight(saved: SavedState, source: Source, box: Box) -> np.ndarray:
    """Return a box of a tensor from an unquantized weight of a checkpoint, in its saved dtype."""
    axes = source.place.axes or tuple(range(len(box)))
    front = build_layer_box(source)
    saved_box = front + tuple(box[axis] for axis in axes)
    out = np.empty([b - a for a, b in saved_box], numpy_dtype(saved.leaves[source.leaf].dtype))
    if saved.leaves[source.leaf].shape == source.shape:
        read_part(saved, source.leaf, saved_box, out)
    else:
        _retiled(saved, source).read(saved.records, source.leaf, saved_box, out)
    weight = out.reshape(out.shape[len(front) :])
    return weight.transpose(np.argsort(axes))


def build_layer_box(source: Source) -> Box:
    """Return the first entries of a parameter's box, its layer and its expert, if it has them."""
    return tuple((number, number + 1) for number in source.place.member)


def read_adapter(saved: SavedState, leaf: str, layer: int | None) -> np.ndarray:
    """Return one layer of an adapter's matrix in float32."""
    shape = saved.leaves[leaf].shape
    front = () if layer is None else ((layer, layer + 1),)
    box = front + tuple((0, n) for n in shape[len(front) :])
    out = np.empty([b - a for a, b in box], np.float32)
    read_part(saved, leaf, box, out)
    return out[0] if front else out


def cut_rows(shape: tuple[int, ...], most: int, unit: int = 1) -> list[tuple[int, int]]:
    """Return ranges that cover the first dim.

    Each is a multiple of `unit` rows, and has at most `most` elements or is a single unit.
    """
    row = max(1, math.prod(shape[1:]))
    step = max(1, most // row // unit) * unit
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
