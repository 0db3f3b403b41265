"""Where a restore reads each leaf from, and whether the checkpoint fits the model and optimizer.

    saved as                          read from
    a leaf of the same shape          its records, box by box
    a stack of other tiles            its records, box by box of the dense weight
                                      (`zerojax.checkpoint.retile`)
    a quantized (8-bit or 4-bit)      its records, block by block
      weight for other shards         (`zerojax.checkpoint.retile`)
    a small value                     the manifest
    nothing: only the config          its initial value: a loss scale, a count, no pending update
      requires it
    a leaf and its gradient of an     both, and its optimizer state: what is read is updated
      update in forward, for a
      program with another `update`

A leaf of the program that fits no row is a difference, and so is a saved leaf that the program does
not have. The error names the first few.
"""

import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.disk import Box
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    optimizer_difference,
    unreadable,
)
from zerojax.checkpoint.leaves import ENCODED, ROUNDING_STEP, StateLeaf, is_weight
from zerojax.checkpoint.manifest import SavedState
from zerojax.checkpoint.retile import Reblocked, Retiled, of_mlp, reblocked, retiled
from zerojax.precision import LossScaling, init_loss_scale
from zerojax.program import LeafUpdate, RecordSettler
from zerojax.state import Pending

logger = logging.getLogger("zerojax")
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Where a leaf's numbers come from.

    Attributes:
      leaf: leaf of the program's state.
      saved: the checkpoint.
      value: the numbers themselves (or one for all elements) if they are not in the records;
        otherwise None.
      tiles: how to read the leaf if it was saved in other tiles; otherwise None.
      blocks: how to read the leaf if it is an array of an 8-bit or 4-bit weight that was saved for
        other shards; otherwise None.
      updated: how to read the leaf if the checkpoint holds an update that is applied to it first;
        otherwise None.
    """

    leaf: StateLeaf
    saved: SavedState
    value: np.ndarray | None = None
    tiles: Retiled | None = None
    blocks: Reblocked | None = None
    updated: "UpdatedLeaf | None" = None

    @property
    def is_converted(self) -> bool:
        """Whether the leaf is read from a value, other tiles or other blocks."""
        return self.value is not None or self.tiles is not None or self.blocks is not None

    def fill(self, box: Box, out: np.ndarray) -> None:
        """Fill `out` with a box of the leaf; its shape may lack the box's leading dims of 1.

        Raises:
          DamagedError: a file is missing, or its bytes are lost.
          CheckpointError: a file cannot be read now.
        """
        shape = tuple(stop - start for start, stop in box)
        if self.updated is not None:
            out[...] = self.updated.read(self.leaf.path, box).reshape(out.shape)
            return
        if self.value is not None:
            if self.value.shape:
                out[...] = self.value[tuple(slice(*bounds) for bounds in box)].reshape(out.shape)
            else:
                out[...] = self.value
            return
        try:
            if self.tiles is not None:
                self.tiles.read(self.saved.records, self.leaf.name, box, out.reshape(shape))
            elif self.blocks is not None:
                self.blocks.read(self.saved.records, self.leaf.name, box, out.reshape(shape))
            else:
                self.saved.records.read(self.leaf.name, box, out.reshape(shape))
        except OSError as error:
            damage = f"the checkpoint {self.saved.folder} is damaged: {error}"
            raise unreadable(
                error, f"reading the checkpoint {self.saved.folder}", damage
            ) from error
        except KeyError as error:
            raise DamagedError(f"the checkpoint {self.saved.folder} is damaged: {error}") from error

    def array(self, abstract: Any) -> jax.Array:
        """Return the full leaf, with the sharding and tier of `abstract`.

        Raises:
          CheckpointError: the saved numbers are not a random key, but the leaf is.
        """
        if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
            assert self.value is not None
            impl = self.saved.keys.get(self.leaf.name)
            try:
                key = jax.random.wrap_key_data(jnp.asarray(self.value), impl=impl)
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self.saved.folder}: {self.leaf.name} "
                    f"{self.value.dtype}{list(self.value.shape)} is not a random key of "
                    f"{impl or 'the default implementation'}: {error}"
                ) from error
            return jax.device_put(key, abstract.sharding)
        return self._array(abstract.shape, abstract.sharding, self.fill)

    def record(self, index: Sequence[int], sharding: jax.sharding.Sharding) -> jax.Array:
        """Return one record of the leaf on the device.

        Args:
          index: indices of the record, along the dims that number the program's records.
          sharding: sharding of the record.
        """
        leaf = self.leaf
        if leaf.order is None:
            front = tuple((i, i + 1) for i in index)
            return self._array(
                leaf.record_shape, sharding, lambda box, out: self.fill(front + box, out)
            )
        layers = leaf.order.layers[index[0]]  # of each stage

        def fill(box: Box, out: np.ndarray) -> None:
            stages, *rest = box
            for place, stage in enumerate(range(*stages)):
                layer = int(layers[stage])
                self.fill(((layer, layer + 1), *rest), out[place : place + 1])

        return self._array(leaf.record_shape, sharding, fill)

    def _array(
        self,
        shape: Sequence[int],
        sharding: jax.sharding.Sharding,
        fill: Callable[[Box, np.ndarray], None],
    ) -> jax.Array:
        """Return an array that is a part of the leaf.

        Args:
          shape: shape of the array.
          sharding: sharding of the array.
          fill: function that fills an array with a box of it.
        """
        shards: dict[Box, np.ndarray] = {}  # devices that hold the same box read it once

        def shard(index: Any) -> np.ndarray:
            box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            if box not in shards:
                # In the leaf's dtype here: the read casts.
                out = np.empty([stop - start for start, stop in box], self.leaf.dtype)
                fill(box, out)
                shards[box] = out
            return shards[box]

        return jax.make_array_from_callback(tuple(shape), sharding, shard)


class _Parts:
    """Updated parts of the records at one index, so that a weight and its state share an update."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._index: Any = None
        self._parts: dict[Any, list[np.ndarray]] = {}

    def get(self, index: Any, key: Any, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Return the part with this key, and drop the parts of other records."""
        if index != self._index:
            self._index = index
            self._parts.clear()
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatedLeaf:
    """A weight with its gradient and optimizer state, updated as they are read.

    Attributes:
      index: index of the parameter leaf.
      grad: where the gradient of the pending update is.
      weight: where the float32 weight is.
      opt: where the optimizer state of the leaf is, in the order of the state.
      update: the pending update.
      parts: updated parts, shared by all leaves of a restore.
    """

    index: int
    grad: LeafSource
    weight: LeafSource
    opt: tuple[LeafSource, ...]
    update: LeafUpdate
    parts: _Parts

    def read(self, path: str, box: Box) -> np.ndarray:
        """Return a box of a leaf after the update, without the dims that number records.

        Args:
          path: path in the state of a leaf of `opt`, or of the weight or its compute copy.
          box: box of the leaf, within one record.
        """
        lead = self.weight.leaf.lead
        front, part = box[:lead], box[lead:]
        paths = [source.leaf.path for source in self.opt]
        place = paths.index(path) + 1 if path in paths else 0
        # An unstacked leaf is a record of its own.
        record = front or self.index
        if self.update.is_elementwise:
            key = (self.index, part)
            return self.parts.get(record, key, lambda: self._updated(front, part))[place]
        whole = self.parts.get(record, self.index, lambda: self._updated(front, None))[place]
        return whole[tuple(slice(*bounds) for bounds in part)]

    def _updated(self, front: Box, part: Box | None) -> list[np.ndarray]:
        """Return a record's weight and optimizer state, or a part of each, after the update."""
        grad, weight, *opt = (
            _read(source, front, part) for source in (self.grad, self.weight, *self.opt)
        )
        return self.update(self.index, grad, weight, opt)


def _read(source: LeafSource, front: Box, part: Box | None) -> np.ndarray:
    """Return a part of a record, or all of it, as the checkpoint holds it."""
    leaf = source.leaf
    if part is None:
        part = tuple((0, size) for size in leaf.shape[leaf.lead :])
    out = np.empty([stop - start for start, stop in part], leaf.dtype)
    source.fill(front + part, out)
    return out


def find_sources(
    leaves: Sequence[StateLeaf],
    saved: SavedState,
    loss_scaling: LossScaling,
    settler: RecordSettler,
) -> list[LeafSource]:
    """Return where to read each leaf.

    Args:
      leaves: leaves of the program's state.
      saved: the checkpoint.
      loss_scaling: the program's loss scaling, used if the checkpoint has none.
      settler: applies an update that the checkpoint holds and the program does not keep.

    Raises:
      CheckpointError: leaves differ, and the error names the first few; the checkpoint holds an
        update that this program neither keeps nor applies; or `grads_dtype` would round its
        gradients.
    """
    differences: list[str] = []
    shapes = {leaf.name: leaf.shape for leaf in leaves}
    keeps_update = saved.holds_update and shapes.get("pending.scalars") == saved.pending_shape
    if saved.holds_update and not keeps_update and saved.is_settled:
        raise CheckpointError(
            f"the checkpoint {saved.folder} holds a pending update of delayed_update=True: restore "
            "it with delayed_update=True and update_on='host'"
        )
    if keeps_update:
        _check_pending_dtype(leaves, saved, settler.layout.config.grads_dtype)
    sources = list[LeafSource]()
    for leaf in leaves:
        if is_pending(leaf.name) and not keeps_update:
            # Without an update to apply, none of its numbers is ever read.
            dtype = np.dtype(leaf.dtype)
            sources.append(LeafSource(leaf, saved, value=np.zeros((), dtype)))
            continue
        sources.append(_source(leaf, shapes, saved, loss_scaling, differences))
    # An import saved no optimizer state: it is created for the program's own tiles.
    if saved.has_opt_state:
        differences += _unconverted(sources)
    # The other direction: saved leaves that the program does not read.
    for name in sorted([*saved.leaves, *saved.values]):
        if is_pending(name) and not keeps_update:
            continue
        if name not in shapes and not _may_be_left(name):
            differences.append(f"{name}, which this program's state does not have")
    if differences and all(ENCODED in difference for difference in differences):
        raise CheckpointError(
            f"the checkpoint {saved.folder} holds frozen weights in 8 or 4 bits in other blocks "
            f"than this program: {differences[0]}{_why_encoded(differences)}"
        )
    if differences:
        remedy = _why_encoded(differences)
        if not remedy and saved.has_opt_state:
            remedy = _explained(leaves, saved, differences)
        raise CheckpointError(
            f"the checkpoint {saved.folder} is of another model, optimizer or setting. "
            f"It holds: {first_few(differences)}{remedy}"
        )
    if saved.is_settled or keeps_update:
        return sources
    return _updated_sources(sources, saved, settler)


def is_pending(name: str) -> bool:
    """Return whether a leaf of this name belongs to an update that the next step applies."""
    return name.startswith("pending.")


def _updated_sources(
    sources: Sequence[LeafSource], saved: SavedState, settler: RecordSettler
) -> list[LeafSource]:
    """Return sources that apply the checkpoint's update to the weights and the optimizer state.

    Raises:
      CheckpointError: the program cannot apply it; the error says what can.
    """
    subject = (
        f"the checkpoint {saved.folder} holds an update of update='in_forward' that is not applied "
        "yet, and this program cannot apply it"
    )
    remedy = (
        "restore it with update='in_forward' and the optimizer, frozen weights and moments that it "
        "was saved with, and save program.settle(state), which replaces it"
    )
    layout = settler.layout
    weights = [source for source in sources if is_weight(source.leaf)]
    copies = [source for source in sources if source.leaf.is_derived]
    opt = [source for source in sources if source.leaf.path.startswith(".opt_state")]
    # The gradients are numbered, in the order of a program that trains the same leaves.
    order = [*layout.stacked, *layout.unstacked]
    names = [f"pending.grads[{place}]" for place in range(len(order))]
    if saved.frozen != {source.leaf.name for source in sources if source.leaf.is_frozen}:
        raise CheckpointError(f"{subject}, as other weights are frozen here: {remedy}")
    num_grads = sum(name.startswith("pending.grads[") for name in saved.leaves)
    shared = _shared_scalars(saved)
    if num_grads != len(order) or len(shared) != len(layout.opt_map.shared):
        raise CheckpointError(
            f"{subject}: it has {num_grads} gradients and {len(shared)} scalars of the optimizer, "
            f"and this program trains {len(order)} weights with {len(layout.opt_map.shared)} "
            f"scalars; {remedy}"
        )
    scalars, ready = (
        jnp.asarray(saved.values[name]) for name in ("pending.scalars", "pending.ready")
    )
    pending = Pending([], shared, scalars, ready)
    try:
        update = settler.leaf_update(pending)
    except ValueError as error:
        raise CheckpointError(f"{subject}: {error}; {remedy}") from error

    parts = _Parts()
    updated: dict[str, UpdatedLeaf] = {}  # by path
    for name, i in zip(names, order, strict=True):
        weight_leaf = dataclasses.replace(weights[i].leaf, dtype=np.dtype("float32"))
        weight = dataclasses.replace(weights[i], leaf=weight_leaf)
        grad = dataclasses.replace(weight, leaf=dataclasses.replace(weight_leaf, name=name))
        states = tuple(opt[j] for j in layout.opt_map.list_state_leaves((i,)))
        leaf = UpdatedLeaf(i, grad, weight, states, update, parts)
        own = [weights[i], *states, *(copies[i : i + 1])]
        updated |= {source.leaf.path: leaf for source in own}
    return [
        dataclasses.replace(source, updated=updated.get(source.leaf.path)) for source in sources
    ]


def _shared_scalars(saved: SavedState) -> list[Any]:
    """Return the optimizer's scalars for the update that a checkpoint holds."""
    names = (f"pending.shared[{n}]" for n in itertools.count())
    return [saved.values[name] for name in itertools.takewhile(saved.values.__contains__, names)]


def _check_pending_dtype(
    leaves: Sequence[StateLeaf], saved: SavedState, grads_dtype: str | None
) -> None:
    """Raise CheckpointError if `grads_dtype` would round the gradients of a pending update.

    A wider dtype keeps every bit.
    """
    if grads_dtype is None or not np.any(saved.values.get("pending.ready", False)):
        return
    for leaf in leaves:
        if not leaf.name.startswith("pending.grads") or leaf.name not in saved.leaves:
            continue
        dtype = saved.leaves[leaf.name].dtype
        if jnp.promote_types(dtype, leaf.dtype) != leaf.dtype:
            raise CheckpointError(
                f"the checkpoint {saved.folder} holds the gradients of a pending update in "
                f"{dtype}, and grads_dtype={grads_dtype!r} would round them: use "
                "grads_dtype='float32', or save program.settle(state), which replaces this "
                "checkpoint"
            )


def _why_encoded(differences: Sequence[str]) -> str:
    """Return the remedy if 8-bit or 4-bit weights differ, or ""."""
    if not any(ENCODED in difference for difference in differences):
        return ""
    return (
        ". Frozen weights in 8 or 4 bits are restored bit for bit or not at all: they need the "
        "frozen_dtype that they were saved with, and a stage and mesh whose shards hold the same "
        "blocks. Restore them there, or import the base again by zerojax.import_params"
    )


def _explained(leaves: Sequence[StateLeaf], saved: SavedState, differences: Sequence[str]) -> str:
    """Return the remedy if only frozen weights or the optimizer's state differ, or ""."""
    frozen = _frozen_differences(leaves, saved)
    if frozen:
        return frozen
    if any(difference.removeprefix("no ").startswith("weights") for difference in differences):
        return ""
    names = [leaf.name for leaf in leaves]
    return optimizer_difference(
        names, [*saved.leaves, *saved.values], os.path.dirname(saved.folder)
    )


def _frozen_differences(leaves: Sequence[StateLeaf], saved: SavedState) -> str:
    """Return the explanation and remedy if other weights are frozen in the checkpoint, or ""."""
    ours = {leaf.name for leaf in leaves if leaf.is_frozen}
    theirs = saved.frozen
    if ours == theirs:
        return ""
    differences = []
    if ours - theirs:
        differences.append(f"frozen only here: {first_few(sorted(ours - theirs))}")
    if theirs - ours:
        differences.append(f"frozen only in the checkpoint: {first_few(sorted(theirs - ours))}")
    return (
        f". Other weights are frozen: {'; '.join(differences)}. Restore it with the same `frozen`; "
        "or import only its weights, for a fresh optimizer state: "
        f"zerojax.import_params(program, {os.path.dirname(saved.folder)!r}, key=key)"
    )


def first_few(differences: Sequence[str]) -> str:
    """Return the first differences as text, and how many more there are."""
    more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    return f"{'; '.join(differences[:_MOST_NAMED])}{more}"


def _source(
    leaf: StateLeaf,
    shapes: Mapping[str, tuple[int, ...]],
    saved: SavedState,
    loss_scaling: LossScaling,
    differences: list[str],
) -> LeafSource:
    """Return where to read a leaf.

    Differences are appended to `differences`, so that one error reports all of them.
    """
    name = leaf.name
    if name in saved.values:
        value = saved.values[name]
        if value.shape != leaf.shape and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            differences.append(
                f"{name} {value.dtype}{list(value.shape)}, and here it is {list(leaf.shape)}"
            )
        return LeafSource(leaf, saved, value=value)
    if name in saved.leaves:
        shape = saved.leaves[name].shape
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            differences.append(f"{name} {list(shape)} in records, where no random key can be")
            return LeafSource(leaf, saved)
        if shape == leaf.shape:
            return LeafSource(leaf, saved)
        try:
            if leaf.encodes:
                blocks = reblocked(name, shapes, _shapes(saved), min(leaf.lead, 1))
                return LeafSource(leaf, saved, blocks=blocks)
            return LeafSource(leaf, saved, tiles=_retiled(leaf, shapes, saved))
        except ValueError as error:
            differences.append(f"{name} {list(shape)}, and here it is {list(leaf.shape)}{error}")
        # A placeholder until all differences are raised together.
        return LeafSource(leaf, saved)
    value = _initial_value(name, saved, loss_scaling)
    if value is None:
        differences.append(f"no {name} {list(leaf.shape)}")
    # Zeros are a placeholder until all differences are raised; numpy has no dtype for random keys.
    dtype = np.uint32 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.dtype
    return LeafSource(leaf, saved, value=np.zeros((), dtype) if value is None else value)


def _retiled(leaf: StateLeaf, shapes: Mapping[str, tuple[int, ...]], saved: SavedState) -> Retiled:
    saved_leaf = saved.leaves[leaf.name]
    return retiled(
        saved_leaf.shape,
        leaf.shape,
        stacked=saved_leaf.lead > 0 and leaf.lead > 0,
        tiled=(saved_leaf.is_tiled, leaf.tiles),
        is_mlp=of_mlp(leaf.name, shapes) and of_mlp(leaf.name, _shapes(saved)),
    )


def _shapes(saved: SavedState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's leaves, by name."""
    return {name: leaf.shape for name, leaf in saved.leaves.items()}


def _initial_value(name: str, saved: SavedState, loss_scaling: LossScaling) -> np.ndarray | None:
    """Return the initial value of a leaf that only some configs have, or None for other leaves."""
    if name.startswith("loss_scale."):
        logger.info("the checkpoint holds no loss scale: it starts at the config's value")
        return np.asarray(getattr(init_loss_scale(loss_scaling), name.partition(".")[2]))
    if name == ROUNDING_STEP:
        # float32 moments are not rounded and have no such count, so the count starts at the step.
        return saved.values.get("step")
    return None


def _unconverted(sources: Sequence[LeafSource]) -> list[str]:
    """Return differences: leaves of a retiled weight that are not retiled with it.

    These include the row and column sums of a factored moment: for other tiles they may have the
    same shape but another meaning.
    """
    tiles: dict[str, Retiled | None] = {}
    for source in sources:
        if source.leaf.name.startswith("weights"):
            tiles[source.leaf.name.removeprefix("weights")] = source.tiles
    if not any(tiles.values()):
        return []
    differences = []
    for source in sources:
        name = source.leaf.name
        shape = list(source.leaf.shape)
        # The longest match, since one weight's path may end in another's.
        owner = max((path for path in tiles if name.endswith(path)), key=len, default=None)
        is_of_retiled = owner is not None and tiles[owner] is not None
        if is_of_retiled and source.tiles is None and math.prod(shape) > 1:
            differences.append(
                f"{name} {shape}, which is not shaped like its weight, and so is not converted to "
                "other tiles"
            )
    return differences


def _may_be_left(name: str) -> bool:
    """Return whether a state of another config may leave a saved leaf unread."""
    return name.startswith("loss_scale.") or name == ROUNDING_STEP
