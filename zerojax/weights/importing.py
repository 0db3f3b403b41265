"""Create a fresh state of a program from arrays, or from a file of weights.

The file may be safetensors or in Orbax's format, written by zerojax or others, or a zerojax
checkpoint.

    state = zj.import_params(program, "gpt.safetensors", key=jax.random.key(0))
    state = zj.import_params(program, {"embed": {"table": array}, ...}, key=jax.random.key(0))

This equals `program.init(key)` with other weights: step 0, the same key, the optimizer state that
`tx.init` computes from the weights, and the same untrained model state. The file is passed to a
restore as if it were a checkpoint, and so is read layer by layer into any stage, mesh and tier.

Such a file does not hold the optimizer's leaves. `zerojax.weights.initial_opt_state` finds the
initial value of each:

    one number, or a few    known before the file is read
    a copy of a weight      read like that weight
    anything else           computed by `tx.init` from the weights; only if everything is stored on
                            the device
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import Box, SavedRecords
from zerojax.checkpoint import (
    CheckpointError,
    Retiled,
    SavedLeaf,
    SavedState,
    StateLeaf,
    explained,
    first_few,
    holds_checkpoint,
    leaves_of_program,
    of_mlp,
    restore_state,
    retiled,
)
from zerojax.config import updates_by_parts
from zerojax.models import init_state
from zerojax.program import Program
from zerojax.sharding import uncommitted, without_mesh
from zerojax.state import Encoding, TrainState, masters, state_key
from zerojax.trees import Tree
from zerojax.weights.arrays import ArrayTree
from zerojax.weights.checkpoints import CheckpointWeights, Untouched, untouched
from zerojax.weights.finite import FiniteWeights
from zerojax.weights.initial_opt_state import Copy, initial_values
from zerojax.weights.initial_weights import CompletedFile
from zerojax.weights.names import WeightFile, known_dtype, split_path
from zerojax.weights.orbax import OrbaxFolder
from zerojax.weights.renamed import Rename, RenamedFile
from zerojax.weights.safetensors import SafetensorsFile
from zerojax.weights.shards import INDEX, ShardedSafetensors, weights_in


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """Open a file of weights in its format.

    A folder with a safetensors index is opened with all files that the index names.

    Args:
      path: path of a file or folder.

    Raises:
      CheckpointError: the path does not exist, or holds no weights in a known format.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist")
    if os.path.isdir(path):
        try:
            weights_path = weights_in(path)
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        if weights_path is None:
            return OrbaxFolder(path)
        path = weights_path
    return ShardedSafetensors(path) if path.endswith(INDEX) else SafetensorsFile(path)


