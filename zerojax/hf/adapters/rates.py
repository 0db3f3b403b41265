"""Learning rates of adapters: LoRA+ (arXiv:2402.12354).

B is trained with `ratio` times the rate of A. As in PEFT, so are vectors (DoRA's magnitudes, norms
and biases), all other matrices have A's rate, and an embedding's adapter has a rate of its own.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import optax

from zerojax.trees import Params
from zerojax.user_values import positive_number

_WITH_B = ("lora/lora_b", "lora/lora_m", "/scale", "/bias")
"""Ends of the names of parameters that have B's rate."""
Rate = float | Callable[[Any], Any]


def lora_plus(
    optimizer: Callable[[Rate], optax.GradientTransformation],
    learning_rate: Rate,
    ratio: float,
    *,
    embedding_rate: float = 1e-6,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that trains B at a higher rate than A, with PEFT's groups.

        tx = zj.hf.lora_plus(optax.adamw, 1e-4, 16)
        tx = zj.hf.lora_plus(functools.partial(optax.adamw, weight_decay=0.0), schedule, 16)

    The metrics of a step have the rates of schedules as `learning_rate/lora_a` and
    `learning_rate/lora_b`.

    Args:
      optimizer: function of a learning rate that returns an optimizer, such as `optax.adamw`.
      learning_rate: rate of A, a number or a schedule of optax.
      ratio: rate of B divided by the rate of A, `loraplus_lr_ratio` in PEFT.
      embedding_rate: rate of adapters of the embedding, `loraplus_lr_embedding` in PEFT.

    Raises:
      ValueError: a ratio or a rate is not a positive number.
    """
    ratio = positive_number("ratio", ratio)
    embedding_rate = positive_number("embedding_rate", embedding_rate)
    if callable(learning_rate):
        schedule = learning_rate
        rate_b: Rate = lambda count: ratio * schedule(count)  # noqa: E731
    else:
        rate_b = ratio * positive_number("learning_rate", learning_rate)
    groups: dict[Hashable, optax.GradientTransformation] = {
        "lora_a": optimizer(learning_rate),
        "lora_b": optimizer(rate_b),
        "embedding": optimizer(embedding_rate),
    }
    return optax.partition(groups, _label)


def _label(params: Params) -> Any:
    """Return the group of each parameter by its name."""

    def label(path: Any, leaf: Any) -> str:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "embed_tokens/lora/" in name:
            return "embedding"
        return "lora_b" if name.endswith(_WITH_B) else "lora_a"

    return jax.tree_util.tree_map_with_path(label, params)
