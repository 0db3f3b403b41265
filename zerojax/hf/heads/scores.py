"""A head that scores sequences, and its losses: rewards of pairs, and classes.

    s = W norm(x[L])                            W[H, num_labels], at the last token of a sequence
    rewards   -log sigmoid(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)^2
    classes   cross entropy, binary cross entropy of each label, or squared error

These are the `ForSequenceClassification` models of transformers, whose tensor is `score.weight`,
with the losses of transformers, and of TRL's `RewardTrainer`. All positions are scored, which costs
H x num_labels products for each, and a masked sum takes the scores of the last tokens: a gather's
derivative would add in an order that changes from run to run on a GPU.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.hf.batches import SEGMENTS, check_batch, faults
from zerojax.hf.config import DecoderConfig
from zerojax.hf.decoder import Batch, Embed, Norm, Options, Projection
from zerojax.hf.heads.task import Task
from zerojax.models import FAULT, LAST, Loss, at_last
from zerojax.user_values import as_number, shown, whole_number

Array = jax.Array
LABELS = "labels"
MARGIN = "margin"
SCORE = "score"
"""Name of the head's matrix, and key of `about` for its number of labels."""
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class ScoreLoss(Protocol):
    """A loss of the scores of sequences, such as `zerojax.hf.reward_loss()`."""

    @property
    def num_labels(self) -> int:
        """Number of scores of a sequence."""
        ...

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a batch that only this loss reads."""
        ...

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError unless the arrays of `keys` have the right dtypes and shapes."""
        ...

    def read(self, scores: Array, batch: Batch) -> Array:
        """Return the scores of sequences from the scores f32[B, T, num_labels] of tokens."""
        ...

    def __call__(self, scores: Array, batch: Batch) -> Loss:
        """Return the loss of the scores of tokens, f32[B, T, num_labels]."""
        ...


class ScoreHead(nnx.Module):
    """The last norm, and a matrix [H, num_labels] without bias."""

    def __init__(self, c: DecoderConfig, o: Options, num_labels: int, *, rngs: nnx.Rngs) -> None:
        """Create the norm and the matrix."""
        self.norm = Norm(c.hidden, c, rngs=rngs)
        self.score = Projection(SCORE, c.hidden, num_labels, False, o.lora, rngs=rngs)

    def scores(self, x: Array) -> Array:
        """Return scores f32[..., num_labels] for x[..., H], the output of the last layer."""
        return self.score(self.norm(x)).astype(jnp.float32)


def build_score_task(loss: ScoreLoss, vocab: int, build_context: Callable[[Batch], Any]) -> Task:
    """Return the functions of a decoder that scores sequences.

    Args:
      loss: loss of the scores.
      vocab: V, size of the vocabulary.
      build_context: function that returns the arrays of a batch that all blocks read.
    """

    def others(batch: Any) -> Any:
        if not isinstance(batch, Mapping) or LABELS not in batch:
            return batch
        return {name: array for name, array in batch.items() if name not in loss.keys}

    def check(batch: Any) -> None:
        check_batch(others(batch))
        if isinstance(batch, Mapping) and LABELS in batch:
            loss.check(batch)

    def compute_loss(head: ScoreHead, embed: Embed, x: Array, batch: Batch) -> Loss:
        del embed
        if LABELS not in batch:
            raise ValueError(f"a batch has {', '.join(batch)}: this loss needs {LABELS!r}, too")
        loss.check(batch)
        out = loss(head.scores(x), batch)
        return dataclasses.replace(out, metrics={**out.metrics, **faults(batch, vocab)})

    def predict(head: ScoreHead, embed: Embed, x: Array, batch: Batch) -> Array:
        del embed
        if LABELS in batch:
            return loss.read(head.scores(x), batch)
        return head.scores(at_last(x, batch))

    return Task(compute_loss, predict, lambda batch: build_context(others(batch)), check)


