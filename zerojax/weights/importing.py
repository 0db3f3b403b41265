"""A fresh state of a program, with weights from a file that zerojax or others wrote: safetensors, or Orbax's format.

    state = zj.import_params(program, "gpt.safetensors", key=jax.random.key(0))

is `program.init(key)` with other weights: step 0, the same key, and the optimizer state that `tx.init` makes of the weights.
The file is given to `Restoring` as if it were a checkpoint, and so read layer by layer into any stage, mesh and tier.

The optimizer's leaves are in no file. `tx.init` is traced, and for each leaf of its result it is told what it is:

    a number, or a few     read off the trace
    a copy of a weight     read as that weight is
    anything else          computed by `tx.init` from the weights; only where all rests on the device
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import Box, SavedRecords
from zerojax.checkpoint import (
    MOST_NAMED,
    CheckpointError,
    SavedLeaf,
    SavedState,
    StateLeaf,
    contents_of_program,
    of_mlp,
    restore_state,
    retiled,
)
from zerojax.config import updates_by_parts
from zerojax.program import Program
from zerojax.state import TrainState, masters
from zerojax.weights.initial_opt_state import Copy, initial_values
from zerojax.weights.names import known_dtype, path_of
from zerojax.weights.orbax import OrbaxFolder
from zerojax.weights.safetensors import SafetensorsFile

WeightFile = SafetensorsFile | OrbaxFolder


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """Open a file of weights, of the format that it is in.

    Raises:
      CheckpointError: it is none.
    """
    found = os.path.abspath(os.fspath(path))
    if not os.path.exists(found):
        raise CheckpointError(f"{found} is not there")
    return OrbaxFolder(found) if os.path.isdir(found) else SafetensorsFile(found)


class StoredRecords(SavedRecords):
    """Leaves of a state that is not there: weights of a file, and what an optimizer makes of them."""

    def __init__(self, file: WeightFile, weights: Mapping[str, str], made: Mapping[str, np.ndarray]) -> None:
        """Read from `file`, by names in a checkpoint; `made` are other leaves."""
        super().__init__(file.path, ())
        self._file, self._weights, self._made = file, weights, made

    def read(self, name: str, box: Box, out: np.ndarray) -> None:
        if name in self._weights:
            out[...] = self._file.read(self._weights[name], box)
            return
        value = self._made[name]
        out[...] = value[tuple(slice(a, b) for a, b in box)] if value.shape else value


class _Imported(SavedState):
    """A state of which a file holds the weights."""

    has_opt_state = False

    def __init__(
        self,
        file: WeightFile,
        contents: Mapping[str, SavedLeaf],
        weights: Mapping[str, str],
        made: Mapping[str, np.ndarray],
        key: np.ndarray,
    ) -> None:
        """Take the place of a checkpoint.

        Args:
          file: of the weights.
          contents: all leaves but the small ones.
          weights: the tensors of the file, by leaf.
          made: the numbers of the others.
          key: key data of the state.
        """
        self.folder, self.num_processes, self.data = file.path, 1, {}
        self.contents = dict(contents)
        self.keys: dict[str, str] = {}  # of the default implementation
        self.values = {"step": np.zeros((), np.int32), "skipped": np.zeros((), np.int32), "key": key}
        self.records = StoredRecords(file, weights, made)

    def check(self, *, checksums: bool, part: int = 0, num_parts: int = 1) -> None:
        """Do nothing: these formats hold no checksums of their own."""


def import_params(program: Program, path: str | os.PathLike[str], *, key: jax.Array) -> TrainState:
    """Return a fresh state whose weights are those of a file; in a run of several processes all call this.

    Args:
      program: of the model whose weights they are, on any mesh, stage, tier and precision. Weights in another number of tiles
        are cut anew. What the program had on disk is overwritten, once names and shapes were compared.
      path: a safetensors file, or the folder of a checkpoint in Orbax's format that holds the parameter tree. Its names are
        those that `export_safetensors` and `export_orbax` give; its dtypes are floating, and read as float32.
      key: from `jax.random.key`, as for `program.init`.

    Returns:
      The state at step 0; its optimizer state is that of `tx.init`.

    Raises:
      ValueError: `key` is no random key, or the optimizer's state is neither constant nor a copy of weights and does not all
        rest on the device.
      CheckpointError: the file is of neither format, or lacks weights, has others, or has others' shapes: the first are named.
      DamagedError: the file cannot be read.
      SwapError: the program's disk is too small, or failed.
    """
    data = _key_data(key, program)
    file = open_weights(path)
    weights, contents = _compare(
        file, [c for c in contents_of_program(program) if c.name.startswith("weights") and not c.is_derived]
    )
    with jax.set_mesh(program.mesh):
        made = initial_values(program.tx.init, program.layout.abstract_params)
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(program.layout.abstract_params)[0]]
    constants: dict[str, np.ndarray] = {}
    others = []
    states = [content for content in contents_of_program(program) if content.path.startswith(".opt_state")]
    for content, value in zip(states, made, strict=True):
        if jnp.issubdtype(content.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{content.name} is a random key, which is not imported: use an optimizer that keeps jax.random.PRNGKey"
            )
        told = SavedLeaf(content.shape, np.dtype(content.dtype).name, content.lead, bool(content.tiles), "")
        if isinstance(value, Copy):
            source = f"weights{names[value.index]}"
            weights[content.name] = weights[source]
            told = dataclasses.replace(contents[source], dtype=told.dtype)
        else:
            others += [] if value is not None else [content.name]
            constants[content.name] = np.zeros((), np.float32) if value is None else np.asarray(value)
        contents[content.name] = told
    if others and (updates_by_parts(program.config) or program.layout.disk is not None):
        raise ValueError(
            f"tx.init makes {others[0]} of the weights, as neither a constant nor a copy: import into a program whose params, "
            "grads and opt_state are on the device with update='after_backward', save it, and restore it here"
        )
    state = restore_state(program, _Imported(file, contents, weights, constants, data))
    return _initialised(program, state) if others else state


def _key_data(key: Any, program: Program) -> np.ndarray:
    """Return the data of the key that `program.init(key)` puts into a state."""
    if not isinstance(key, jax.Array):
        raise ValueError(f"import_params takes a random key, such as jax.random.key(0), got {key!r}")
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    expected = program.layout.abstract_state.key.dtype
    if key.shape or key.dtype != expected:
        raise ValueError(f"import_params takes one random key of {expected}, got {key.dtype}{list(key.shape)}")
    return np.asarray(jax.random.key_data(jax.random.fold_in(key, 0x5EED)))


def _compare(file: WeightFile, wanted: Sequence[StateLeaf]) -> tuple[dict[str, str], dict[str, SavedLeaf]]:
    """Return the tensor of each weight, and what it is.

    Raises:
      CheckpointError: tensors that differ.
    """
    weights, contents, differ = {}, {}, []
    here_shapes = {content.name: content.shape for content in wanted}
    file_shapes = {name: tensor.shape for name in here_shapes if (tensor := file.tensors.get(".".join(path_of(name))))}
    for content in wanted:
        name = weights[content.name] = ".".join(path_of(content.name))
        here = f"{name} {list(content.shape)}"
        if (tensor := file.tensors.get(name)) is None:
            differ.append(f"no {here}")
            continue
        is_tiled = name in file.tiled or (bool(content.tiles) and len(tensor.shape) == len(content.shape))
        told = SavedLeaf(tensor.shape, tensor.dtype, min(content.lead, 1), is_tiled, "")
        if not jnp.issubdtype(known_dtype(tensor.dtype), jnp.floating):
            differ.append(f"{name} of {tensor.dtype}, which is no floating dtype that is read here")
        elif tensor.shape != content.shape:
            try:
                if not (name in file.tiled or content.tiles):
                    raise ValueError("")
                both = (is_tiled, content.tiles)
                is_mlp = of_mlp(content.name, here_shapes) and of_mlp(content.name, file_shapes)
                retiled(tensor.shape, content.shape, stacked=content.lead > 0, tiled=both, is_mlp=is_mlp)
            except ValueError as error:
                differ.append(f"{name} {list(tensor.shape)}, and here it is {list(content.shape)}{error}")
        contents[content.name] = told
    extra = sorted(set(file.tensors) - set(weights.values()))
    differ += [f"{name} {list(file.tensors[name].shape)}, which this program's model has not" for name in extra]
    if differ:
        more = f"; and {len(differ) - MOST_NAMED} more" if len(differ) > MOST_NAMED else ""
        raise CheckpointError(f"{file.path} is of another model. It holds: {'; '.join(differ[:MOST_NAMED])}{more}")
    return weights, contents


def _initialised(program: Program, state: TrainState) -> TrainState:
    """Return a state that is all on the device, with the optimizer state of its weights."""
    for leaf in jax.tree.leaves(state.opt_state):
        leaf.delete()
    with jax.set_mesh(program.mesh):
        init = jax.jit(program.tx.init, out_shardings=program.shardings.opt_state)
        return jax.block_until_ready(dataclasses.replace(state, opt_state=init(masters(state))))
