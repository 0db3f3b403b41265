"""A fresh state of a program, with weights from a file that `zerojax.export` or others wrote: safetensors, or Orbax's format.

    state = zj.import_params(program, "gpt.safetensors", key=jax.random.key(0))

is `program.init(key)` with other weights: step 0, the same key, and the optimizer state that `tx.init` makes of the weights.
The file is given to `zerojax.restoring` as if it were a checkpoint, and so read layer by layer into any stage, mesh and tier.

The optimizer's leaves are in no file. `tx.init` is traced, and for each leaf of its result it is told what it is:

    a number, or a few     read off the trace
    a copy of a weight     read as that weight is
    anything else          computed by `tx.init` from the weights; only where all rests on the device
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from host_offload.record_format import numpy_dtype
from host_offload.saved_records import Box, SavedRecords
from zerojax.checkpoint import STATE
from zerojax.checkpoint_error import CheckpointError, explained
from zerojax.config import updates_by_parts
from zerojax.contents import INLINE_ELEMENTS, Content
from zerojax.elementwise import POINTWISE
from zerojax.export import DTYPES, TILED, path_of
from zerojax.jaxprs import Constant, Instruction, bind, flatten
from zerojax.program_state import contents_of_program, restore_state
from zerojax.reading import masters
from zerojax.restoring import MOST_NAMED
from zerojax.retile import of_mlp, retiled
from zerojax.saved_state import SavedContent, SavedState
from zerojax.state import TrainState
from zerojax.step import Program

CACHE_BYTES = 2**28
"""Of chunks of Orbax arrays that hold several layers, kept for the next one."""
_FILLS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
_COPIES = frozenset({"copy", "copy_p", "convert_element_type", "reshape", "name", "stop_gradient"})
_EMPTY_NODES = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple", "Empty"})


# --- files of weights ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a file tells of a tensor.

    Attributes:
      shape: of it.
      dtype: name of numpy or ml_dtypes, or the file's own where it is no floating one.
    """

    shape: tuple[int, ...]
    dtype: str