# --- rewards --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RewardLoss:
    """The loss of pairs of rewards; `reward_loss` makes it.

    Attributes:
      center_rewards_coefficient: weight of (s_chosen + s_rejected)^2, or None.
    """

    center_rewards_coefficient: float | None = None
    num_labels = 1
    keys = (LABELS, MARGIN)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError unless the batch has pairs, as `pack_pairs(with_last=True)` makes them.

        Args:
          batch: dict of numpy, JAX or abstract arrays.
        """
        if SEGMENTS not in batch:
            raise ValueError(
                f"a batch of pairs needs {SEGMENTS!r}, too: pack_pairs(with_last=True) of "
                "zerojax.data.preferences makes such rows"
            )
        _check_array(batch, LABELS, jnp.integer, 2, "integers [B, P], 0 where there is no pair")
        if MARGIN in batch:
            _check_array(batch, MARGIN, jnp.floating, 2, "floats [B, P], one per pair")
            if batch[MARGIN].shape[1:] != batch[LABELS].shape[1:]:
                raise ValueError(
                    f"batch['{MARGIN}'] is {list(batch[MARGIN].shape)} but batch['{LABELS}'] is "
                    f"{list(batch[LABELS].shape)}: give both the same shape"
                )

    def read(self, scores: Array, batch: Batch) -> Array:
        """Return the reward of each sequence, f32[B, 2 P]; 0 where there is no pair.

        Args:
          scores: f32[B, T, 1], scores of all tokens.
          batch: batch with pairs.
        """
        segments = batch[SEGMENTS]
        following = jnp.concatenate([segments[:, 1:], jnp.zeros_like(segments[:, :1])], axis=1)
        numbers = jnp.arange(1, 2 * batch[LABELS].shape[1] + 1)
        is_end = (segments != following)[..., None] & (segments[..., None] == numbers)
        return jnp.sum(jnp.where(is_end, scores, 0), axis=1)

    def __call__(self, scores: Array, batch: Batch) -> Loss:
        """Return the loss, summed over pairs, with their number and TRL's metrics.

        Args:
          scores: f32[B, T, 1], scores of all tokens.
          batch: batch with pairs.
        """
        labels = batch[LABELS]
        rewards = self.read(scores, batch).reshape(*labels.shape, 2)
        chosen = rewards[..., 0]
        rejected = rewards[..., 1]
        is_pair = labels != 0
        count = jnp.sum(is_pair).astype(jnp.float32)

        def total(values: Array) -> Array:
            return jnp.sum(jnp.where(is_pair, values, 0))

        margins = chosen - rejected
        wanted = jnp.asarray(batch[MARGIN], jnp.float32) if MARGIN in batch else 0.0
        losses = -jax.nn.log_sigmoid(margins - wanted)
        if self.center_rewards_coefficient is not None:
            losses = losses + self.center_rewards_coefficient * (chosen + rejected) ** 2
        metrics = {
            "accuracy": Loss(total((margins > 0).astype(jnp.float32)), count),
            "margin": Loss(total(margins), count),
            "mean_reward": Loss(total((chosen + rejected) / 2), count),
        }
        return Loss(total(losses), count, metrics)


def reward_loss(*, center_rewards_coefficient: float | None = None) -> RewardLoss:
    """Return the loss of a reward model over pairs, for `zerojax.hf.model_of(loss=...)`.

        model = zerojax.hf.model_of(folder, loss=zerojax.hf.reward_loss())
        rows  = pack_pairs(read_preferences("pairs.jsonl", tokenizer), 1024, with_last=True)

    It is -log sigmoid(s_chosen - s_rejected - margin), the mean over pairs, as in TRL's
    `RewardTrainer`. A batch may have `margin`, floats [B, P].

    Args:
      center_rewards_coefficient: weight of (s_chosen + s_rejected)^2, which keeps rewards near 0
        (arXiv:2312.09244), such as 0.01; None: without it.

    Raises:
      ValueError: the coefficient is not a number of at least 0.
    """
    if center_rewards_coefficient is None:
        return RewardLoss()
    coefficient = as_number(center_rewards_coefficient)
    if coefficient is None or not coefficient >= 0:
        raise ValueError(
            f"center_rewards_coefficient={shown(center_rewards_coefficient)}: a number of at least "
            "0 is needed, or None"
        )
    return RewardLoss(coefficient)


# --- classes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ClassificationLoss:
    """The loss of one sequence per row; `classification_loss` makes it.

    Attributes:
      num_labels: number of scores of a sequence.
      problem_type: which loss, as in transformers.
    """

    num_labels: int
    problem_type: ProblemType
    keys = (LABELS,)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError unless the labels have the dtype and shape of the problem.

        Args:
          batch: dict of numpy, JAX or abstract arrays.
        """
        if self.problem_type == "single_label_classification":
            _check_array(batch, LABELS, jnp.integer, 1, "integers [B], negative for no label")
            return
        shape = f"floats [B, {self.num_labels}]"
        _check_array(batch, LABELS, jnp.floating, 2, shape)
        if batch[LABELS].shape[1] != self.num_labels:
            raise ValueError(f"batch['{LABELS}'] is {list(batch[LABELS].shape)}: {shape} is needed")

    def read(self, scores: Array, batch: Batch) -> Array:
        """Return the scores at each row's position `last`, or at its last token, f32[B, n].

        Args:
          scores: f32[B, T, n], scores of all tokens.
          batch: batch, in which `last` are positions, i32[B].
        """
        size = scores.shape[1]
        last = batch[LAST] if LAST in batch else jnp.full(scores.shape[:1], size - 1)
        is_last = jnp.arange(size) == last[:, None]
        return jnp.sum(jnp.where(is_last[..., None], scores, 0), axis=1)

    def __call__(self, scores: Array, batch: Batch) -> Loss:
        """Return the loss, summed over rows, with their number and the accuracy.

        Args:
          scores: f32[B, T, n], scores of all tokens.
          batch: batch with labels.
        """
        scores = self.read(scores, batch)
        labels = batch[LABELS]
        rows = jnp.float32(scores.shape[0])
        if self.problem_type == "regression":
            return Loss(jnp.sum(jnp.mean((scores - labels) ** 2, axis=-1)), rows)
        if self.problem_type == "multi_label_classification":
            losses = jax.nn.softplus(scores) - labels * scores
            is_right = jnp.all((scores > 0) == (labels > 0.5), axis=-1)
            accuracy = Loss(jnp.sum(is_right).astype(jnp.float32), rows)
            return Loss(jnp.sum(jnp.mean(losses, axis=-1)), rows, {"accuracy": accuracy})
        is_counted = labels >= 0
        count = jnp.sum(is_counted).astype(jnp.float32)
        is_label = jnp.arange(self.num_labels) == labels[:, None]
        losses = -jnp.sum(jnp.where(is_label, jax.nn.log_softmax(scores), 0), axis=-1)
        is_right = (jnp.argmax(scores, axis=-1) == labels) & is_counted
        is_wrong = jnp.sum(labels >= self.num_labels).astype(jnp.float32)
        metrics = {
            "accuracy": Loss(jnp.sum(is_right).astype(jnp.float32), count),
            f"{FAULT}labels_above_{self.num_labels - 1}": Loss(is_wrong, rows),
        }
        return Loss(jnp.sum(jnp.where(is_counted, losses, 0)), count, metrics)