class StoredRecords(SavedRecords):
    """Records of a state that was never saved: a file's weights and an initial optimizer state."""

    def __init__(
        self,
        file: WeightFile,
        weights: Mapping[str, str],
        constants: Mapping[str, np.ndarray],
        encoded: Mapping[str, "EncodedArray"],
        saved: SavedRecords | None,
    ) -> None:
        """Read the tensors that `weights` and `encoded` name, by leaf.

        Leaves in `constants` are numbers. All other leaves are read from `saved`, the records of a
        checkpoint.
        """
        super().__init__(file.path, ())
        self._file = file
        self._weights = weights
        self._constants = constants
        self._encoded = encoded
        self._saved = saved
        # The arrays of one record of one weight: they are requested one after the other, and by
        # each device.
        self._last: tuple[Any, list[np.ndarray]] = (None, [])
        self._lock = threading.Lock()

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of a leaf."""
        if name in self._encoded:
            out[...] = self._encode(self._encoded[name], box)
            return
        if name in self._weights:
            out[...] = self._file.read(self._weights[name], box)
            return
        if self._saved is not None and name not in self._constants:
            self._saved.read(name, box, out)
            return
        value = self._constants[name]
        out[...] = value[tuple(slice(a, b) for a, b in box)] if value.shape else value

    def _encode(self, array: "EncodedArray", box: Box) -> np.ndarray:
        """Return a part of an encoded weight's array.

        The full record is encoded, which has the same bits as its shards.
        """
        encoding = array.encoding
        front = box[: encoding.lead]
        record_id = (array.tensor, front)
        with self._lock:
            if self._last[0] != record_id:
                record_box = front + tuple((0, n) for n in encoding.shape)
                weight = self._read_weight(array, record_box)
                self._last = (record_id, encoding.encode_here(weight))
            record = self._last[1][array.index]
        starts = [*(start for start, _ in front), *(0,) * (len(box) - len(front))]
        return record[
            tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
        ]

    def _read_weight(self, array: "EncodedArray", box: Box) -> np.ndarray:
        """Return a box of an encoded weight in float32, from a tensor that may have other tiles."""
        if array.tiles is None:
            return np.asarray(self._file.read(array.tensor, box), np.float32)
        weight = np.empty([stop - start for start, stop in box], np.float32)
        array.tiles.read(_Tensors(self._file), array.tensor, box, weight)
        return weight


class _Tensors(SavedRecords):
    """The tensors of a file, as records."""

    def __init__(self, file: WeightFile) -> None:
        """Take the file."""
        super().__init__(file.path, ())
        self._file = file

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of a tensor."""
        out[...] = self._file.read(name, box)


@dataclasses.dataclass(frozen=True)
class EncodedArray:
    """One array of a weight that is encoded while it is imported.

    Attributes:
      tensor: name of the tensor in the file.
      encoding: encoding of the weight.
      index: index of the array among the arrays of the weight.
      tiles: how to read the weight from the tensor if it is in other tiles; else None.
    """

    tensor: str
    encoding: Encoding
    index: int
    tiles: Retiled | None = None


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where the weights come from.

    Attributes:
      file: file of weights, or arrays in memory.
      error: type of the errors about its contents.
      saved: checkpoint that the weights belong to, or None.
      about: settings that the weights' model reports.
    """

    file: WeightFile
    error: type[Exception] = CheckpointError
    saved: SavedState | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The weights of a program, as a file holds them.

    Attributes:
      file: the file, in which missing weights have been completed.
      tensors: tensors of the file, by leaf.
      leaves: descriptions of the leaves that are read from the file.
      encoded: arrays of weights that the program stores in 8 or 4 bits, by leaf.
      copied: leaves that are copied from a checkpoint unchanged.
    """

    file: WeightFile
    tensors: dict[str, str]
    leaves: dict[str, SavedLeaf]
    encoded: dict[str, EncodedArray]
    copied: Untouched


class _Imported(SavedState):
    """A file of weights, used like a saved state."""

    has_opt_state = False

    def __init__(
        self,
        source: _Source,
        weights: _Weights,
        constants: Mapping[str, np.ndarray],
        values: Mapping[str, np.ndarray],
    ) -> None:
        """Collect what a checkpoint would provide.

        Args:
          source: where the weights come from. Leaves that no other argument provides are read from
            its checkpoint.
          weights: weights of the file.
          constants: numbers of the optimizer's constant leaves.
          values: small leaves, random keys as their data. Keys whose implementation
            `weights.copied` does not name use the default implementation.
        """
        self.folder = weights.file.path
        self.num_processes = 1
        self.data = {}
        self.about = dict(source.about)
        self.leaves = {**weights.leaves, **weights.copied.leaves}
        self.keys = dict(weights.copied.keys)
        self.values = {"step": np.zeros((), np.int32), "skipped": np.zeros((), np.int32), **values}
        self.records = StoredRecords(
            weights.file,
            weights.tensors,
            constants,
            weights.encoded,
            None if source.saved is None else source.saved.records,
        )

    def check(self, *, checksums: bool, part: int = 0, num_parts: int = 1) -> None:
        """Do nothing.

        A checkpoint was compared when it was opened, and other formats have no checksums.
        """


