"""The loss of held-out data, in which each counted token has the same weight.

    loss       = sum over batches of  loss(batch) n(batch)  /  sum of n(batch)
    perplexity = exp(loss)

n(batch) is the number of targets that count. It differs between batches, so the plain mean of their
losses would be a different number.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zerojax.program import Program
from zerojax.sharding import batch_part, no_mesh
from zerojax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The loss of held-out data.

    Attributes:
      loss: mean over the targets that count, in nats.
      perplexity: exp(loss); inf if it exceeds the range of a float.
      tokens: number of targets that count.
    """

    loss: float
    perplexity: float
    tokens: int


def counted_targets(batch: Mapping[str, Any]) -> Any:
    """Return the number of `targets` in a batch that count: the ones that are not negative."""
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
      program: program whose loss is the mean over the targets that count, in nats.
      state: state to evaluate, in any tier; it is only read.
      batches: batches as `program.eval` takes them. Each of several processes passes its own parts,
        and the same number of batches.
      weight: function that returns the number of targets over which the loss of a batch is
        averaged, given the batch or a process's part of it.

    Returns:
      The loss, its perplexity, and the number of counted targets.

    Raises:
      ValueError: no target counts.
    """
    losses = []
    weights = []
    total_weights = []
    for batch in batches:
        out = program.eval(state, batch)
        losses.append(float(out["loss"] if isinstance(out, Mapping) else out))
        # An array with parts on other processes is the global batch, and is counted once.
        is_global = any(
            isinstance(a, jax.Array) and not a.is_fully_addressable for a in jax.tree.leaves(batch)
        )
        with no_mesh():  # the batch may be on the program's mesh while another mesh is in scope
            count = float(weight(batch))
        total_weights.append(count if is_global else 0.0)
        weights.append(0.0 if is_global else count)
    program.warnings.look(waits=True)  # losses are available, so faults of the batches are too
    # Counts are sent as float32, which is exact for integers below 2^24.
    local_counts = np.asarray(weights, np.float32)
    if jax.process_count() > 1:
        if not _is_first_of_part(program.mesh):
            local_counts = np.zeros_like(local_counts)  # another process counts the same rows
        local_counts = np.asarray(multihost_utils.process_allgather(local_counts)).sum(0)
    counts = local_counts.astype(np.float64) + np.asarray(total_weights)
    tokens = counts.sum()
    if not tokens:
        raise ValueError(
            f"no target counts in {len(losses)} batches: perplexity is a mean over counted targets"
        )
    loss = float(np.dot(losses, counts) / tokens)
    return Evaluation(loss, math.exp(loss) if loss < 709 else math.inf, round(tokens))


def _is_first_of_part(mesh: Mesh) -> bool:
    """Return whether this process is the first one that provides its part of the batches."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    own_part = batch_part(mesh)
    first = next(each for each in processes if batch_part(mesh, each) == own_part)
    return first == jax.process_index()
