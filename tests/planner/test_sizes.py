"""A transformer from its numbers: what follows from them, and which combinations contradict."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax import memory, planner
from zerojax.planner.lengths import find_longest

GPT = zj.Sizes(layers=24, hidden=2048, heads=16, seq=1024, batch=64, vocab=50257)
LLAMA_8B = zj.Sizes(
    layers=32,
    hidden=4096,
    heads=32,
    seq=8192,
    batch=8,
    vocab=128256,
    mlp=14336,
    kv_heads=8,
    gated=True,
    params=8_030_261_248,
)
QUICK = {
    "params": "device", "opt_state": "device", "grads": "device", "prefetch_distance": 1, "num_microbatches": 1,
    "gather_ahead": False, "update": None, "update_on": "device", "moments": "float32",
}  # fmt: skip


def test_sizes_of_a_gpt_are_the_equations():
    assert GPT.layer_params == GPT.layer_weights == 12 * 2048**2
    assert GPT.num_params == 12 * 24 * 2048**2 + 50257 * 2048
    assert GPT.end_params == 50257 * 2048
    assert GPT.layer_flops_per_token == 2 * 12 * 2048**2 + 4 * 1024 * 2048
    assert GPT.states_working_bytes() == planner.states_working_bytes(2048) == 4 * 2048 * 4 * 2048
    assert GPT.activations_working_bytes(4) == 4 * 1024 * (16 * 2048 + 2 * 16 * 1024)
    assert GPT.logits_bytes(4, tensor=2) == 4 * 1024 * 50257 * (4 + 2) / 2


def test_sizes_step_takes_three_forwards_of_layers_and_head():
    forward = 24 * GPT.layer_flops_per_token + 2 * GPT.head_weights
    assert GPT.step_flops() == pytest.approx(GPT.tokens * 3 * forward, rel=1e-12)
    again = GPT.step_flops("remat") - GPT.step_flops()
    assert again == pytest.approx(GPT.tokens * 24 * GPT.layer_flops_per_token, rel=1e-9)
    with pytest.raises(
        ValueError, match="activations='full': choose from everything, save, selective, remat"
    ):
        GPT.step_flops("full")


def test_sizes_of_a_llama_have_its_parameters():
    """Llama 3 8B has an untied head, norms and no bias; its files hold 8,030,261,248 parameters."""
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert LLAMA_8B.layer_weights == LLAMA_8B.layer_params == layer
    assert LLAMA_8B.end_params == 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert LLAMA_8B.num_params == 32 * LLAMA_8B.layer_params + LLAMA_8B.end_params == 8_030_261_248
    assert LLAMA_8B.states_working_bytes() == 4 * 4096 * 14336
    assert (
        dataclasses.replace(GPT, mlp=2048).states_working_bytes() == 4 * 2048 * 3 * 2048
    )  # of qkv


def test_sizes_given_fewer_parameters_have_smaller_layers():
    sizes = dataclasses.replace(GPT, params=1.25e9)
    assert sizes.num_params == 1_250_000_000
    assert sizes.layer_params == (1_250_000_000 - GPT.head_weights) // 24 < GPT.layer_params
    assert 0 <= sizes.end_params - GPT.end_params < 24
    assert sizes.layer_weights == GPT.layer_weights  # FLOPs are those of the products


B, T, H, A, K, F, V, L = 8, 16, 32, 4, 2, 48, 32, 2


def block(p, x, key):
    """A Llama layer: queries share keys and values, and the MLP is gated."""
    del key
    y, width = x * p["norm"], H // A
    q = (y @ p["q"]).reshape(B, T, K, A // K, width)
    k, v = ((y @ p[name]).reshape(B, T, K, width) for name in "kv")
    scores = jax.nn.softmax(
        jnp.einsum("btkgw,bskw->bkgts", q, k, preferred_element_type=jnp.float32)
    )
    x = x + jnp.einsum("bkgts,bskw->btkgw", scores.astype(x.dtype), v).reshape(x.shape) @ p["o"]
    y = x * p["norm"]
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


@pytest.mark.parametrize(
    ("activations", "precision", "itemsize"), [("save", "bf16", 2), ("selective", "fp32", 4)]
)
def test_sizes_know_what_a_llamas_layer_keeps(activations, precision, itemsize):
    kv = K * H // A
    shapes = {
        "q": (H, H),
        "k": (H, kv),
        "v": (H, kv),
        "o": (H, H),
        "gate": (H, F),
        "up": (H, F),
        "down": (F, H),
        "norm": (H,),
    }
    model = zj.LayeredModel(
        L,
        lambda key: jnp.ones((V, H)),
        lambda table, batch, key: table[batch["tokens"]],
        lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()},
        block,
        lambda key: {"w": jnp.ones((H, V))},
        lambda p, p_embed, x, batch, key: zj.linear_cross_entropy(x, p["w"], batch["targets"]),
    )
    config = zj.ZeroConfig(stage=1, activations=activations, precision=precision)
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    tokens = np.zeros((B, T), np.int32)
    kept = zj.build_train_step(model, optax.sgd(0.1), config, mesh).kept(
        {"tokens": tokens, "targets": tokens}
    )
    sizes = zj.Sizes(layers=L, hidden=H, heads=A, seq=T, batch=B, mlp=F, kv_heads=K, gated=True)
    expected = sizes.layer_kept_bytes(B, itemsize=itemsize, activations=activations)
    assert sum(value.num_bytes for value in kept if value.count > 1) == L * expected
    assert sizes.layer_weights == sum(np.prod(shape) for shape in shapes.values()) - H


def test_sizes_of_a_gpt_keep_what_the_closed_form_says():
    for options in (
        {"tensor": 4},
        {"activations": "remat", "tensor": 2, "sequence_parallel": True},
        {"fused_attention": True},
    ):
        kept = memory.layer_activation_bytes(1024, 4, 2048, 16, **options)
        assert GPT.layer_kept_bytes(4, **options) == kept
    for options in (
        {"activations": "remat"},
        {"activations": "remat", "tensor": 2, "partition_activations": True},
    ):
        kept = memory.layer_activation_bytes(8192, 1, 4096, 32, **options)
        assert (
            LLAMA_8B.layer_kept_bytes(1, **options) == kept
        )  # only the layer's input, regardless of its MLP


def test_sizes_split_what_a_llamas_layer_keeps_over_tensor():
    stream, split = (
        2 * 4096,
        4096 + 2 * 1024 + 4096 + 2 * 14336,
    )  # input and projection; qkv, attention, the MLP's two products
    assert LLAMA_8B.layer_kept_bytes(1, tensor=8, activations="selective") == 8192 * 2 * (
        stream + split / 8
    )
    with pytest.raises(
        ValueError, match=r"kv_heads = 8 is not divisible by tensor = 16, .*such as 8"
    ):
        LLAMA_8B.layer_kept_bytes(1, tensor=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, r"layers = 0: must be a whole number of at least 1"),
        ({"batch": 2.5}, r"batch = 2\.5: must be a whole number"),
        ({"seq": True}, r"seq = True"),
        ({"vocab": -1}, r"vocab = -1: must be a whole number of at least 0"),
        ({"mlp": 0}, r"mlp = 0"),
        ({"params": 0.5}, r"params = 0\.5: must be a whole number of at least 1"),
        (
            {"heads": 24},
            r"hidden = 2048 is not divisible by heads = 24: choose 16 heads, or hidden = 2064",
        ),
        ({"kv_heads": 6}, r"heads = 16 is not divisible by kv_heads = 6: .*choose 4"),
        (
            {"params": 1.1e9},
            r"params = 1,100,000,000, .* imply 1,310,885,888 \(-16%\): drop params",
        ),
        (
            {"params": 1.31e9, "vocab": 0, "layers": 20},
            r"imply 1,006,632,960 \(\+30%\).*vocab = 0 leaves out the embedding",
        ),
        (
            {"params": 95_000, "layers": 2, "hidden": 4, "heads": 1, "vocab": 25_000},
            r"params = 95,000.* imply 100,384",
        ),
    ],
)
def test_sizes_refuse_what_contradicts(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPT, **fields)


def test_sizes_are_exported():
    assert zj.Sizes is planner.Sizes


def test_longest_sequences_fit_and_longer_ones_do_not():
    """A plan finds the longest multiple of 32,768 tokens, as plans of it and the next one show."""
    machine = dataclasses.replace(zj.machine("l4"), host_bytes=64e9)
    sizes = dataclasses.replace(GPT, layers=4, batch=1)
    fixed = {"precision": "bf16", "activations": "remat", **QUICK}
    plan = zj.plan(sizes, machine=machine, fixed=fixed, longest=32768)
    assert plan.length is not None
    assert plan.length % 32768 == 0
    assert plan.tokens == plan.length
    assert f"{plan.length:,} tokens per sequence, the longest multiple of 32,768" in str(plan)
    of_length = dataclasses.replace(sizes, seq=plan.length)
    assert zj.plan(of_length, machine=machine, fixed=fixed).config == plan.config
    longer = dataclasses.replace(sizes, seq=plan.length + 32768)
    with pytest.raises(zj.PlanError, match="nothing fits l4"):
        zj.plan(longer, machine=machine, fixed=fixed)
    small = dataclasses.replace(machine, device_bytes=1e9, host_bytes=1e9)
    with pytest.raises(zj.PlanError, match="not even sequences of 1,024 tokens fit: nothing fits"):
        zj.plan(sizes, machine=small, fixed=fixed, longest=True)
    with pytest.raises(ValueError, match=r"longest=-1: pass True for multiples of 1,024 tokens"):
        zj.plan(sizes, machine=machine, longest=-1)


@pytest.mark.parametrize("longest", [1, 7, 100, 2**26, 2**26 + 1])
@pytest.mark.parametrize("block", [1, 3])
def test_bisection_finds_the_last_length_that_fits(longest, block):
    tried = list[int]()

    def fits(length):
        tried.append(length)
        return length <= longest

    expected = min(longest, 2**26) // block * block
    assert find_longest(fits, block) == (expected or None)
    assert len(tried) == len(set(tried)) <= 60