@without_mesh
def import_params(
    program: Program,
    path: str | os.PathLike[str] | Any,
    *,
    key: jax.Array,
    rename: Rename | None = None,
    missing: Literal["error", "init"] | Callable[[str], bool] = "error",
) -> TrainState:
    """Return a fresh state with the weights of a file, or with given arrays.

    In a run with several processes, all of them must call this.

    Args:
      program: program whose model has these weights, on any mesh, stage, tier and precision.
        Weights in another number of tiles are retiled. The program's state on disk is overwritten
        once names and shapes were compared.
      path: a safetensors file, an index of several (`model.safetensors.index.json`), the folder of
        either, or the folder of a checkpoint in Orbax's format that holds the parameter tree. Or a
        zerojax checkpoint: the folder of one step, or the directory of a `Checkpointer`, whose
        newest intact step is imported. It may have been saved on any mesh, stage and tier and with
        any optimizer; untrained model state is imported with its weights. Names are the ones that
        `export_safetensors` and `export_orbax` write, or that `rename` returns; dtypes are
        floating, and read as float32. Or a tree of numpy or JAX arrays, structured or named like
        the parameters: nested dicts and lists, or a flat dict with names as in safetensors. The
        arrays are not changed, and are read one record at a time; each process needs all of them.
        Or an opened file of weights (`zerojax.weights.WeightFile`).
      key: random key from `jax.random.key`, as for `program.init`.
      rename: mapping from the file's names to the model's. Either a table by name, in which
        `{layer}` stands for the number of a layer, `{"h.{layer}.up.weight": ("blocks.up.kernel",
        (1, 0)), "wte": "embed.table"}`: a value is a name; or a pair of a name and the order of the
        file's dims, as for `numpy.transpose`; or a `zerojax.weights.Place`; or a list of places,
        each with a `zerojax.weights.Part`, for a tensor that holds several parameters; or None for
        a tensor that is not read. `{expert}` stands for the number of an expert: experts are
        stacked too, after the layers. `{rest}` stands for any end of a name, if the value is None.
        Names that are not in the table stay the same. Or a function from one name to such a value.
        The tensors of layers and experts are stacked as they are read.
      missing: "error" requires all weights in the file. "init" takes missing weights, such as
        adapters, from `program.init(key)`. A function of a name returns whether that weight may be
        missing.

    Returns:
      The state at step 0. Its optimizer state is the result of `tx.init`; its `model_state` is the
        checkpoint's, or else the result of `program.init(key)`.

    Raises:
      ValueError: `key` is not a random key, or `rename` or `missing` has another form; or the
        optimizer's state is neither constant nor a copy of weights, and not all of the state is
        stored on the device. For a tree of arrays: it lacks weights, has others, or has other
        shapes; a leaf is not an array; or a number is NaN, infinite, or beyond the program's
        compute dtype, and the error names its array.
      CheckpointError: the file cannot be read, has an unknown format, lacks weights, has others, or
        has other shapes; the error names the first. Or a number is NaN, infinite, or beyond the
        program's compute dtype, and the error names its tensor.
      DamagedError: the checkpoint is damaged.
      SwapError: the program's disk is too small, or failed.
    """
    key = uncommitted(_checked_key(key, program))
    may_lack = _checked_missing(missing)
    with contextlib.ExitStack() as stack:
        source = _open_source(path, program, stack)
        state_leaves = leaves_of_program(program)
        try:
            weights = _match_weights(program, source, state_leaves, key, rename, may_lack)
        except CheckpointError as error:
            if source.error is ValueError:
                raise ValueError(str(error)) from error
            raise
        constants, computed = _add_opt_state(program, state_leaves, weights.tensors, weights.leaves)
        if computed:
            _check_on_device(program, computed[0])
        values = {
            "key": _data(state_key(key)),
            **_model_state(program, state_leaves, key),
            **weights.copied.values,
        }
        for name in weights.copied.leaves:
            values.pop(name, None)
        state = restore_state(program, _Imported(source, weights, constants, values))
        return _initialised(program, state) if computed else state


