"""A `zerojax.LayeredModel` from the `config.json` of a Hugging Face folder.

    model   = zerojax.hf.model_of(folder)                            reads only config.json
    program = zj.build_train_step(model, optax.adamw(1e-5), zj.ZeroConfig(stage=3), mesh)
    state   = zj.import_hf(program, folder, key=jax.random.key(0))

Matrices are split over `tensor` as in Megatron (arXiv:1909.08053): q, k, v, gate and up by columns,
o and down by rows, and the embedding and head by vocabulary. In an adapter A[in, r] B[r, out], the
factor is split whose dim the adapted matrix splits.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.hf.attention import IMPLEMENTATIONS, Implementation
from zerojax.hf.batches import ADAPTERS, check_batch
from zerojax.hf.config import (
    CONFIG,
    DecoderConfig,
    Family,
    decoder_config,
    find_family,
    read_config,
)
from zerojax.hf.decoder import TENSOR, Batch, Block, Cached, Embed, Head, Options
from zerojax.hf.heads.task import TokenLoss, build_task, switch_adapters
from zerojax.hf.names import FAMILIES, Lora
from zerojax.models import Cache, LayeredModel, from_flax, with_specs

DECODER = "decoder"
"""Key of `about` for the options of `config.json` that restore and export compare."""


def model_of(
    folder: str | os.PathLike[str],
    *,
    lora: Lora | None = None,
    trainable: Any = None,
    attention: Implementation = "auto",
    mlp_tiles: int = 0,
    loss_tiles: int | None = None,
    loss: TokenLoss | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> LayeredModel:
    """Return the model that a folder's `config.json` describes.

    `zerojax.import_hf` reads its weights.

    A batch is a dict of integer arrays [B, T], such as int32: `tokens`; `targets`, in which
    negative values do not count; and optionally `segment_ids`, which restrict each token to its own
    segment, and `positions`, which restart in each segment. Other keys, dtypes and shapes raise
    ValueError. If values are out of range, the loss is NaN and the state stays as it was; metrics
    named `fault/...` show the key and the range. The loss is the mean over the targets that count,
    in nats. `program.apply` returns logits f32[B, T, V]; with `last`, i32[B], it returns the logits
    [B, V] at one position per row. A batch of a model with adapters may have `adapters`, a number:
    with 0, the model computes without them.

    With `loss`, such as `zerojax.dpo_loss(0.1)`, a batch also has the arrays that this loss reads,
    and `program.apply` of such a batch returns what `loss.predict` does.

    Args:
      folder: path of a folder, as `save_pretrained` of transformers writes it.
      lora: adapters for some projections; all other parameters are frozen.
      trainable: filter that selects the trainable parameters, as in `zerojax.from_flax`. None: the
        adapters if there are any, else all parameters.
      attention: "xla", "cudnn", or "auto": cuDNN's attention if it supports the model. The choice
        is logged.
      mlp_tiles: number of tiles in which the weights of each MLP are stored and used, one tile at a
        time (`zerojax.TiledMLP`), for matrices too large for a device; 0: untiled. Import and
        export support both.
      loss_tiles: number of vocabulary tiles in which the loss is computed; None: chosen by size.
      loss: a loss of the targets' log-probabilities, such as `zerojax.dpo_loss(0.1)`. None: the
        mean cross entropy.
      families: model families by `model_type`: `zerojax.hf.FAMILIES`, or a copy with your own
        added.

    Returns:
      The model; its parameters do not exist yet.

    Raises:
      ValueError: the folder's model is not supported, or an option does not fit; the error names
        it. Mixtures of experts, vision, quantized checkpoints, unknown kinds of rotary embeddings,
        and unknown keys of `config.json` that may change what is computed are refused.
    """
    config = config_of(folder, families)
    options = Options(lora=lora, attention=attention, mlp_tiles=mlp_tiles, loss_tiles=loss_tiles)
    _check_options(options)
    if trainable is None and lora is not None:
        trainable = nnx.LoRAParam
    task = build_task(loss, config.vocab, loss_tiles, build_context)
    model = from_flax(
        embed=lambda rngs: Embed(config, rngs=rngs),
        block=lambda rngs: Block(config, options, rngs=rngs),
        head=lambda rngs: Head(config, rngs=rngs),
        num_layers=config.layers,
        loss=task.loss,
        predict=task.predict,
        trainable=trainable,
        context=task.context,
        per_layer=build_per_layer(config),
        cache=Cache(build_cache_init(config), lambda block, *args: block.cached(*args)),
    )
    about: dict[str, Any] = {DECODER: config.computes()}
    block = model.block
    if lora is not None:
        about["lora"] = dataclasses.asdict(lora)
        block = switch_adapters(model.block)
    return dataclasses.replace(
        with_specs(model, _specs(model)), about=about, check_batch=task.check_batch, block=block
    )


def _check_options(options: Options) -> None:
    """Raise ValueError if an option is unknown, or two of them cannot be combined."""
    if options.attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention={options.attention!r} is unknown: choose from {', '.join(IMPLEMENTATIONS)}"
        )
    targets = () if options.lora is None else options.lora.targets
    adapted = {"gate_proj", "up_proj", "down_proj"} & set(targets)
    if options.mlp_tiles and adapted:
        raise ValueError(
            f"mlp_tiles={options.mlp_tiles} cannot be combined with adapters for "
            f"{', '.join(sorted(adapted))}: use mlp_tiles=0, or other targets"
        )


def config_of(
    folder: str | os.PathLike[str], families: Mapping[str, Family] = FAMILIES
) -> DecoderConfig:
    """Return the decoder that a folder's `config.json` describes.

    Args:
      folder: path of a folder that holds `config.json`.
      families: model families by `model_type`.

    Raises:
      ValueError: the folder's model is not supported.
    """
    folder = os.path.expanduser(os.fspath(folder))
    raw = read_config(folder)
    config_path = os.path.join(os.fspath(folder), CONFIG)
    return decoder_config(raw, find_family(raw, families, config_path), config_path)


def build_context(batch: Batch) -> dict[str, jax.Array]:
    """Return the arrays of a batch that all blocks read: positions, and segments if given.

    Positions default to 0 .. T - 1 in each row.
    """
    check_batch(batch)
    tokens = batch["tokens"]
    positions = batch.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = {"positions": positions}
    if "segment_ids" in batch:
        context["segment_ids"] = batch["segment_ids"]
    if ADAPTERS in batch:
        context[ADAPTERS] = jnp.asarray(batch[ADAPTERS], jnp.float32)
    return context


def build_cache_init(c: DecoderConfig) -> Callable[[int, int, Any], Cached]:
    """Return a function that creates the empty cache of one layer."""

    def init(rows: int, length: int, dtype: Any) -> Cached:
        return {
            name: jnp.zeros((rows, length, c.kv_heads, c.head_dim), dtype) for name in ("k", "v")
        }

    return init


def build_per_layer(c: DecoderConfig) -> dict[str, np.ndarray]:
    """Return per-layer arrays: rotations, and windows if they differ between layers."""
    # All layers share a few ropes, each of which holds D / 2 Python floats.
    distinct = list(dict.fromkeys(c.ropes))
    kinds = np.asarray([distinct.index(rope) for rope in c.ropes])
    frequencies = np.asarray([rope.frequencies for rope in distinct], np.float32)
    factors = np.asarray([rope.factor for rope in distinct], np.float32)
    arrays: dict[str, np.ndarray] = {
        "frequencies": frequencies[kinds],  # [L, D / 2]
        "factor": factors[kinds],  # [L]
    }
    if len(set(c.windows)) > 1:
        arrays["window"] = np.asarray(c.windows, np.int32)
    return arrays


def _specs(model: LayeredModel) -> dict[str, PartitionSpec]:
    """Return the rules for `with_specs` that match a parameter of this model."""
    columns = "(q_proj|k_proj|v_proj|gate_proj|up_proj)"
    rows = "(o_proj|down_proj)"
    rules = {
        rf"{columns}/(kernel|lora/lora_b)$": PartitionSpec(None, TENSOR),
        rf"{columns}/bias$": PartitionSpec(TENSOR),
        rf"{rows}/(kernel|lora/lora_a)$": PartitionSpec(TENSOR, None),
        r"mlp/(gate|up)$": PartitionSpec(None, TENSOR),
        r"mlp/down$": PartitionSpec(TENSOR, None),
        r"(embed_tokens|lm_head)/embedding$": PartitionSpec(TENSOR, None),
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    trees = {"embed": model.init_embed, "block": model.init_block, "head": model.init_head}
    shapes = {name: jax.eval_shape(init, key) for name, init in trees.items()}
    flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]

    def matches(rule: str) -> bool:
        return any(re.search(rule, path) for path in paths)

    return {rule: spec for rule, spec in rules.items() if matches(rule)}
