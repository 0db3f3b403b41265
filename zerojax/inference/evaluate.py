"""The loss of held-out data, each token of it with the same weight.

    loss       = sum over batches of  loss(batch) n(batch)  /  sum of n(batch)        n: targets that count
    perplexity = exp(loss)

Batches have different numbers of targets that count, so the mean of their losses would be another.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.program import Program
from zerojax.sharding import no_mesh
from zerojax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What held-out data gave.

    Attributes:
      loss: mean over the targets that count, in nats.
      perplexity: exp(loss); inf where that is too large for a float.
      tokens: targets that count.
    """

    loss: float
    perplexity: float
    tokens: int


def counted_targets(batch: Mapping[str, Any]) -> Any:
    """Return how many `targets` of a batch are not -1."""
    return (batch["targets"] >= 0).sum()


def perplexity(
    program: Program,
    state: TrainState,
    batches: Iterable[Any],
    *,
    weight: Callable[[Any], Any] = counted_targets,
) -> Evaluation:
    """Return the loss of held-out batches, and its perplexity.

    Args:
      program: whose loss is the mean over the targets that count, in nats.
      state: that is read, wherever it rests.
      batches: as `program.eval` takes them; in a run of several processes each gives its own parts,
        and as many batches.
      weight: how many targets of a batch, or of a process's part of it, its loss is the mean of.

    Raises:
      ValueError: no target counts.
    """
    losses, weights, total_weights = [], [], []
    for batch in batches:
        out = program.eval(state, batch)
        losses.append(float(out["loss"] if isinstance(out, Mapping) else out))
        # What is not on this process alone is the whole batch, and is counted once.
        whole = any(
            isinstance(a, jax.Array) and not a.is_fully_addressable for a in jax.tree.leaves(batch)
        )
        with (
            no_mesh()
        ):  # the batch may be on the program's mesh, and the caller have another one in scope
            count = float(weight(batch))
        total_weights.append(count if whole else 0.0)
        weights.append(0.0 if whole else count)
    program.warnings.look(waits=True)  # losses are known, and so are faults of their batches
    # Counts are integers below 2^24 a batch: float32, in which they travel, holds them.
    parts = np.asarray(weights, np.float32)
    if jax.process_count() > 1:
        parts = np.asarray(multihost_utils.process_allgather(parts)).sum(0)
    counts = parts.astype(np.float64) + np.asarray(total_weights)
    tokens = counts.sum()
    if not tokens:
        raise ValueError(
            f"no target counts in {len(losses)} batches: perplexity is a mean over those that do"
        )
    loss = float(np.dot(losses, counts) / tokens)
    return Evaluation(loss, math.exp(loss) if loss < 709 else math.inf, round(tokens))
