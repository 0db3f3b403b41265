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
            found = weights_in(path)
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        if found is None:
            return OrbaxFolder(path)
        path = found
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
        front = box[: array.encoding.lead]
        with self._lock:
            if self._last[0] != (array.tensor, front):
                weight = self._file.read(
                    array.tensor, front + tuple((0, n) for n in encoding.shape)
                )
                self._last = (
                    (array.tensor, front),
                    encoding.encode_here(np.asarray(weight, np.float32)),
                )
            record = self._last[1][array.index]
        starts = [*(start for start, _ in front), *(0,) * (len(box) - len(front))]
        return record[
            tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class EncodedArray:
    """One array of a weight that is encoded while it is imported.

    Attributes:
      tensor: name of the tensor in the file.
      encoding: encoding of the weight.
      index: index of the array among the arrays of the weight.
    """

    tensor: str
    encoding: Encoding
    index: int


class _Imported(SavedState):
    """A file of weights, used like a saved state."""

    has_opt_state = False

    def __init__(
        self,
        file: WeightFile,
        leaves: Mapping[str, SavedLeaf],
        weights: Mapping[str, str],
        constants: Mapping[str, np.ndarray],
        values: Mapping[str, np.ndarray],
        encoded: Mapping[str, EncodedArray],
        saved: SavedState | None,
        keys: Mapping[str, str],
        about: Mapping[str, Any],
    ) -> None:
        """Collect what a checkpoint would provide.

        Args:
          file: file of weights.
          leaves: all leaves but the small ones.
          weights: tensors of the file, by leaf.
          constants: numbers of the remaining leaves.
          values: small leaves, random keys as their data.
          encoded: arrays of weights that the program stores in 8 or 4 bits.
          saved: checkpoint that the weights belong to, or None; leaves that no other argument
            provides are read from it.
          keys: implementations of random keys among the values, by name; missing ones use the
            default implementation.
          about: settings that the weights' model reports.
        """
        self.folder = file.path
        self.num_processes = 1
        self.data = {}
        self.about = dict(about)
        self.leaves = dict(leaves)
        self.keys = dict(keys)
        self.values = {"step": np.zeros((), np.int32), "skipped": np.zeros((), np.int32), **values}
        self.records = StoredRecords(
            file, weights, constants, encoded, None if saved is None else saved.records
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
      key: random key from `jax.random.key`, as for `program.init`.
      rename: mapping from the file's names to the model's. Either a table by name, in which
        `{layer}` stands for the number of a layer, `{"h.{layer}.up.weight": ("blocks.up.kernel",
        (1, 0)), "wte": "embed.table"}`: a value is a name; or a pair of a name and the order of the
        file's dims, as for `numpy.transpose`; or None for a tensor that is not read. Names that are
        not in the table stay the same. Or a function from one name to such a value, or to a
        `zerojax.weights.Place` if layers are stacked. The tensors of layers are stacked as they are
        read.
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
    if missing not in ("error", "init") and not callable(missing):
        raise ValueError(
            f"missing={missing!r} is unknown: choose from 'error' and 'init', "
            "or pass a function of a name"
        )
    may_lack = missing if callable(missing) else lambda _: missing == "init"
    with contextlib.ExitStack() as stack:
        given: WeightFile
        error: type[Exception] = CheckpointError
        kept = Untouched()
        saved: SavedState | None = None
        about: Mapping[str, Any] = {}
        if not isinstance(path, str | os.PathLike):
            given = ArrayTree(path)
            error = ValueError
        elif holds_checkpoint(path := os.path.expanduser(os.fspath(path))):
            checkpoint = CheckpointWeights(path, program.mesh)
            stack.callback(checkpoint.close)
            given = checkpoint
            saved = checkpoint.saved
            about = saved.about
        else:
            given = open_weights(path)
            # Only exports of zerojax record it.
            about = given.about if isinstance(given, SafetensorsFile | OrbaxFolder) else {}
        # Inside `rename`, so that errors name the tensors as the file does.
        checked = FiniteWeights(given, program.layout.compute_dtype.name, error)
        state_leaves = leaves_of_program(program)
        try:
            file = checked if rename is None else RenamedFile(checked, rename)
            here = [x for x in state_leaves if x.name.startswith("weights") and not x.is_derived]
            if saved is not None:
                kept = untouched(saved, state_leaves)
                here = [
                    x for x in here if x.encodes not in kept.weights and x.name not in kept.leaves
                ]
            wanted = _as_given(here, program.layout.encodings)
            told = file.told if isinstance(file, RenamedFile) else str
            absent_of = file.missing_layers if isinstance(file, RenamedFile) else _no_names
            shapes = {".".join(split_path(leaf.name)): leaf.shape for leaf in wanted}
            if absent := {
                n: shape for n, shape in shapes.items() if n not in file.tensors and may_lack(n)
            }:
                file = CompletedFile(file, program.model, key, absent)
            weights, leaves = _compare(file, wanted, told, absent_of)
            encoded = _add_encoded(file, here, program.layout.encodings, weights, leaves)
        except CheckpointError as found:
            if error is ValueError:
                raise ValueError(str(found)) from found
            raise
        constants, others = _add_opt_state(program, state_leaves, weights, leaves)
        # To run tx.init, all weights must be on the device together.
        if others and (updates_by_parts(program.config) or program.layout.disk is not None):
            raise ValueError(
                f"tx.init computes {others[0]} from the weights, as neither a constant nor a copy: "
                "import into a program whose params, grads and opt_state are on the device with "
                "update='after_backward', save its state, and restore it here"
            )
        values = {
            "key": _data(state_key(key)),
            **_model_state(program, state_leaves, key),
            **kept.values,
        }
        values = {name: value for name, value in values.items() if name not in kept.leaves}
        given_state = _Imported(
            file,
            {**leaves, **kept.leaves},
            weights,
            constants,
            values,
            encoded,
            saved,
            kept.keys,
            about,
        )
        state = restore_state(program, given_state)
        return _initialised(program, state) if others else state


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
    others = []
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
        others += [] if value is not None else [leaf.name]
        constants[leaf.name] = np.zeros((), np.float32) if value is None else np.asarray(value)
        leaves[leaf.name] = SavedLeaf(leaf.shape, dtype, leaf.lead, bool(leaf.tiles), "")
    return constants, others


def _as_given(
    state_leaves: Sequence[StateLeaf], encodings: Mapping[str, Encoding]
) -> list[StateLeaf]:
    """Return the leaves, with one leaf for each encoded weight instead of its arrays."""
    given: dict[str, StateLeaf] = {}
    for leaf in state_leaves:
        if leaf.encodes:
            shape = leaf.shape[: leaf.lead] + encodings[leaf.encodes].shape
            leaf = dataclasses.replace(leaf, name=f"weights{leaf.encodes}", shape=shape)
        given.setdefault(leaf.name, leaf)
    return list(given.values())


def _add_encoded(
    file: WeightFile,
    state_leaves: Sequence[StateLeaf],
    encodings: Mapping[str, Encoding],
    weights: Mapping[str, str],
    leaves: dict[str, SavedLeaf],
) -> dict[str, EncodedArray]:
    """Return the sources of encoded weights' arrays, which replace these weights in `leaves`.

    Raises:
      CheckpointError: an encoded weight is in tiles.
    """
    encoded: dict[str, EncodedArray] = {}
    counts: dict[str, int] = {}
    for leaf in state_leaves:
        if not leaf.encodes:
            continue
        name = f"weights{leaf.encodes}"
        encoding = encodings[leaf.encodes]
        saved = leaves.pop(name, None)
        if saved is not None and saved.shape != leaf.shape[: leaf.lead] + encoding.shape:
            raise CheckpointError(
                f"{file.path}: {weights[name]} is in tiles {list(saved.shape)}, and "
                f"frozen_dtype={encoding.layout.format!r} encodes untiled weights: join its tiles "
                "first, or use frozen_dtype=None"
            )
        index = counts[name] = counts.get(name, -1) + 1
        encoded[leaf.name] = EncodedArray(weights[name], encoding, index)
        leaves[leaf.name] = SavedLeaf(leaf.shape, np.dtype(leaf.dtype).name, leaf.lead, False, "")
    return encoded


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
    # A key from jax.random.PRNGKey is plain numbers.
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
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
    told: Callable[[str], str] = str,
    absent_of: Callable[[str, int], list[str]] = _no_names,
) -> tuple[dict[str, str], dict[str, SavedLeaf]]:
    """Return the tensor of each weight, and its description.

    Args:
      file: file of weights.
      state_leaves: weights of the program.
      told: function from a tensor's name to its name in errors.
      absent_of: function of a stack's name and number of layers; returns the names of the tensors
        that the stack lacks.

    Raises:
      CheckpointError: tensors differ, or two weights have the same name in the file.
    """
    weights = {}
    leaves = {}
    differences = []
    owners: dict[str, str] = {}
    for leaf in state_leaves:
        name = ".".join(split_path(leaf.name))
        # Otherwise one tensor would silently be read for both.
        if (other := owners.setdefault(name, leaf.name)) != leaf.name:
            raise CheckpointError(
                f"{other} and {leaf.name} of the model are both {name} in {file.path}: rename "
                "one of them"
            )
    here_shapes = {leaf.name: leaf.shape for leaf in state_leaves}
    file_shapes = {
        name: tensor.shape
        for name in here_shapes
        if (tensor := file.tensors.get(".".join(split_path(name))))
    }
    for leaf in state_leaves:
        name = weights[leaf.name] = ".".join(split_path(leaf.name))
        if (tensor := file.tensors.get(name)) is None:
            differences.append(f"no {told(name)} {list(leaf.shape)}")
            continue
        # Other programs' files do not mark tiles: if the program has tiles, a tensor with as many
        # dims counts as tiles too.
        is_tiled = name in file.tiled or (bool(leaf.tiles) and len(tensor.shape) == len(leaf.shape))
        leaves[leaf.name] = SavedLeaf(tensor.shape, tensor.dtype, min(leaf.lead, 1), is_tiled, "")
        if not jnp.issubdtype(known_dtype(tensor.dtype), jnp.floating):
            differences.append(
                f"{told(name)} of {tensor.dtype}, which is not a supported floating dtype"
            )
        elif leaf.lead and (absent := absent_of(name, leaf.shape[0])):
            differences += [f"no {tensor_name}" for tensor_name in absent]
        elif tensor.shape != leaf.shape:
            try:
                if not (name in file.tiled or leaf.tiles):
                    raise ValueError("")
                is_mlp = of_mlp(leaf.name, here_shapes) and of_mlp(leaf.name, file_shapes)
                # Only for its errors: the restore computes the result again.
                retiled(
                    tensor.shape,
                    leaf.shape,
                    stacked=leaf.lead > 0,
                    tiled=(is_tiled, leaf.tiles),
                    is_mlp=is_mlp,
                )
            except ValueError as error:
                differences.append(
                    f"{told(name)} {list(tensor.shape)}, and here it is {list(leaf.shape)}{error}"
                )
    # The other direction too, so that one error names all differences.
    extra = sorted(set(file.tensors) - set(weights.values()))
    differences += [
        f"{told(name)} {list(file.tensors[name].shape)}, which this program's model does not have"
        for name in extra
    ]
    if differences:
        raise CheckpointError(
            f"{file.path} is of another model. It holds: {first_few(differences)}"
        )
    return weights, leaves


def _initialised(program: Program, state: TrainState) -> TrainState:
    """Return a state, all on the device, with the optimizer state initialized from its weights."""
    # The zeros are freed first, otherwise the optimizer state would be in memory twice.
    for leaf in jax.tree.leaves(state.opt_state):
        leaf.delete()
    with jax.set_mesh(program.mesh):
        init = jax.jit(program.tx.init, out_shardings=program.shardings.opt_state)
        return jax.block_until_ready(dataclasses.replace(state, opt_state=init(masters(state))))
