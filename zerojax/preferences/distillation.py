"""Distillation: a model learns the most likely tokens of another model, computed once.

    teacher_ids          i32[B, T, K]    the teacher's K most likely next tokens
    teacher_log_probs    f32[B, T, K]    their log-probabilities

With p for the teacher, q for the model, and one more class for all other tokens together, whose
probability is 1 minus the sum of these, a token's loss is

    KL(p || q) = sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest)

so a model cannot lower it by moving probability to tokens that are not listed. With K = V it is the
divergence of the full distributions. The model's log-probabilities of K tokens need no logits: a
log-sum-exp by tiles, and K dot products per token. The teacher may be any program whose `predict`
returns logits of the same vocabulary; its state is gone when training begins.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.data import Rows, batches_once
from zerojax.models import Loss
from zerojax.program import Program
from zerojax.state import TrainState
from zerojax.user_values import as_number, shown, whole_number

Array = jax.Array
IDS = "teacher_ids"
LOG_PROBS = "teacher_log_probs"
_FILES = {IDS: "ids.npy", LOG_PROBS: "log_probs.npy"}
_SURE = -1e-7
"""Largest log of a sum of probabilities; at 0 nothing would be left for the other tokens."""


@dataclasses.dataclass(frozen=True)
class DistillationLoss:
    """The divergence from a teacher's distribution; `distillation_loss` makes it.

    It is the `loss` of `zerojax.hf.model_of`.

    Attributes:
      hard: weight of the cross entropy of the targets; the divergence has the weight 1 - hard.
    """

    hard: float

    def check_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Check the teacher's arrays, and return the other arrays of the batch.

        Args:
          batch: dict of numpy, JAX or abstract arrays.

        Raises:
          ValueError: an array is missing or has a wrong dtype or shape; the error names the key.
        """
        for name, kind in {IDS: jnp.signedinteger, LOG_PROBS: jnp.floating}.items():
            array = batch.get(name)
            if array is None:
                raise ValueError(
                    f"a batch for distillation needs {name!r} [B, T, K] too: "
                    "zerojax.preferences.TeacherRows adds the teacher's outputs to rows"
                )
            shape = tuple(getattr(array, "shape", ()))
            length = tuple(batch["tokens"].shape[1:])
            if not jnp.issubdtype(array.dtype, kind) or shape[1:-1] != length or len(shape) != 3:
                raise ValueError(
                    f"batch[{name!r}] has shape {list(shape)} and dtype {array.dtype}: "
                    f"{'floats' if name == LOG_PROBS else 'signed integers'} "
                    f"[B, {length[0]}, K] are needed"
                )
        return {name: array for name, array in batch.items() if name not in _FILES}

    def targets(self, batch: Mapping[str, Any]) -> Array:
        """Return the tokens whose log-probabilities are read, i32[B, T, K]; -1 where none.

        If the targets have a weight, they are the last of K + 1.
        """
        targets = batch["targets"].astype(jnp.int32)[..., None]
        ids = jnp.where(targets >= 0, batch[IDS], -1)
        return jnp.concatenate([ids, targets], axis=-1) if self.hard else ids

    def __call__(self, log_probs: Array, batch: Mapping[str, Any]) -> Loss:
        """Return the loss, summed over the targets that count, with their number.

        Args:
          log_probs: f32[B, T, K], log-probabilities of `targets(batch)`.
          batch: batch with the teacher's arrays.
        """
        is_counted = batch["targets"] >= 0
        count = jnp.sum(is_counted).astype(jnp.float32)
        cross_entropy = -log_probs[..., -1]
        ours = log_probs[..., :-1] if self.hard else log_probs
        theirs = jax.lax.stop_gradient(batch[LOG_PROBS].astype(jnp.float32))
        # Tokens that do not count have zeros, which are no log-probabilities.
        theirs = jnp.where(is_counted[..., None], theirs, -10.0)
        ours = jnp.where(is_counted[..., None], ours, -10.0)
        listed = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
        rest = _log_rest(theirs)
        divergence = listed + jnp.exp(rest) * (rest - _log_rest(ours))
        total = jnp.sum(jnp.where(is_counted, divergence, 0))
        metrics = {"divergence": Loss(total, count)}
        if self.hard:
            entropy = jnp.sum(jnp.where(is_counted, cross_entropy, 0))
            metrics["cross_entropy"] = Loss(entropy, count)
            total = (1 - self.hard) * total + self.hard * entropy
        return Loss(total, count, metrics)

    def predict(self, log_probs: Array, batch: Mapping[str, Any]) -> Array:
        """Return the log-probability of each of the batch's targets, f32[B, T].

        Args:
          log_probs: f32[B, T], log-probabilities of the batch's targets.
          batch: batch with the teacher's arrays, which are not read.
        """
        del batch
        return log_probs


