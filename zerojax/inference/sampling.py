"""Choose the next token of each row from its logits.

    temperature 0      the largest logit
    otherwise          a draw from softmax(logits / temperature), restricted to the nucleus

This is nucleus sampling (Holtzman et al., arXiv:1904.09751). A token belongs to the nucleus if all
likelier tokens together have a probability below top_p; so the likeliest token always does.
"""

import jax
import jax.numpy as jnp


def next_tokens(
    logits: jax.Array, key: jax.Array | None, temperature: float, top_p: float
) -> jax.Array:
    """Return the next token of each row, i32[B].

    Args:
      logits: [B, V].
      key: random key; None chooses the largest logit.
      temperature: temperature of the softmax; above 0 if `key` is given.
      top_p: probability mass of the nucleus, above 0 and at most 1.
    """
    logits = logits.astype(jnp.float32)
    if key is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    # The largest logit becomes 0. Near temperature 0 all others go to -inf, and none to inf.
    logits = (logits - jnp.max(logits, -1, keepdims=True)) / temperature
    return jax.random.categorical(key, _nucleus(logits, top_p) if top_p < 1 else logits).astype(
        jnp.int32
    )


def _nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Return logits with -inf for all tokens outside of the nucleus of probability top_p."""
    order = jnp.argsort(-logits, -1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1)
    before = jnp.cumsum(p, -1) - p  # total probability of likelier tokens
    in_nucleus = jnp.put_along_axis(
        jnp.zeros(logits.shape, bool), order, before < top_p, -1, inplace=False
    )
    return jnp.where(in_nucleus, logits, -jnp.inf)