class SafetensorsFile:
    """A safetensors file, mapped into memory.

    Attributes:
      path: of it.
      tensors: what it holds.
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the header.

        Raises:
          CheckpointError: it is no such file, or is cut off.
        """
        self.path = path
        names = {told: name for name, told in DTYPES.items()}
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise ValueError(f"its header takes {length} bytes, and the file {size}")
                told = json.loads(file.read(length))
                self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
            metadata = told.pop("__metadata__", {})
            self.tiled = frozenset(json.loads(metadata.get(TILED, "[]")))
            self.tensors = {n: Tensor(tuple(t["shape"]), names.get(t["dtype"]) or str(t["dtype"])) for n, t in told.items()}
            self._starts = {}
            for name, tensor in self.tensors.items():
                start, stop = told[name]["data_offsets"]
                needed = (
                    math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize if tensor.dtype in DTYPES else stop - start
                )
                if not 0 <= start <= stop <= size - 8 - length or stop - start != needed:
                    raise ValueError(f"{name} {tensor.dtype}{list(tensor.shape)} is told at bytes {start} to {stop}")
                self._starts[name] = 8 + length + start
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file, or is cut off: {error}") from error

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor."""
        tensor = self.tensors[name]
        kind = numpy_dtype(tensor.dtype)
        data = self._data[self._starts[name] :][: math.prod(tensor.shape) * kind.itemsize]
        return _view(data, kind).reshape(tensor.shape)[tuple(slice(a, b) for a, b in box)]


def _view(data: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Return bytes as numbers; other writers do not align them."""
    return np.ndarray((data.nbytes // kind.itemsize,), kind, buffer=data) if data.nbytes else np.empty(0, kind)


class OrbaxFolder:
    """A checkpoint of a tree of arrays in Orbax's format.

    Attributes:
      path: of it.
      tensors: what it holds, by keys joined by ".".
      tiled: names of those that are known to be stacks of tiles.
    """

    def __init__(self, path: str) -> None:
        """Read the tree.

        Raises:
          CheckpointError: it is no such checkpoint.
        """
        self.path = path
        described = os.path.join(path, "_METADATA")
        if not os.path.exists(described):
            raise CheckpointError(
                f"{path} is no checkpoint that holds arrays in Orbax's format: it has no _METADATA{_hint(path)}"
            )
        try:
            with open(described) as file:
                told = json.load(file)
            driver = "zarr3" if told.get("use_zarr3") else "zarr"
            self.tiled = frozenset(json.loads((told.get("custom_metadata") or {}).get(TILED, "[]")))
            names = [
                ".".join(str(key["key"]) for key in leaf["key_metadata"])
                for leaf in told["tree_metadata"].values()
                if leaf["value_metadata"]["value_type"] not in _EMPTY_NODES
            ]
            self._arrays = self._open(driver, names)
        except OSError as error:
            raise explained(error, f"reading {path}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint of Orbax: {error}") from error
        self.tensors = {n: Tensor(tuple(a.shape), str(a.dtype.name)) for n, a in self._arrays.items()}

    def _open(self, driver: str, names: Sequence[str]) -> dict[str, Any]:
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        files = {"driver": "file", "path": self.path + "/"}
        is_joined = os.path.exists(os.path.join(self.path, "manifest.ocdbt"))
        opening = {}
        for name in names:
            store = (
                {"driver": "ocdbt", "base": files, "path": name + "/"}
                if is_joined
                else files | {"path": f"{self.path}/{name}/"}
            )
            opening[name] = ts.open({"driver": driver, "kvstore": store}, open=True, read=True, context=context)
        return {name: array.result() for name, array in opening.items()}

    def read(self, name: str, box: Box) -> Any:
        """Return a part of a tensor.

        Raises:
          OSError: it cannot be read.
        """
        try:
            return self._arrays[name][tuple(slice(a, b) for a, b in box)].read().result()
        except ValueError as error:
            raise OSError(f"{name} of {self.path}: {error}") from error


WeightFile = SafetensorsFile | OrbaxFolder


def _hint(path: str) -> str:
    if os.path.isdir(os.path.join(path, STATE)):
        return "; it is a zerojax checkpoint, for Checkpointer.restore or zj.export_orbax"
    inner = sorted(name for name in os.listdir(path) if os.path.exists(os.path.join(path, name, "_METADATA")))
    return f"; {inner[0]} in it has one" if inner else ""


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """Open a file of weights, of the format that it is in.

    Raises:
      CheckpointError: it is none.
    """
    found = os.path.abspath(os.fspath(path))
    if not os.path.exists(found):
        raise CheckpointError(f"{found} is not there")
    return OrbaxFolder(found) if os.path.isdir(found) else SafetensorsFile(found)


# --- what tx.init makes ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Copy:
    """The weight of this index, in the order of the parameter tree."""

    index: int


Made = np.ndarray | np.generic | Copy | None
"""Of a leaf: its numbers, or one for all of its elements; a copy; or something else."""


def initial_values(init: Any, abstract_params: Any) -> list[Made]:
    """Tell of each leaf of `init(params)` what it is.

    Args:
      init: of an optimizer.
      abstract_params: float32 shapes.
    """
    closed = jax.make_jaxpr(init)(abstract_params)
    program = flatten(closed.jaxpr, closed.consts)
    known: dict[int, Made] = {slot: Copy(index) for index, slot in enumerate(program.inputs)}

    def value(ref: int | Constant) -> Made:
        return known.get(ref) if isinstance(ref, int) else _folded(ref.value)

    for i in program.instructions:
        known.update(zip(i.outs, _results(i, [value(ref) for ref in i.ins]), strict=True))
    return [value(ref) for ref in program.outputs]


def _folded(value: Any) -> Made:
    """Return numbers as they are known: one for all, or a few."""
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    array = np.asarray(value)
    if array.size and (array == array.reshape(-1)[0]).all():
        return array.reshape(-1)[0]
    return array if array.size <= INLINE_ELEMENTS else None


def _results(i: Instruction, values: Sequence[Made]) -> list[Made]:
    """Return what is known of an equation's results."""
    name, outs = i.eqn.primitive.name, [v.aval for v in i.eqn.outvars]
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in i.eqn.invars]
    if name in _COPIES and isinstance(copied := values[0], Copy):
        before: Any = i.eqn.invars[0].aval
        after: Any = outs[0]
        return [copied if (before.shape, before.dtype) == (after.shape, after.dtype) or _narrows(before, after) else None]
    numbers = [v for v in values if isinstance(v, np.ndarray | np.generic)]
    if len(numbers) < len(values):
        return [None] * len(outs)
    if name in _FILLS and not numbers[0].shape:
        return [numbers[0]]
    if name in POINTWISE and not i.has_jaxpr and not any(n.shape for n in numbers):
        return [_folded(out) for out in bind(i.eqn, [jnp.asarray(n) for n in numbers])]
    if all(math.prod(getattr(a, "shape", ())) <= INLINE_ELEMENTS for a in [*(v.aval for v in i.eqn.invars), *outs]):
        whole = [jnp.asarray(np.broadcast_to(n, shape)) for n, shape in zip(numbers, shapes, strict=True)]
        return [_folded(out) for out in bind(i.eqn, whole)]
    return [None] * len(outs)


def _narrows(before: Any, after: Any) -> bool:
    """Tell whether a weight is cast as a reader casts it."""
    return before.shape == after.shape and before.dtype == jnp.float32 and jnp.issubdtype(after.dtype, jnp.floating)


# --- a file, as restoring takes it -----------------------------------------------------------------------------------------


class _Records(SavedRecords):
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
        contents: Mapping[str, SavedContent],
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
        self.records = _Records(file, weights, made)

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
        told = SavedContent(content.shape, np.dtype(content.dtype).name, content.lead, bool(content.tiles), "")
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


def _compare(file: WeightFile, wanted: Sequence[Content]) -> tuple[dict[str, str], dict[str, SavedContent]]:
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
        told = SavedContent(tensor.shape, tensor.dtype, min(content.lead, 1), is_tiled, "")
        if not jnp.issubdtype(_known_dtype(tensor.dtype), jnp.floating):
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


def _known_dtype(name: str) -> Any:
    return numpy_dtype(name) if name in DTYPES else np.dtype(np.void)


def _initialised(program: Program, state: TrainState) -> TrainState:
    """Return a state that is all on the device, with the optimizer state of its weights."""
    for leaf in jax.tree.leaves(state.opt_state):
        leaf.delete()
    with jax.set_mesh(program.mesh):
        init = jax.jit(program.tx.init, out_shardings=program.shardings.opt_state)
        return jax.block_until_ready(dataclasses.replace(state, opt_state=init(masters(state))))
