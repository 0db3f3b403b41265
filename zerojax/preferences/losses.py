r"""Losses over pairs of sequences: DPO, IPO, KTO, ORPO and SimPO.

Sequences are packed into rows. Segments 2p - 1 and 2p of a row are pair p:

    tokens       i32[B, T]      targets      i32[B, T]     -1: not part of an answer
    segment_ids  i32[B, T]      labels       i32[B, P]     0: the row has no such pair
                                reference    f32[B, 2 P]   only for kinds that read it

log p(s) is the sum of the log-probabilities of a sequence's targets, n(s) their number, a(s) their
mean, and r(s) = log p(s) - reference(s). For c (chosen, segment 2p - 1) and d (rejected, 2p), the
loss of a pair is

    sigmoid   -log sigma(beta (r(c) - r(d)))                                   arXiv:2305.18290 (7)
    ipo       (r(c) / n(c) - r(d) / n(d) - 1 / (2 beta))^2                     arXiv:2310.12036 (17)
    simpo     -log sigma(beta (a(c) - a(d)) - gamma)                           arXiv:2405.14734 (6)
    orpo      NLL(c) - beta log sigma(odds(c) - odds(d))                       arXiv:2403.07691 (6)
              odds(s) = a(s) - log(1 - e^a(s)); NLL is the mean over all tokens of chosen sequences
    kto       w (1 - sigma(+- beta (r(s) - KL)))                               arXiv:2402.01306 (8)

For kto, segment 2p - 1 is one answer s, which is desirable (label 1, sign +, weight w of desirable
answers) or undesirable (label -1, sign -). Segment 2p is the same prompt with another example's
answer, and KL = max(0, mean of r(2p)) over the microbatch, without a derivative.

These are the equations of TRL 1.16 (IPO divides by lengths there too, as its authors confirmed). A
sequence's log-probability is summed within its row, so no pair is ever split over devices, pipeline
stages or microbatches.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from zerojax.models import Loss
from zerojax.preferences.segments import (
    LABELS,
    REFERENCE,
    check_pairs,
    count_segments,
    sum_segments,
)
from zerojax.user_values import as_number, positive_number, shown

Array = jax.Array
Batch = Mapping[str, Any]
Kind = Literal["sigmoid", "ipo", "orpo", "kto", "simpo"]
_SURE = -1e-12
"""Largest mean log-probability whose odds are computed; 0 would have infinite odds."""


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """A loss over pairs of sequences; `dpo_loss` makes it.

    It is the `loss` of `zerojax.hf.model_of`. In a head of your own:

        log_probs = -zj.linear_cross_entropy(x, w, loss.targets(batch), reduction="none")
        return loss(log_probs, batch)

    Attributes:
      beta: factor of the rewards; for "orpo", weight of the odds.
      kind: which loss.
      gamma: margin between the rewards of "simpo".
      desirable_weight: weight of desirable answers, for "kto".
      undesirable_weight: weight of undesirable answers, for "kto".
    """

    beta: float
    kind: Kind
    gamma: float
    desirable_weight: float
    undesirable_weight: float

    @property
    def reads_reference(self) -> bool:
        """Whether batches need the log-probabilities under the reference."""
        return self.kind in ("sigmoid", "ipo", "kto")

    def check_batch(self, batch: Batch) -> dict[str, Any]:
        """Check the arrays of pairs, and return the other arrays of the batch.

        Args:
          batch: dict of numpy, JAX or abstract arrays.

        Raises:
          ValueError: an array is missing or has a wrong dtype or shape; the error names the key.
        """
        return check_pairs(batch)

    def targets(self, batch: Batch) -> Array:
        """Return the tokens whose log-probabilities the loss reads, i32[B, T]; -1 where none.

        They are the batch's targets; for "orpo" they include the tokens of prompts.
        """
        if self.kind != "orpo":
            return batch["targets"]
        return _all_targets(batch)

    def __call__(self, log_probs: Array, batch: Batch) -> Loss:
        """Return the loss, summed over pairs, with their number and metrics.

        Args:
          log_probs: f32[B, T], log-probability of each of `targets(batch)`; 0 where there is none.
          batch: batch of the module docstring.

        Raises:
          ValueError: the batch has no `targets`, `segment_ids` or `labels`, or no `reference`
            although the loss reads it.
        """
        pairs = _Pairs.read(log_probs, batch, self.reads_reference)
        if self.kind == "kto":
            return self._kto(pairs)
        if self.kind == "sigmoid":
            rewards = self.beta * pairs.log_ratios
            losses = -jax.nn.log_sigmoid(rewards[..., 0] - rewards[..., 1])
        elif self.kind == "ipo":
            rewards = self.beta * pairs.log_ratios
            means = pairs.log_ratios / pairs.lengths
            losses = (means[..., 0] - means[..., 1] - 1 / (2 * self.beta)) ** 2
        elif self.kind == "simpo":
            rewards = self.beta * pairs.means
            losses = -jax.nn.log_sigmoid(rewards[..., 0] - rewards[..., 1] - self.gamma)
        else:
            rewards = self.beta * pairs.means
            odds = _odds(jnp.where(pairs.is_pair[..., None], pairs.means, -1.0))
            losses = -self.beta * jax.nn.log_sigmoid(odds[..., 0] - odds[..., 1])
        total = jnp.sum(jnp.where(pairs.is_pair, losses, 0))
        metrics = pairs.metrics(rewards)
        if self.kind == "orpo":
            nll = _mean_nll(log_probs, batch)
            metrics["nll_loss"] = Loss(nll * pairs.count, pairs.count)
            total = total + nll * pairs.count
        return Loss(total, pairs.count, metrics)

    def predict(self, log_probs: Array, batch: Batch) -> Array:
        """Return the log-probability of each sequence, f32[B, 2 P]; 0 where there is no pair.

        Args:
          log_probs: f32[B, T], log-probability of each of the batch's targets.
          batch: batch of the module docstring; `reference` is not read.
        """
        check_pairs(batch)
        slots = 2 * batch[LABELS].shape[1]
        return sum_segments(log_probs, batch["segment_ids"], slots)

    def _kto(self, pairs: "_Pairs") -> Loss:
        ratios = pairs.log_ratios[..., 0]
        mismatched = jnp.sum(jnp.where(pairs.is_pair, pairs.log_ratios[..., 1], 0))
        kl = jnp.maximum(mismatched / jnp.maximum(pairs.count, 1), 0)
        kl = jax.lax.stop_gradient(kl)
        is_desirable = pairs.labels > 0
        sign = jnp.where(is_desirable, 1.0, -1.0)
        weight = jnp.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        losses = weight * (1 - jax.nn.sigmoid(sign * self.beta * (ratios - kl)))
        total = jnp.sum(jnp.where(pairs.is_pair, losses, 0))
        rewards = self.beta * ratios
        metrics = {"kl": Loss(kl * pairs.count, pairs.count)}
        for name, of_kind in {"chosen": is_desirable, "rejected": ~is_desirable}.items():
            chosen = of_kind & pairs.is_pair
            metrics[f"rewards/{name}"] = _mean(rewards, chosen)
            metrics[f"logps/{name}"] = _mean(pairs.sums[..., 0], chosen)
        return Loss(total, pairs.count, metrics)


def dpo_loss(
    beta: float = 0.1,
    kind: Kind = "sigmoid",
    *,
    gamma: float = 0.5,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """Return a loss over chosen and rejected answers, for `zerojax.hf.model_of(loss=...)`.

        model = zerojax.hf.model_of(folder, lora=zj.Lora(16, 32), loss=zj.dpo_loss(0.1))

    "sigmoid" is DPO, "ipo" its squared form with mean log-probabilities, "kto" reads single answers
    that are labelled as desirable or not. These three compare the model with a reference, the model
    before training, whose log-probabilities are in the batch
    (`zerojax.preferences.reference_log_probs`). "orpo" and "simpo" need no reference. Losses and
    metrics are means over the pairs of a batch, and equal TRL's
    (`zerojax.preferences.losses` has the equations).

    Args:
      beta: factor of the rewards, usually 0.1 (for "simpo" 2 to 10); for "orpo", the weight of the
        odds.
      kind: "sigmoid", "ipo", "orpo", "kto" or "simpo".
      gamma: margin between the rewards of "simpo"; other kinds do not read it.
      desirable_weight: weight of desirable answers, for "kto".
      undesirable_weight: weight of undesirable answers, for "kto".

    Raises:
      ValueError: the kind is unknown, or a number is out of range.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind={shown(kind)} is unknown: choose from {', '.join(get_args(Kind))}")
    margin = as_number(gamma)
    if margin is None or margin < 0:
        raise ValueError(f"gamma={shown(gamma)}: a number of at least 0 is needed")
    return PreferenceLoss(
        positive_number("beta", beta),
        kind,
        margin,
        positive_number("desirable_weight", desirable_weight),
        positive_number("undesirable_weight", undesirable_weight),
    )


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """What the losses read of a batch, pair by pair.

    Attributes:
      labels: i32[B, P], 0 where there is no pair.
      sums: f32[B, P, 2], log-probability of each sequence.
      lengths: f32[B, P, 2], number of its targets, at least 1.
      log_ratios: f32[B, P, 2], `sums` minus the reference's; without a reference, `sums`.
    """

    labels: Array
    sums: Array
    lengths: Array
    log_ratios: Array

    @classmethod
    def read(cls, log_probs: Array, batch: Batch, reads_reference: bool) -> "_Pairs":
        check_pairs(batch)
        if reads_reference and REFERENCE not in batch:
            raise ValueError(
                f"this loss compares the model with a reference, but the batch has no "
                f"{REFERENCE!r}: compute it by zerojax.preferences.reference_log_probs, or use "
                "kind='orpo' or kind='simpo'"
            )
        labels = batch[LABELS]
        is_answer = batch["targets"] >= 0
        shape = (*labels.shape, 2)
        slots = 2 * labels.shape[1]
        sums = sum_segments(
            jnp.where(is_answer, log_probs, 0), batch["segment_ids"], slots
        ).reshape(shape)
        counts = count_segments(is_answer, batch["segment_ids"], slots).reshape(shape)
        log_ratios = sums
        if reads_reference:
            reference = jnp.asarray(batch[REFERENCE], jnp.float32).reshape(shape)
            log_ratios = sums - jax.lax.stop_gradient(reference)
        return cls(labels, sums, jnp.maximum(counts, 1), log_ratios)

    @property
    def is_pair(self) -> Array:
        """Where the batch has a pair, bool[B, P]."""
        return self.labels != 0

    @property
    def count(self) -> Array:
        """Number of pairs, f32[]."""
        return jnp.sum(self.is_pair).astype(jnp.float32)

    @property
    def means(self) -> Array:
        """Mean log-probability of each sequence's targets, f32[B, P, 2]."""
        return self.sums / self.lengths

    def metrics(self, rewards: Array) -> dict[str, Loss]:
        """Return rewards and log-probabilities, averaged over pairs, under TRL's names."""
        chosen = rewards[..., 0]
        rejected = rewards[..., 1]
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
            "logps/chosen": self.sums[..., 0],
            "logps/rejected": self.sums[..., 1],
        }
        return {name: _mean(value, self.is_pair) for name, value in values.items()}


