"""The losses of `linear_cross_entropy` and their derivative, for every implementation and split.

The residuals are x, w, the labels and the log-sum-exp of each token, 4 T bytes; backward recomputes
the logits, tile by tile. If the arrays are split, forward and backward are one `jax.shard_map`
each, with the collectives of `split` spelt out. The rule is therefore opaque to transformations of
the surrounding program, and the partitioner never sees an array [T, V].

There is no forward-mode derivative: `jax.jvp` and `jax.hessian` raise.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from pallas_kernels.linear_cross_entropy import mosaic, xla
from pallas_kernels.linear_cross_entropy.config import Config, Problem, choose
from pallas_kernels.linear_cross_entropy.kernel_config import KernelConfig
from pallas_kernels.linear_cross_entropy.reference import Form
from pallas_kernels.linear_cross_entropy.split import Split

Array = jax.Array
LSE = "linear_cross_entropy.lse"
"""Name of the saved log-sum-exps.

A rematerialised region whose policy saves this name does not recompute the forward pass.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments of a call.

    Attributes:
      form: options of the loss.
      config: tiles of XLA's loops; None chooses them.
      num_tiles: number of tiles of each device's columns; None chooses it. Cannot be combined with
        `config`.
      split: how the arrays are split over a mesh, or None.
      kernel: sizes of the Hopper kernels. If given, forward runs the kernel, and backward does if
        `kernel.backward`. `config` and `num_tiles` are for XLA's loops.
    """

    form: Form
    config: Config | None
    num_tiles: int | None
    split: Split | None
    kernel: KernelConfig | None = None

    def pieces(self, x: Array, w: Array, labels: Array) -> xla.Pieces:
        """Return one device's arrays with their tiles."""
        problem = Problem(
            tokens=x.shape[0],
            hidden=x.shape[1],
            vocab=w.shape[1] * (self.split.widening if self.split else 1),
            itemsize=x.dtype.itemsize,
            gathers=bool(self.split and self.split.gathered),
        )
        config = self.config or choose(problem, self.num_tiles)
        return xla.Pieces(self.form, config, self.split, x, w, labels)

    def local_labels(self, w: Array, labels: Array) -> Array:
        """Return labels as indices into one device's columns, w[D, v]; others are out of range."""
        if self.split is None or not self.split.vocab:
            return labels
        return labels - self.split.column_ids(jnp.int32(0), 1, w.shape[1])

    def mapped(self, fn: Callable[..., Any], in_specs: str, out_specs: str) -> Callable[..., Any]:
        """Return `fn` mapped over the devices' pieces.

        Each letter is a spec: x for x[T, D], t for an array [T], w for w[D, V], g for w's gradient.
        """
        if self.split is None:
            return fn
        tokens = PartitionSpec(self.split.tokens)
        specs = {"x": tokens, "t": tokens, "w": self.split.w, "g": self.split.grad_spec}
        return jax.shard_map(
            fn,
            mesh=self.split.mesh,
            in_specs=tuple(specs[letter] for letter in in_specs),
            out_specs=tuple(specs[letter] for letter in out_specs),
            check_vma=False,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses(call: Call, x: Array, w: Array, labels: Array) -> Array:
    """Return float32 losses[T] for x[T, D], w[D, V] and labels[T]; 0 for negative labels."""
    return _forward(call, x, w, labels)[0]


def _forward(call: Call, x: Array, w: Array, labels: Array) -> tuple[Array, Any]:
    def run(x: Array, w: Array, labels: Array) -> tuple[Array, Array]:
        if call.kernel is not None:
            stats = mosaic.forward(call.form, call.kernel, x, w, call.local_labels(w, labels))
        else:
            stats = xla.forward(call.pieces(x, w, labels))
        stats = xla.join_devices(stats, call.split.vocab if call.split else ())
        lse = stats.max + jnp.log(stats.sum)
        is_counted = labels >= 0
        loss = call.form.loss(lse, stats.label_logit, stats.logit_sum)
        return jnp.where(is_counted, loss, 0), lse

    loss, lse = call.mapped(run, "xwt", "tt")(x, w, labels)
    return loss, (x, w, labels, checkpoint_name(lse, LSE))


def _backward(call: Call, residuals: Any, dloss: Array) -> tuple[Array, Array, None]:
    def run(x: Array, w: Array, labels: Array, lse: Array, dloss: Array) -> tuple[Array, Array]:
        # The cotangent of an ignored token may be anything, including NaN.
        weight = jnp.where(labels >= 0, dloss, 0)
        if call.kernel is not None and call.kernel.backward:
            local_labels = call.local_labels(w, labels)
            dx, dw = mosaic.backward(call.form, call.kernel, x, w, local_labels, lse, weight)
            return call.split.reduce_gradients(dx, dw) if call.split else (dx, dw)
        return xla.backward(call.pieces(x, w, labels), lse, weight)

    dx, dw = call.mapped(run, "xwttt", "xg")(*residuals, dloss)
    return dx, dw, None


losses.defvjp(_forward, _backward)
