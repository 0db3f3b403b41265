"""Collectives of sequence parallelism per layer, compiled for absent H200s.

They are in units of s b h elements.
"""

import collections
import dataclasses

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zerojax as zj
from zerojax import aot, hlo

CONFIG = gpt.GPTConfig(
    vocab=1024,
    seq=2048,
    hidden=2048,
    layers=4,
    heads=16,
    dtype=jnp.bfloat16,
    tensor_axis="tensor",
    loss_tiles=0,
    attention="xla",
)
SBH = 2 * CONFIG.seq * CONFIG.hidden  # bytes
pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("h200")]


class Gated(gpt.Block):
    """A block with separate q, k and v, and a SwiGLU."""

    def __init__(self, c, *, rngs):
        h, t, std = c.hidden, c.tensor_axis, 0.02
        self.heads = c.heads
        self.ln1, self.ln2 = (nnx.RMSNorm(h, dtype=c.dtype, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (gpt.linear(c, h, h, std, (None, t), rngs) for _ in range(3))
        self.proj = gpt.linear(c, h, h, std, (t, None), rngs)
        self.gate, self.up = (gpt.linear(c, h, 4 * h, std, (None, t), rngs) for _ in range(2))
        self.down = gpt.linear(c, 4 * h, h, std, (t, None), rngs)

    def __call__(self, x):
        z = self.ln1(x)
        q, k, v = (f(z).reshape(*x.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        x = x + self.proj(gpt.attention(q, k, v).reshape(x.shape))
        z = self.ln2(x)
        return x + self.down(jax.nn.silu(self.gate(z)) * self.up(z))


def gated(c):
    return zj.from_flax(
        embed=lambda rngs: gpt.Embed(c, rngs=rngs),
        block=lambda rngs: Gated(c, rngs=rngs),
        head=lambda rngs: gpt.Head(c, rngs=rngs),
        num_layers=c.layers,
        loss=lambda head, embed, x, batch: gpt.head_loss(c, head, embed, x, batch),
    )


def of_a_layer(model, fsdp=1, tensor=8, **settings):
    """Return the text, and the collectives of x in the loops over layers.

    The collectives are s b h elements by (loop, kind), with the loops in order.
    """
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=8, fsdp=fsdp, tensor=tensor)
    config = zj.ZeroConfig(precision="bf16", **settings)
    program = zj.build_train_step(model, optax.adamw(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((fsdp, CONFIG.seq), jnp.int32)
    text = program.lower({"tokens": tokens, "targets": tokens}).compile().as_text() or ""
    moved = collections.defaultdict(collections.Counter)
    for c in hlo.collectives(text, unknown_trips=CONFIG.layers):
        # Stage 3 also gathers and reduces weights in these loops; their sizes are not whole
        # multiples of s b h.
        if c.times == CONFIG.layers and c.num_bytes % SBH == 0:
            assert c.dtype == "bf16"
            moved[c.computation][c.op] += c.num_bytes // SBH
    return text, sorted(map(dict, moved.values()), key=lambda ops: sum(ops.values()))


FORWARD = {"all-gather": 2, "reduce-scatter": 2}
BACKWARD = {"all-gather": 4, "reduce-scatter": 2}  # 2 for cotangents, and 2 repeated
REMAT = {"all-gather": 4, "reduce-scatter": 3}  # what is gathered again is what is recomputed


@pytest.mark.parametrize(
    ("model", "settings", "backward"),
    [
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "selective"}, BACKWARD),
        (gpt.layered_gpt(CONFIG), {"stage": 1, "activations": "remat"}, REMAT),
        (gated(CONFIG), {"stage": 1, "activations": "selective"}, BACKWARD),
        (
            gpt.layered_gpt(dataclasses.replace(CONFIG, mlp_tiles=4)),
            {"stage": 1, "activations": "remat"},
            REMAT,
        ),
        (
            gpt.layered_gpt(CONFIG),
            {"stage": 3, "activations": "selective", "fsdp": 2, "tensor": 4},
            BACKWARD,
        ),
    ],
    ids=["gpt", "gpt-remat", "gated", "tiles", "gpt-stage3"],
)
def test_sequence_parallel_gathers_and_scatters_twice_a_layer(model, settings, backward):
    text, loops = of_a_layer(model, sequence_parallel=True, **settings)
    assert loops == [FORWARD, backward]
    # XLA makes such a permute from a slice of gathered data: it would return zeros.
    assert "source_target_pairs={}" not in text


def test_sequence_parallel_moves_what_tensor_parallelism_does():
    """An all_reduce sends as much as a gather and a scatter: 2 + 2 of each per layer."""
    _, (forward, backward) = of_a_layer(gpt.layered_gpt(CONFIG), stage=1, activations="selective")
    assert forward == backward == {"all-reduce": 2}


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({"activations": "remat"}, {"all-reduce": 2}, {"all-reduce": 3, "all-gather": 1}),
        ({"activations": "selective"}, {"all-reduce": 2}, {"all-reduce": 2, "all-gather": 2}),
        ({"activations": "pinned_host"}, {"all-reduce": 2}, {"all-reduce": 3, "all-gather": 1}),
    ],
    ids=["remat", "selective", "host"],
)
def test_partition_activations_adds_a_gather_of_what_is_whole(settings, forward, backward):
    """The layer's input is split, and with "selective" attention's projection too.

    No other traffic is added.
    """
    text, loops = of_a_layer(
        gpt.layered_gpt(CONFIG), stage=1, partition_activations=True, **settings
    )
    assert loops == [forward, backward]
    assert "source_target_pairs={}" not in text
    # No device holds a full stack of the stream [L, B, T, H], and the host has an eighth of it.
    whole = [
        a
        for arrays in hlo.carried_arrays(text)
        for a in arrays
        if a.dims == (CONFIG.layers, 1, CONFIG.seq, CONFIG.hidden)
    ]
    split = [
        a
        for arrays in hlo.carried_arrays(text)
        for a in arrays
        if a.dims == (CONFIG.layers, 1, CONFIG.seq // 8, CONFIG.hidden)
    ]
    assert (whole, bool(split)) == ([], True)