def distillation_loss(*, hard: float = 0.0) -> DistillationLoss:
    """Return the divergence from a teacher's most likely tokens, for `zerojax.hf.model_of`.

        rows  = TeacherRows(rows, teacher_outputs(teacher, teacher_state, rows, 8, top_k=32))
        model = zerojax.hf.model_of(folder, loss=distillation_loss())

    Args:
      hard: weight of the cross entropy of the targets, from 0 to below 1; the divergence has the
        weight 1 - hard.

    Raises:
      ValueError: `hard` is out of range.
    """
    weight = as_number(hard)
    if weight is None or not 0 <= weight < 1:
        raise ValueError(f"hard={shown(hard)}: a number from 0 to below 1 is needed")
    return DistillationLoss(weight)


def _log_rest(log_probs: Array) -> Array:
    """Return the log-probability of all tokens that are not listed, f32[B, T]."""
    listed = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1), _SURE)
    return jnp.log(-jnp.expm1(listed))


def teacher_outputs(
    program: Program,
    state: TrainState,
    rows: Rows,
    batch_size: int,
    *,
    top_k: int,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return the most likely next tokens of a teacher at every position of rows.

    One batch of logits [batch_size, T, V] is on the devices at a time. The process must be the only
    one.

    Args:
      program: the teacher; its `predict` returns logits [B, T, V].
      state: its state, in any tier.
      rows: packed rows, as `zerojax.data.pack` returns them.
      batch_size: rows per forward pass.
      top_k: K, number of tokens per position.
      folder: folder to keep the outputs in, which must not exist; they are then read from disk when
        a row is built. None: in memory, 8 K bytes per position.

    Returns:
      {"teacher_ids": i32[R, T, K], "teacher_log_probs": f32[R, T, K]}.

    Raises:
      ValueError: `top_k` exceeds the vocabulary.
      NotImplementedError: there are several processes.
      OSError: the folder exists, or cannot be written.
    """
    top_k = whole_number("top_k", top_k, 1)
    if jax.process_count() > 1:
        raise NotImplementedError(
            "teacher_outputs runs in one process: write the outputs to a folder there, and read it "
            "in the others by read_outputs"
        )
    shape = (len(rows), rows.seq, top_k)
    dtypes: dict[str, Any] = {IDS: np.int32, LOG_PROBS: np.float32}
    if folder is None:
        arrays = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    else:
        folder = os.fspath(folder)
        os.makedirs(folder)
        arrays = {}
        for name, dtype in dtypes.items():
            path = os.path.join(folder, _FILES[name])
            arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
    select = jax.jit(_select, static_argnums=1)
    first = 0
    for batch in batches_once(rows, batch_size, part=0, num_parts=1):
        inputs = {name: array for name, array in batch.items() if name != "targets"}
        logits = program.apply(state, inputs)
        if top_k > logits.shape[-1]:
            raise ValueError(f"top_k={top_k}: at most the vocabulary's {logits.shape[-1]} tokens")
        log_probs, ids = select(logits, top_k)
        last = min(first + batch_size, len(rows))
        arrays[IDS][first:last] = np.asarray(ids)[: last - first]
        arrays[LOG_PROBS][first:last] = np.asarray(log_probs)[: last - first]
        first = last
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()
    return arrays


def _select(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the log-probabilities and the ids of the most likely tokens."""
    return jax.lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32)), count)


def read_outputs(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the outputs of a teacher in a folder, mapped from its files.

    Args:
      folder: folder that `teacher_outputs` wrote.

    Raises:
      OSError: a file is missing or cannot be read.
    """
    return {
        name: np.load(os.path.join(os.fspath(folder), file), mmap_mode="r", allow_pickle=False)
        for name, file in _FILES.items()
    }


class TeacherRows(Rows):
    """Rows with a teacher's outputs; `zerojax.data.batches` takes them.

    The attributes are those of `zerojax.data.Rows`, and

    Attributes:
      outputs: arrays of `teacher_outputs`.
    """

    def __init__(self, rows: Rows, outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs to rows.

        Args:
          rows: packed rows.
          outputs: what `teacher_outputs` returned for these rows, or `read_outputs`.

        Raises:
          ValueError: the outputs have another number of rows or positions.
        """
        super().__init__(rows.examples, rows.seq, rows.order, rows.starts, rows.counts)
        for name in _FILES:
            shape = outputs[name].shape
            if shape[:2] != (len(rows), rows.seq):
                raise ValueError(
                    f"{name} is {list(shape)}, but there are {len(rows)} rows of {rows.seq}: the "
                    "outputs belong to other rows"
                )
        self.outputs = outputs

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Build row `index`, with the teacher's outputs."""
        return super().__getitem__(index) | {
            name: np.asarray(self.outputs[name][index]) for name in _FILES
        }

    def empty(self) -> dict[str, np.ndarray]:
        """Return a row of padding, in which no target counts."""
        return super().empty() | {
            name: np.zeros(self.outputs[name].shape[1:], self.outputs[name].dtype)
            for name in _FILES
        }