def classification_loss(
    num_labels: int, problem_type: ProblemType = "single_label_classification"
) -> ClassificationLoss:
    """Return the loss of a classifier of sequences, for `zerojax.hf.model_of(loss=...)`.

    A batch has one sequence per row, padded on the right: `tokens`, i32[B, T]; `last`, i32[B], the
    position of each row's last token, by default T - 1; and `labels`: i32[B], in which negative
    ones do not count; for the other problem types f32[B, num_labels].

    Args:
      num_labels: number of scores of a sequence.
      problem_type: "single_label_classification" (cross entropy), "multi_label_classification"
        (binary cross entropy of each label) or "regression" (squared error), as in transformers.

    Raises:
      ValueError: the number is not positive, or the problem type is unknown.
    """
    if problem_type not in get_args(ProblemType):
        raise ValueError(
            f"problem_type={shown(problem_type)} is unknown: choose from "
            f"{', '.join(get_args(ProblemType))}"
        )
    return ClassificationLoss(whole_number("num_labels", num_labels, 1), problem_type)


def _check_array(batch: Mapping[str, Any], name: str, kind: Any, dims: int, needed: str) -> None:
    array = batch[name]
    dtype = getattr(array, "dtype", None)
    shape = getattr(array, "shape", ())
    if dtype is None or not jnp.issubdtype(dtype, kind) or len(shape) != dims:
        raise ValueError(
            f"batch['{name}'] has shape {list(shape)} and dtype {dtype}: {needed} are needed"
        )