def _checked_missing(
    missing: Literal["error", "init"] | Callable[[str], bool],
) -> Callable[[str], bool]:
    """Return a function of a name that returns whether that weight may be missing.

    Raises:
      ValueError: `missing` has another form than `import_params` documents.
    """
    if callable(missing):
        return missing
    if missing not in ("error", "init"):
        raise ValueError(
            f"missing={missing!r} is unknown: choose from 'error' and 'init', "
            "or pass a function of a name"
        )
    return lambda _: missing == "init"


def _check_on_device(program: Program, computed: str) -> None:
    """Raise ValueError unless all of the state is on the device, so that `tx.init` can run.

    `computed` names a leaf of the optimizer state that `tx.init` computes from the weights, which
    must be on the device together.
    """
    if updates_by_parts(program.config) or program.layout.disk is not None:
        raise ValueError(
            f"tx.init computes {computed} from the weights, as neither a constant nor a "
            "copy: import into a program whose params, grads and opt_state are on the device "
            "with update='after_backward', save its state, and restore it here"
        )


def _open_source(
    path: str | os.PathLike[str] | Tree, program: Program, stack: contextlib.ExitStack
) -> _Source:
    """Open a path of weights, or wrap a tree of arrays; `stack` closes it.

    Raises:
      ValueError: a leaf of the tree is not an array.
      CheckpointError: the file cannot be read, or has an unknown format.
      DamagedError: the checkpoint is damaged.
    """
    if not isinstance(path, str | os.PathLike):
        if hasattr(path, "tensors") and hasattr(path, "read"):
            return _Source(path)
        return _Source(ArrayTree(path), ValueError)

    path = os.path.expanduser(os.fspath(path))
    if holds_checkpoint(path):
        checkpoint = CheckpointWeights(path, program.mesh)
        stack.callback(checkpoint.close)
        return _Source(checkpoint, saved=checkpoint.saved, about=checkpoint.saved.about)

    file = open_weights(path)
    # Only exports of zerojax record their model's settings.
    about = file.about if isinstance(file, SafetensorsFile | OrbaxFolder) else {}
    return _Source(file, about=about)


def _match_weights(
    program: Program,
    source: _Source,
    state_leaves: Sequence[StateLeaf],
    key: jax.Array,
    rename: Rename | None,
    may_lack: Callable[[str], bool],
) -> _Weights:
    """Find the tensor of each weight of a program.

    Args:
      program: program whose weights are read.
      source: where they come from.
      state_leaves: leaves of the program's state.
      key: random key of missing weights.
      rename: mapping from the file's names to the model's, as for `import_params`.
      may_lack: function of a name; returns whether that weight may be missing.

    Raises:
      CheckpointError: the file and the model differ.
      ValueError: `rename` has another form.
    """
    # Inside `rename`, so that errors name the tensors as the file does.
    file: WeightFile = FiniteWeights(source.file, program.layout.compute_dtype.name, source.error)
    error_name: Callable[[str], str] = str
    absent_layers = _no_names
    if rename is not None:
        renamed = RenamedFile(file, rename)
        file = renamed
        error_name = renamed.error_name
        absent_layers = renamed.missing_layers

    leaves_to_read = [
        leaf for leaf in state_leaves if leaf.name.startswith("weights") and not leaf.is_derived
    ]
    copied = Untouched()
    if source.saved is not None:
        copied = untouched(source.saved, state_leaves)
        leaves_to_read = [
            leaf
            for leaf in leaves_to_read
            if leaf.encodes not in copied.weights and leaf.name not in copied.leaves
        ]

    encodings = program.layout.encodings
    unencoded = _unencoded(leaves_to_read, encodings)
    absent: dict[str, tuple[int, ...]] = {}
    for leaf in unencoded:
        name = ".".join(split_path(leaf.name))
        if name not in file.tensors and may_lack(name):
            absent[name] = leaf.shape
    if absent:
        file = CompletedFile(file, program.model, key, absent)

    tensors, leaves = _compare(file, unencoded, error_name, absent_layers)
    encoded = _add_encoded(file, leaves_to_read, encodings, tensors, leaves)
    return _Weights(file, tensors, leaves, encoded, copied)


