"""Fine-tune a Llama on CPUs, adapters or all weights, compared with torch on the same cores.

The torch contenders use PEFT and transformers.
"""

import json
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from plain_parts.rows import Row

LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
ROWS, SEQ, STEPS, WARMUP = 4, 256, 8, 2
RANK = 16
TABLE = (
    Row("adapters, zerojax.hf", "adapters, torch and PEFT", 1.0),
    Row("adapters, plain JAX: the same block in a scan", "adapters, torch and PEFT"),
    Row("all weights, zerojax.hf", "all weights, torch and transformers", 1.0),
)


def batch_of() -> dict[str, np.ndarray]:
    """Return a batch with "tokens" and "targets", int32[4, 256] each."""
    tokens = (
        np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (ROWS, SEQ + 1)).astype(np.int32)
    )
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def seconds(name: str) -> float:
    """Return a contender's median seconds per step, by its name in the table."""
    is_lora, ours = name.startswith("adapters"), "zerojax" in name
    if "torch" in name:
        return _torch(is_lora)
    return _zerojax(is_lora) if ours else _plain()


def _zerojax(is_lora: bool) -> float:
    import jax
    import optax

    import zerojax as zj
    from zerojax.hf import model_of

    jax.config.update("jax_num_cpu_devices", 1)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        model = model_of(
            folder, lora=zj.Lora(rank=RANK, alpha=2 * RANK, targets="all") if is_lora else None
        )
    program = zj.build_train_step(
        model, optax.adamw(1e-4), zj.ZeroConfig(stage=0), zj.make_mesh(fsdp=1)
    )
    state, batch, found = program.init(jax.random.key(0)), batch_of(), list[float]()
    for _ in range(STEPS + WARMUP):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        found.append(time.perf_counter() - start)
    return float(np.median(found[WARMUP:]))


def _torch(is_lora: bool) -> float:
    import peft
    import torch
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    model: Any = transformers.LlamaForCausalLM(config)
    if is_lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names)
        )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True
    )
    batch = {name: torch.from_numpy(a.astype(np.int64)) for name, a in batch_of().items()}
    found = list[float]()
    for _ in range(STEPS + WARMUP):
        start = time.perf_counter()
        logits = model(input_ids=batch["tokens"]).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - start)
    return float(np.median(found[WARMUP:]))


def _plain() -> float:
    """Return the seconds per step of adapters in JAX alone.

    The program consists of the block's equations, a scan over layers, value_and_grad and optax.
    """
    import jax
    import jax.numpy as jnp
    import optax

    h, f, layers, heads, vocab = 512, 1376, 8, 8, 8192
    shapes = {
        "q": (h, h),
        "k": (h, h),
        "v": (h, h),
        "o": (h, h),
        "gate": (h, f),
        "up": (h, f),
        "down": (f, h),
    }
    keys = iter(jax.random.split(jax.random.key(0), 64))
    draw = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)  # noqa: E731
    base = {name: draw(layers, *shape) for name, shape in shapes.items()}
    base |= {"norm_1": jnp.ones((layers, h)), "norm_2": jnp.ones((layers, h))}
    ends = {"embed": draw(vocab, h), "norm": jnp.ones(h), "head": draw(h, vocab)}
    adapters = {
        name: (draw(layers, a, RANK), jnp.zeros((layers, RANK, b)))
        for name, (a, b) in shapes.items()
    }
    tx = optax.adamw(1e-4)

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def rotated(x: Any) -> Any:  # [B, T, heads, width]
        width = x.shape[-1]
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, width, 2) / width)
        cos, sin = (jnp.concatenate([g(angle)] * 2, -1)[None, :, None] for g in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-b, a], -1) * sin

    def block(x: Any, layer: Any) -> Any:
        weights, added = layer

        def product(x: Any, name: str) -> Any:
            a, b = added[name]
            return x @ weights[name] + 2.0 * ((x @ a) @ b)

        y = norm(x, weights["norm_1"])
        q, k, v = (product(y, name).reshape(*x.shape[:2], heads, h // heads) for name in "qkv")
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + product(y.reshape(x.shape), "o")
        y = norm(x, weights["norm_2"])
        return x + product(jax.nn.silu(product(y, "gate")) * product(y, "up"), "down"), None

    def loss(adapters: Any, frozen: Any, batch: Any) -> Any:
        base, ends = frozen
        x, _ = jax.lax.scan(block, ends["embed"][batch["tokens"]], (base, adapters))
        logits = norm(x, ends["norm"]) @ ends["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(state: Any, frozen: Any, batch: Any) -> Any:
        adapters, opt_state = state
        value, grads = jax.value_and_grad(loss)(adapters, frozen, batch)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return (optax.apply_updates(adapters, updates), opt_state), value

    jitted, state, batch = (
        jax.jit(step, donate_argnums=0),
        (adapters, tx.init(adapters)),
        batch_of(),
    )
    found = list[float]()
    for _ in range(STEPS + WARMUP):
        start = time.perf_counter()
        state, value = jitted(state, (base, ends), batch)
        jax.block_until_ready((state, value))
        found.append(time.perf_counter() - start)
    return float(np.median(found[WARMUP:]))
