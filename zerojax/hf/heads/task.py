"""The loss and the outputs of a decoder: next tokens, or a loss of their log-probabilities.

    next tokens    loss = mean cross entropy            predict = logits
    TokenLoss      loss = f(log p(targets), batch)      predict = g(log p(targets), batch)

A `TokenLoss` sees only log-probabilities f32[B, T], so the logits of a large vocabulary are never
held. Adapters are switched off through their second factor, which `adapters` in a batch multiplies:

    y = x W + scale x A (adapters B)

With 0 this is x W, bit for bit, and with 1 the adapted output.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from zerojax.hf.batches import ADAPTERS, check_batch, check_targets, faults
from zerojax.hf.decoder import Batch, Embed, Head
from zerojax.models import Loss, at_last

_SECOND_FACTOR = "lora_b"
"""Name of an adapter's factor B."""


class TokenLoss(Protocol):
    """A loss of the log-probabilities of tokens, such as `zerojax.dpo_loss(0.1)`."""

    def check_batch(self, batch: Any) -> dict[str, Any]:
        """Check the arrays that only this loss reads, and return the other arrays."""
        ...

    def targets(self, batch: Batch) -> jax.Array:
        """Return the tokens whose log-probabilities are read; negative: none.

        They are i32[B, T], or i32[B, T, K] for K tokens at each position.
        """
        ...

    def __call__(self, log_probs: jax.Array, batch: Batch) -> Loss:
        """Return the loss of log-probabilities, f32 in the shape of the targets."""
        ...

    def predict(self, log_probs: jax.Array, batch: Batch) -> Any:
        """Return the outputs of `program.apply` from log-probabilities f32[B, T]."""
        ...


class Task(NamedTuple):
    """Functions of a decoder's model.

    Attributes:
      loss: `loss(head, embed, x, batch)`.
      predict: `predict(head, embed, x, batch)`.
      context: `context(batch)`.
      check_batch: `check_batch(batch)`.
    """

    loss: Callable[..., Any]
    predict: Callable[..., Any]
    context: Callable[..., Any]
    check_batch: Callable[..., None]


def build_task(
    loss: TokenLoss | None,
    vocab: int,
    tiles: int | None,
    build_context: Callable[[Batch], Any],
) -> Task:
    """Return the functions of a decoder's model.

    Args:
      loss: loss of log-probabilities; None: the mean cross entropy.
      vocab: V, size of the vocabulary.
      tiles: number of vocabulary tiles; None: chosen by size.
      build_context: function that returns the arrays of a batch that all blocks read.
    """

    def predict_logits(head: Head, embed: Embed, x: jax.Array, batch: Batch) -> jax.Array:
        return head.logits(embed, at_last(x, batch))

    if loss is None:
        return Task(
            lambda head, embed, x, batch: head.loss(embed, x, batch, tiles),
            predict_logits,
            build_context,
            check_batch,
        )

    def compute_loss(head: Head, embed: Embed, x: jax.Array, batch: Batch) -> Loss:
        check_targets(batch)
        out = loss(head.log_probs(embed, x, loss.targets(batch), tiles), batch)
        return dataclasses.replace(out, metrics={**out.metrics, **faults(batch, vocab)})

    def predict(head: Head, embed: Embed, x: jax.Array, batch: Batch) -> Any:
        if "targets" not in batch:
            return predict_logits(head, embed, x, batch)
        return loss.predict(head.log_probs(embed, x, batch["targets"], tiles), batch)

    def check(batch: Any) -> None:
        check_batch(loss.check_batch(batch) if "targets" in batch else batch)

    def context(batch: Batch) -> Any:
        return build_context(loss.check_batch(batch) if "targets" in batch else batch)

    return Task(compute_loss, predict, context, check)


def switch_adapters(block: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block whose adapters are multiplied by `adapters` of its context, if given.

    Args:
      block: `block(p, x, key, context, layer)`.
    """

    def switched(p: Any, x: Any, key: Any, context: Any, layer: Any, *state: Any) -> Any:
        if ADAPTERS not in context:
            return block(p, x, key, context, layer, *state)
        context = dict(context)
        factor = context.pop(ADAPTERS)

        def scale(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path[-1:], simple=True)
            return leaf * factor.astype(leaf.dtype) if name == _SECOND_FACTOR else leaf

        return block(jax.tree_util.tree_map_with_path(scale, p), x, key, context, layer, *state)

    return switched
