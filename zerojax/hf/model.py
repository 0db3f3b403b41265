"""A Hugging Face folder's `config.json` as a `zerojax.LayeredModel`.

    model   = zerojax.hf.model_of(folder)                            nothing is read but config.json
    program = zj.build_train_step(model, optax.adamw(1e-5), zj.ZeroConfig(stage=3), mesh)
    state   = zj.import_hf(program, folder, key=jax.random.key(0))

Matrices are split over `tensor` as in Megatron (arXiv:1909.08053): columns of q, k, v, gate and up,
rows of o and down, and the vocabulary of embedding and head; of an adapter A[in, r] B[r, out] the
side that its matrix splits.
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
from zerojax.hf.batches import check_batch
from zerojax.hf.config import CONFIG, DecoderConfig, Family, decoder_config, family_of, read_config
from zerojax.hf.decoder import TENSOR, Batch, Block, Cached, Embed, Head, Options
from zerojax.hf.names import FAMILIES, Lora
from zerojax.models import Cache, LayeredModel, at_last, from_flax, with_specs

DECODER = "decoder"
"""In `about` of a model, what a restore and an export compare of `config.json`."""


def model_of(
    folder: str | os.PathLike[str],
    *,
    lora: Lora | None = None,
    trainable: Any = None,
    attention: Implementation = "auto",
    mlp_tiles: int = 0,
    loss_tiles: int | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> LayeredModel:
    """Return the model that a folder's `config.json` describes; its weights are read by
    `zerojax.import_hf`.

    A batch is a dict of arrays of integers [B, T], such as int32: `tokens`; `targets`, of which
      negative ones do not count;
    and, where given, `segment_ids`, by which tokens see their own segment alone, and `positions`,
    which restart in each. Other keys, dtypes and shapes raise ValueError. A batch with numbers out
    of range has a loss of NaN and leaves the state as it was; its metrics `fault/...` name the key
    and the range. The loss is the mean over the targets that count, in nats. `program.apply` gives
    logits f32[B, T, V]; with `last`, i32[B], those of one position, [B, V].

    Args:
      folder: as `save_pretrained` of transformers writes it.
      lora: adapters beside some projections; what they stand beside is frozen.
      trainable: which parameters are trained, as of `zerojax.from_flax`. None: the adapters where
        there are any, else all.
      attention: "xla", "cudnn", or "auto": cuDNN's where it serves, which is logged.
      mlp_tiles: tiles in which the weights of MLPs are stored and used, one at a time
        (`zerojax.TiledMLP`), for matrices too large for a device; 0: whole. Import and export know
        both.
      loss_tiles: tiles of the vocabulary in which the loss is computed; None: chosen by size.
      families: what each `model_type` is: `zerojax.hf.FAMILIES`, or these and your own.

    Raises:
      ValueError: the folder's model is not built, or an option does not fit: it is named. Mixtures
        of experts, vision, quantised checkpoints, unknown kinds of rotations, and keys of
        `config.json` that may change what is computed and are not known, are refused.
    """
    config = config_of(folder, families)
    if attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention={attention!r} is unknown: choose from {', '.join(IMPLEMENTATIONS)}"
        )
    if (
        mlp_tiles
        and lora is not None
        and (both := sorted({"gate_proj", "up_proj", "down_proj"} & set(lora.targets)))
    ):
        raise ValueError(
            f"mlp_tiles={mlp_tiles} with adapters beside {', '.join(both)}: use mlp_tiles=0, or other targets"
        )
    options = Options(lora=lora, attention=attention, mlp_tiles=mlp_tiles, loss_tiles=loss_tiles)
    model = from_flax(
        embed=lambda rngs: Embed(config, rngs=rngs),
        block=lambda rngs: Block(config, options, rngs=rngs),
        head=lambda rngs: Head(config, rngs=rngs),
        num_layers=config.layers,
        loss=lambda head, embed, x, batch: head.loss(embed, x, batch, loss_tiles),
        predict=lambda head, embed, x, batch: head.logits(embed, at_last(x, batch)),
        trainable=nnx.LoRAParam if trainable is None and lora is not None else trainable,
        context=context_of,
        per_layer=per_layer_of(config),
        cache=Cache(cache_of(config), lambda block, *args: block.cached(*args)),
    )
    about = {DECODER: config.computes()} | (
        {} if lora is None else {"lora": dataclasses.asdict(lora)}
    )
    return dataclasses.replace(
        with_specs(model, _specs(model)), about=about, check_batch=check_batch
    )


def config_of(
    folder: str | os.PathLike[str], families: Mapping[str, Family] = FAMILIES
) -> DecoderConfig:
    """Return what a folder's `config.json` describes.

    Raises:
      ValueError: it is not built.
    """
    folder = os.path.expanduser(os.fspath(folder))
    raw, where = read_config(folder), os.path.join(os.fspath(folder), CONFIG)
    return decoder_config(raw, family_of(raw, families, where), where)


def context_of(batch: Batch) -> dict[str, jax.Array]:
    """Return what all blocks read of a batch: positions, 0 ..

    T - 1 where none are given, and segments where they are.
    """
    check_batch(batch)
    tokens = batch["tokens"]
    positions = batch.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return {"positions": positions} | (
        {"segment_ids": batch["segment_ids"]} if "segment_ids" in batch else {}
    )


def cache_of(c: DecoderConfig) -> Callable[[int, int, Any], Cached]:
    """Return what makes the cache of one layer, without tokens in it."""

    def init(rows: int, length: int, dtype: Any) -> Cached:
        return {
            name: jnp.zeros((rows, length, c.kv_heads, c.head_dim), dtype) for name in ("k", "v")
        }

    return init


def per_layer_of(c: DecoderConfig) -> dict[str, np.ndarray]:
    """Return what differs from layer to layer: rotations, and windows where not all are the same."""
    # Few ropes serve all layers, and each holds D / 2 numbers of Python.
    distinct = list(dict.fromkeys(c.ropes))
    kinds = np.asarray([distinct.index(rope) for rope in c.ropes])
    rotations = {
        "frequencies": np.asarray([rope.frequencies for rope in distinct], np.float32)[
            kinds
        ],  # [L, D / 2]
        "factor": np.asarray([rope.factor for rope in distinct], np.float32)[kinds],
    }
    return rotations | (
        {"window": np.asarray(c.windows, np.int32)} if len(set(c.windows)) > 1 else {}
    )


def _specs(model: LayeredModel) -> dict[str, PartitionSpec]:
    """Return rules for `with_specs` that each match a parameter of this model."""
    columns, rows = "(q_proj|k_proj|v_proj|gate_proj|up_proj)", "(o_proj|down_proj)"
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
    paths = [
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
    ]
    return {
        rule: spec for rule, spec in rules.items() if any(re.search(rule, path) for path in paths)
    }
