"""Define a Llama as a LayeredModel, and modes that say where its states are stored.

With 32 layers x 4096 it is Llama 7B, with 6.7 B parameters.
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import zerojax as zj

Attention = Literal["cudnn", "xla"]
HOST, DISK = "pinned_host", "nvme"
NO_DISK = 1e18
"""Bytes per second of a disk that takes no time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """Tiers of a step's states, and the work of its callbacks.

    Attributes:
      config: fields of `ZeroConfig`.
      callbacks: `callbacks` of `hlo.simulate`.
      rates: rates that replace the assumed rates, by name.
    """

    config: dict[str, Any]
    callbacks: str = "plain"
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


_IN_BACKWARD = {"update": "in_backward"}
_ON_HOST = {"opt_state": HOST, "update_on": "host"}
_ALL_HOST = {"params": HOST, "grads": HOST, "opt_state": HOST}
_ON_NVME = {"params": DISK, "grads": DISK, "opt_state": DISK, "swap_dir": "not there"}
_ALL_NVME = {**_ON_NVME, **_IN_BACKWARD}
_CLIPPED_NVME = {**_ON_NVME, "clip_norm": 1.0}
_NO_DISK = {"disk_read": NO_DISK, "disk_write": NO_DISK}
MODES = {
    "resident": Mode(config={}),
    "opt_state on the host": Mode(config={"opt_state": HOST, **_IN_BACKWARD}),
    "opt_state on the host, clip_norm": Mode(config={"opt_state": HOST, "clip_norm": 1.0}),
    "opt_state on the host, clip_norm, in forward": Mode(
        config={"opt_state": HOST, "clip_norm": 1.0, "update": "in_forward"}
    ),
    "params, grads, opt_state on the host": Mode(config={**_ALL_HOST, **_IN_BACKWARD}),
    "params, grads, opt_state on the host, clip_norm": Mode(config={**_ALL_HOST, "clip_norm": 1.0}),
    "params, grads, opt_state on the host, clip_norm, in forward": Mode(
        config={**_ALL_HOST, "clip_norm": 1.0, "update": "in_forward"}
    ),
    "opt_state on the host, update_on host": Mode(
        config={**_ON_HOST, **_IN_BACKWARD}, callbacks="update"
    ),
    "opt_state on the host, update_on host, clip_norm": Mode(
        config={**_ON_HOST, "clip_norm": 1.0}, callbacks="update"
    ),
    "opt_state on the host, update_on host, clip_norm, in forward": Mode(
        config={**_ON_HOST, "clip_norm": 1.0, "update": "in_forward"}, callbacks="in_forward"
    ),
    "the same, delayed_update": Mode(
        config={**_ON_HOST, "delayed_update": True}, callbacks="delayed"
    ),
    "all on nvme": Mode(config=_ALL_NVME, callbacks="nvme"),
    "all on nvme, a disk that takes no time": Mode(
        config=_ALL_NVME, callbacks="nvme", rates=_NO_DISK
    ),
    "all on nvme, clip_norm": Mode(config=_CLIPPED_NVME, callbacks="nvme"),
    "all on nvme, clip_norm, a disk that takes no time": Mode(
        config=_CLIPPED_NVME, callbacks="nvme", rates=_NO_DISK
    ),
    "all on nvme, clip_norm, in forward": Mode(
        config={**_CLIPPED_NVME, "update": "in_forward"}, callbacks="nvme"
    ),
    "all on nvme, clip_norm, in forward, a disk that takes no time": Mode(
        config={**_CLIPPED_NVME, "update": "in_forward"}, callbacks="nvme", rates=_NO_DISK
    ),
    "all on nvme, update_on host": Mode(
        config={**_ALL_NVME, "update_on": "host"}, callbacks="nvme_update"
    ),
}


def llama(
    layers: int,
    hidden: int = 4096,
    heads: int = 32,
    ff: int = 11008,
    vocab: int = 32000,
    attention: Attention = "cudnn",
) -> zj.LayeredModel:
    """Return the model: RMSNorm, rotary positions, a gated MLP, and a loss without logits.

    Args:
      layers: number of layers.
      hidden: width of the residual stream.
      heads: number of attention heads.
      ff: hidden width of the MLP.
      vocab: number of distinct tokens.
      attention: `implementation` of `jax.nn.dot_product_attention`.
    """
    width = hidden // heads
    sizes = {
        "wq": (hidden, hidden), "wk": (hidden, hidden),
        "wv": (hidden, hidden), "wo": (hidden, hidden),
        "w1": (hidden, ff), "w3": (hidden, ff), "w2": (ff, hidden),
    }  # fmt: skip

    def norm(x: jax.Array, g: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype) * g

    def rotated(x: jax.Array) -> jax.Array:  # [B, T, heads, width]
        inverse = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * inverse)[None, :, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        c, s = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        y = norm(x, p["g1"])
        q, k, v = ((y @ p[name]).reshape(*x.shape[:2], heads, width) for name in ("wq", "wk", "wv"))
        a = jax.nn.dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, implementation=attention
        )
        x = x + a.reshape(x.shape) @ p["wo"]
        y = norm(x, p["g2"])
        return x + (jax.nn.silu(y @ p["w1"]) * (y @ p["w3"])) @ p["w2"]

    def init_block(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes))
        weights = {
            name: 0.02 * jax.random.normal(k, size)
            for k, (name, size) in zip(keys, sizes.items(), strict=True)
        }
        return weights | {"g1": jnp.ones(hidden), "g2": jnp.ones(hidden)}

    return zj.LayeredModel(
        layers,
        lambda key: 0.02 * jax.random.normal(key, (vocab, hidden)),
        lambda table, batch, key: table[batch["tokens"]],
        init_block,
        block,
        lambda key: {"w": 0.02 * jax.random.normal(key, (hidden, vocab)), "g": jnp.ones(hidden)},
        lambda p, p_embed, x, batch, key: zj.linear_cross_entropy(
            norm(x, p["g"]), p["w"], batch["targets"]
        ),
    )


def num_params(layers: int, hidden: int, ff: int, vocab: int) -> int:
    """Return the number of parameters.

    A layer has 4 h^2 + 3 h ff + 2 h; the model adds an embedding, a head and a norm.
    """
    return layers * (4 * hidden**2 + 3 * hidden * ff + 2 * hidden) + 2 * vocab * hidden + hidden
