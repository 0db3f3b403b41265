"""The specification of `linear_cross_entropy`, in float32 with full logits.

    z[T, V] = cap(x[T, D] @ w[D, V])              cap(a) = c tanh(a / c) if there is a softcap c
    lse[t]  = log sum_v exp z[t, v]
    loss[t] = lse - (1 - e) z[t, y_t] - e / V sum_v z[t, v] + k lse^2

for the label y_t. This is the cross entropy with a label that keeps 1 - e and spreads e evenly over
the vocabulary (label smoothing, Szegedy et al., arXiv:1512.00567), the penalty k lse^2 that keeps
the normaliser near 1 (z-loss, PaLM, arXiv:2204.02311, section 5) and the cap on logits of Gemma 2
(arXiv:2408.00118, section 2). A token with a negative label is ignored: its loss is 0.

The slope of a token's loss, which the kernels compute explicitly,

    d loss / d (x @ w)[v] = ((1 + 2 k lse) p_v - (1 - e) [v = y] - e / V) (1 - (z_v / c)^2),
    p = exp(z - lse)

needs only lse from the forward pass. Here JAX derives the gradients.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Form:
    """Options of the loss, as a function of the logits.

    Attributes:
      vocab: V, the size of the vocabulary over all devices.
      label_smoothing: fraction e of a label that is spread over the vocabulary.
      z_loss: factor k of lse^2.
      softcap: bound c of the logits, or None.
    """

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def cap(self, products: jax.Array) -> jax.Array:
        """Return the capped logits for the products `x @ w`, in any shape."""
        if self.softcap is None:
            return products
        return self.softcap * jnp.tanh(products / self.softcap)

    def loss(self, lse: jax.Array, label_logit: jax.Array, logit_sum: jax.Array) -> jax.Array:
        """Return each token's loss from its log-sum-exp, its label's logit and its logits' sum."""
        e = self.label_smoothing
        loss = lse - (1 - e) * label_logit + self.z_loss * lse * lse
        return loss - e / self.vocab * logit_sum if e else loss

    def slope(self, logits: jax.Array, lse: jax.Array, is_label: jax.Array) -> jax.Array:
        """Return d loss / d (x @ w) for some columns of the logits, [T, n]; lse may be [T, 1]."""
        e = self.label_smoothing
        factor = 1 + 2 * self.z_loss * lse
        probability = jnp.exp(logits - lse)
        slope = factor * probability - jnp.where(is_label, 1 - e, 0.0)
        if e:
            slope = slope - e / self.vocab
        if self.softcap is None:
            return slope
        return slope * (1 - (logits / self.softcap) ** 2)


def losses(form: Form, x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the float32 losses[T] of the module docstring for x[T, D], w[D, V] and labels[T]."""
    # By default accelerators multiply float32 at reduced precision (TF32 on GPUs).
    products = jnp.dot(
        x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    logits = form.cap(products)
    # Labels out of range read an arbitrary logit: the caller replaces those losses by 0 or NaN.
    label_logit = jnp.take_along_axis(logits, jnp.clip(labels, 0, form.vocab - 1)[:, None], 1)[:, 0]
    loss = form.loss(jax.nn.logsumexp(logits, 1), label_logit, logits.sum(1))
    return jnp.where(labels >= 0, loss, 0)
