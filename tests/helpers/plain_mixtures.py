"""Folders of Qwen3 mixtures written without transformers, for tests that need no torch."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zerojax.weights import Tensor, write_safetensors

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip


def write_mixture(
    folder: pathlib.Path,
    dtype: str = "float32",
    values: Callable[[str, tuple[int, ...]], np.ndarray] | None = None,
    num_files: int = 1,
    **sizes: int,
) -> dict[str, Any]:
    """Write a folder, with numbers of `values(name, shape)` or random ones; return its tensors."""
    config = SIZES | sizes
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "norm_topk_prob": True, **config})
    )
    shapes = tensor_shapes(config)
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(float(name.endswith("norm.weight")), 0.1, shape).astype(np.float32)

    def pieces(name: str) -> Iterator[np.ndarray]:
        yield (values or draw)(name, shapes[name])

    names = list(shapes)
    files: dict[str, str] = {}
    for n in range(num_files):
        mine = names[n::num_files]
        file = (
            f"model-{n + 1:05}-of-{num_files:05}.safetensors"
            if num_files > 1
            else "model.safetensors"
        )
        tensors = {name: Tensor(shapes[name], dtype) for name in mine}
        write_safetensors(str(folder / file), tensors, pieces, {"format": "pt"})
        files |= dict.fromkeys(mine, file)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return shapes


def tensor_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Qwen3 mixture, by name."""
    hidden, width, vocab = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "vocab_size")
    )
    head, experts = config["head_dim"], config["num_experts"]
    heads = config["num_attention_heads"] * head
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes |= {"model.norm.weight": (hidden,)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (heads, hidden) for p in "qkv"}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (hidden, heads)}
        shapes |= {f"{layer}.self_attn.{p}_norm.weight": (head,) for p in "qk"}
        shapes |= {f"{layer}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
        shapes |= {f"{layer}.mlp.gate.weight": (experts, hidden)}
        for e in range(experts):
            expert = f"{layer}.mlp.experts.{e}"
            shapes |= {f"{expert}.{p}_proj.weight": (width, hidden) for p in ("gate", "up")}
            shapes |= {f"{expert}.down_proj.weight": (hidden, width)}
    return shapes


def batch_of(seed: int = 0, rows: int = 4, length: int = 8) -> dict[str, np.ndarray]:
    """Return random tokens and their targets."""
    shape = (rows, length + 1)
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