def _add_opt_state(
    program: Program,
    state_leaves: Sequence[StateLeaf],
    weights: dict[str, str],
    leaves: dict[str, SavedLeaf],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Add the optimizer state's leaves, with their sources.

    Args:
      program: program whose `tx.init` defines them.
      state_leaves: leaves of its state.
      weights: tensor of each weight; copies of weights are added.
      leaves: leaves in the file; the optimizer's leaves are added.

    Returns:
      The numbers of constant leaves, and the names of leaves that are computed from the weights;
        these are zeros for now.

    Raises:
      ValueError: a leaf is a random key.
    """
    with jax.set_mesh(program.mesh):
        values = initial_values(program.tx.init, program.layout.abstract_params)
    params = jax.tree_util.tree_flatten_with_path(program.layout.abstract_params)[0]
    names = [f"weights{jax.tree_util.keystr(path)}" for path, _ in params]
    constants: dict[str, np.ndarray] = {}
    computed: list[str] = []
    opt_leaves = [leaf for leaf in state_leaves if leaf.path.startswith(".opt_state")]
    for leaf, value in zip(opt_leaves, values, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{leaf.name} is a random key, which cannot be imported: use an optimizer that "
                "stores a jax.random.PRNGKey"
            )
        dtype = np.dtype(leaf.dtype).name
        if isinstance(value, Copy):
            weight = names[value.index]
            weights[leaf.name] = weights[weight]
            leaves[leaf.name] = dataclasses.replace(leaves[weight], dtype=dtype)
            continue
        if value is None:
            computed.append(leaf.name)
            constants[leaf.name] = np.zeros((), np.float32)
        else:
            constant = np.asarray(value)
            if leaf.order is not None and constant.shape:
                constant = leaf.order.narrow(constant)
            constants[leaf.name] = constant
        leaves[leaf.name] = SavedLeaf(leaf.shape, dtype, leaf.lead, bool(leaf.tiles), "")
    return constants, computed


def _unencoded(
    state_leaves: Sequence[StateLeaf], encodings: Mapping[str, Encoding]
) -> list[StateLeaf]:
    """Return the leaves, with one leaf for each encoded weight instead of its arrays."""
    unencoded: dict[str, StateLeaf] = {}
    for leaf in state_leaves:
        if leaf.encodes:
            encoding = encodings[leaf.encodes]
            shape = leaf.shape[: encoding.lead] + encoding.shape
            leaf = dataclasses.replace(leaf, name=f"weights{leaf.encodes}", shape=shape)
        unencoded.setdefault(leaf.name, leaf)
    return list(unencoded.values())


def _add_encoded(
    file: WeightFile,
    state_leaves: Sequence[StateLeaf],
    encodings: Mapping[str, Encoding],
    weights: Mapping[str, str],
    leaves: dict[str, SavedLeaf],
) -> dict[str, EncodedArray]:
    """Return the sources of encoded weights' arrays, which replace these weights in `leaves`."""
    encoded: dict[str, EncodedArray] = {}
    counts: dict[str, int] = {}
    tiles: dict[str, Retiled | None] = {}
    shapes = {leaf.name: leaf.shape for leaf in _unencoded(state_leaves, encodings)}
    file_shapes = {leaf: file.tensors[name].shape for leaf, name in weights.items()}
    for leaf in state_leaves:
        if not leaf.encodes:
            continue
        name = f"weights{leaf.encodes}"
        encoding = encodings[leaf.encodes]
        saved = leaves.pop(name, None)
        if saved is not None:
            tiles[name] = None
            if saved.shape != shapes[name]:
                is_mlp = of_mlp(name, shapes) and of_mlp(name, file_shapes)
                tiles[name] = _retiled_tensor(leaf, saved, shapes[name], is_mlp)
        index = counts[name] = counts.get(name, -1) + 1
        encoded[leaf.name] = EncodedArray(weights[name], encoding, index, tiles[name])
        leaves[leaf.name] = SavedLeaf(leaf.shape, np.dtype(leaf.dtype).name, leaf.lead, False, "")
    return encoded


def _retiled_tensor(
    leaf: StateLeaf, saved: SavedLeaf, shape: tuple[int, ...], is_mlp: bool
) -> Retiled:
    """Return how to read a weight of a shape from a tensor in other tiles."""
    return retiled(
        saved.shape,
        shape,
        stacked=leaf.lead > 0,
        tiled=(saved.is_tiled, leaf.tiles),
        is_mlp=is_mlp,
    )


def _model_state(
    program: Program, state_leaves: Sequence[StateLeaf], key: jax.Array
) -> dict[str, np.ndarray]:
    """Return the untrained model state of `program.init(key)`, by leaf; files hold none."""
    names = [leaf.name for leaf in state_leaves if leaf.path.startswith(".model_state")]
    if not names:
        return {}
    state = jax.jit(lambda key: init_state(program.model, key))(key)
    return {name: _data(leaf) for name, leaf in zip(names, jax.tree.leaves(state), strict=True)}


def _data(leaf: jax.Array) -> np.ndarray:
    """Return an array as a numpy array; a random key as its data."""
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def _checked_key(key: Any, program: Program) -> jax.Array:
    """Return the key as `program.init(key)` takes it.

    Raises:
      ValueError: it is not a random key of the program's kind.
    """
    if not isinstance(key, jax.Array):
        raise ValueError(
            f"import_params takes a random key, such as jax.random.key(0), got {key!r}"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        # A key from jax.random.PRNGKey is plain numbers.
        key = jax.random.wrap_key_data(key)
    expected = program.layout.abstract_state.key.dtype
    if key.shape or key.dtype != expected:
        raise ValueError(
            f"import_params takes one random key of {expected}, got {key.dtype}{list(key.shape)}"
        )
    return key


def _no_names(name: str, num_layers: int) -> list[str]:
    """Return no names: the layers of a file's stacks are not separate tensors."""
    del name, num_layers
    return []


def _compare(
    file: WeightFile,
    state_leaves: Sequence[StateLeaf],
    error_name: Callable[[str], str] = str,
    absent_layers: Callable[[str, int], list[str]] = _no_names,
) -> tuple[dict[str, str], dict[str, SavedLeaf]]:
    """Return the tensor of each weight, and its description.

    Args:
      file: file of weights.
      state_leaves: weights of the program.
      error_name: function from a tensor's name to its name in errors.
      absent_layers: function of a stack's name and number of layers; returns the names of the
        tensors that the stack lacks.

    Raises:
      CheckpointError: tensors differ, or two weights have the same name in the file.
    """
    weights = _tensor_names(file, state_leaves)
    differences = _list_differences(file, state_leaves, weights, error_name, absent_layers)
    if differences:
        raise CheckpointError(
            f"{file.path} is of another model. It holds: {first_few(differences)}"
        )
    leaves: dict[str, SavedLeaf] = {}
    for leaf in state_leaves:
        name = weights[leaf.name]
        tensor = file.tensors[name]
        # Other programs' files do not mark tiles: if the program has tiles, a tensor with as many
        # dims counts as tiles too.
        is_tiled = name in file.tiled or (bool(leaf.tiles) and len(tensor.shape) == len(leaf.shape))
        leaves[leaf.name] = SavedLeaf(tensor.shape, tensor.dtype, min(leaf.lead, 1), is_tiled, "")
    return weights, leaves


def _list_differences(
    file: WeightFile,
    state_leaves: Sequence[StateLeaf],
    weights: Mapping[str, str],
    error_name: Callable[[str], str],
    absent_layers: Callable[[str, int], list[str]],
) -> list[str]:
    """Return the differences between a file and a program's weights, as phrases of an error.

    The arguments are those of `_compare`; `weights` holds each weight's name in the file, by leaf.
    """
    model_shapes = {leaf.name: leaf.shape for leaf in state_leaves}
    file_shapes: dict[str, tuple[int, ...]] = {}
    for leaf_name, name in weights.items():
        if name in file.tensors:
            file_shapes[leaf_name] = file.tensors[name].shape

    differences: list[str] = []
    for leaf in state_leaves:
        name = weights[leaf.name]
        tensor = file.tensors.get(name)
        if tensor is None:
            differences.append(f"no {error_name(name)} {list(leaf.shape)}")
            continue
        if not jnp.issubdtype(known_dtype(tensor.dtype), jnp.floating):
            differences.append(
                f"{error_name(name)} of {tensor.dtype}, which is not a supported floating dtype"
            )
            continue
        absent = absent_layers(name, leaf.shape[0]) if leaf.lead else []
        differences += [f"no {tensor_name}" for tensor_name in absent]
        if absent or tensor.shape == leaf.shape:
            continue
        is_mlp = of_mlp(leaf.name, model_shapes) and of_mlp(leaf.name, file_shapes)
        try:
            _check_tiles(leaf, tensor.shape, name in file.tiled, is_mlp)
        except ValueError as error:
            differences.append(
                f"{error_name(name)} {list(tensor.shape)}, and here it is {list(leaf.shape)}{error}"
            )

    # The other direction too, so that one error names all differences.
    for name in sorted(set(file.tensors) - set(weights.values())):
        shape = list(file.tensors[name].shape)
        differences.append(f"{error_name(name)} {shape}, which this program's model does not have")
    return differences


def _check_tiles(
    leaf: StateLeaf, tensor_shape: tuple[int, ...], marks_tiles: bool, is_mlp: bool
) -> None:
    """Raise ValueError if a tensor of another shape cannot be read as a weight in other tiles.

    Args:
      leaf: weight of the program.
      tensor_shape: shape in the file.
      marks_tiles: whether the file says that the tensor is a stack of tiles.
      is_mlp: whether the weight belongs to an MLP in both.
    """
    if not (marks_tiles or leaf.tiles):
        raise ValueError("")
    is_tiled = marks_tiles or (bool(leaf.tiles) and len(tensor_shape) == len(leaf.shape))
    # Only for its errors: the restore computes the result again.
    retiled(
        tensor_shape,
        leaf.shape,
        stacked=leaf.lead > 0,
        tiled=(is_tiled, leaf.tiles),
        is_mlp=is_mlp,
    )


def _tensor_names(file: WeightFile, state_leaves: Sequence[StateLeaf]) -> dict[str, str]:
    """Return the name in a file of each weight, by leaf.

    Raises:
      CheckpointError: two weights have the same name in the file.
    """
    weights: dict[str, str] = {}
    owners: dict[str, str] = {}
    for leaf in state_leaves:
        name = ".".join(split_path(leaf.name))
        owner = owners.setdefault(name, leaf.name)
        # Otherwise one tensor would silently be read for both.
        if owner != leaf.name:
            raise CheckpointError(
                f"{owner} and {leaf.name} of the model are both {name} in {file.path}: rename "
                "one of them"
            )
        weights[leaf.name] = name
    return weights


def _initialised(program: Program, state: TrainState) -> TrainState:
    """Return a state, all on the device, with the optimizer state initialized from its weights."""
    # The zeros are freed first, otherwise the optimizer state would be in memory twice.
    for leaf in jax.tree.leaves(state.opt_state):
        leaf.delete()
    with jax.set_mesh(program.mesh):
        init = jax.jit(program.tx.init, out_shardings=program.shardings.opt_state)
        return jax.block_until_ready(dataclasses.replace(state, opt_state=init(masters(state))))