def _mean(values: Array, chosen: Array) -> Loss:
    """Return the mean of the chosen values as a metric."""
    return Loss(jnp.sum(jnp.where(chosen, values, 0)), jnp.sum(chosen).astype(jnp.float32))


def _all_targets(batch: Batch) -> Array:
    """Return the next token of every position within its segment, i32[B, T].

    The last token of a sequence is only in the targets, which may leave it out.
    """
    tokens = batch["tokens"].astype(jnp.int32)
    segments = batch["segment_ids"]
    following = jnp.roll(tokens, -1, axis=1)
    is_inside = (segments == jnp.roll(segments, -1, axis=1)) & (segments > 0)
    is_inside = is_inside.at[:, -1].set(False)
    return jnp.where(is_inside, following, batch["targets"])


def _mean_nll(log_probs: Array, batch: Batch) -> Array:
    """Return the mean negative log-probability over all tokens of chosen sequences, f32[]."""
    is_chosen = (batch["segment_ids"] % 2 == 1) & (_all_targets(batch) >= 0)
    count = jnp.maximum(jnp.sum(is_chosen), 1)
    return -jnp.sum(jnp.where(is_chosen, log_probs, 0)) / count


def _odds(mean: Array) -> Array:
    """Return log(e^a / (1 - e^a)) for mean log-probabilities a < 0."""
    mean = jnp.minimum(mean, _SURE)
    # Each form is exact where the other one cancels; the inner `where` keeps the unused form's
    # derivative finite.
    is_near_zero = mean > -math.log(2)
    near = jnp.log(-jnp.expm1(jnp.where(is_near_zero, mean, -0.5)))
    far = jnp.log1p(-jnp.exp(jnp.where(is_near_zero, -1.0, mean)))
    return mean - jnp.where(is_near_zero, near, far)
