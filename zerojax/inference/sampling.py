"""The next token of each row, of its logits.

    temperature 0      the largest logit
    else               a draw from softmax(logits / temperature), of the likeliest tokens that together have top_p

The last of these is nucleus sampling (Holtzman et al., arXiv:1904.09751). A token is kept if those
likelier than it have less than top_p together; so the likeliest always is.
"""

import jax
import jax.numpy as jnp


def next_tokens(
    logits: jax.Array, key: jax.Array | None, temperature: float, top_p: float
) -> jax.Array:
    """Return i32[B], the next tokens.

    Args:
      logits: [B, V].
      key: random; None with temperature 0.
      temperature: at least 0.
      top_p: above 0 and at most 1.
    """
    logits = logits.astype(jnp.float32)
    if key is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    # The largest is 0: with a temperature near 0 the others go to -inf, and none to inf.
    logits = (logits - jnp.max(logits, -1, keepdims=True)) / temperature
    return jax.random.categorical(key, _nucleus(logits, top_p) if top_p < 1 else logits).astype(
        jnp.int32
    )


def _nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Return logits that are -inf for all but the likeliest tokens, which together have top_p."""
    order = jnp.argsort(-logits, -1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1)
    before = jnp.cumsum(p, -1) - p  # what likelier tokens have
    kept = jnp.put_along_axis(
        jnp.zeros(logits.shape, bool), order, before < top_p, -1, inplace=False
    )
    return jnp.where(kept, logits, -jnp.inf)
