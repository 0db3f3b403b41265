"""A `zerojax.LayeredModel` from the `config.json` of a Hugging Face folder.

    model   = zerojax.hf.model_of(folder)                            reads only config.json
    program = zj.build_train_step(model, optax.adamw(1e-5), zj.ZeroConfig(stage=3), mesh)
    state   = zj.import_hf(program, folder, key=jax.random.key(0))

Matrices are split over `tensor` as in Megatron (arXiv:1909.08053): q, k, v, gate and up by columns,
o and down by rows, and the embedding and head by vocabulary. In an adapter A[in, r] B[r, out], the
factor is split whose dim the adapted matrix splits.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.checkpoint import CheckpointError
from zerojax.hf.adapters.lora import (
    Lora,
    check_lora,
    check_modules,
    check_switch,
    choose_trained,
    module_of,
)
from zerojax.hf.attention import IMPLEMENTATIONS, Implementation
from zerojax.hf.batches import ADAPTERS, check_batch
from zerojax.hf.config import (
    CONFIG,
    DecoderConfig,
    Family,
    decoder_config,
    find_family,
    read_config,
    text_config,
)
from zerojax.hf.decoder import TENSOR, Batch, Cached, Embed, Head, Options
from zerojax.hf.heads.task import TokenLoss, build_task, switch_adapters
from zerojax.hf.mixtures.block import Untrained, choose_parts
from zerojax.hf.mixtures.stacks import Run, join_stacks
from zerojax.hf.names import FAMILIES, PROJECTIONS
from zerojax.models import (
    LAST,
    Cache,
    LayeredModel,
    Loss,
    from_flax,
    list_stacks,
    with_specs,
)
from zerojax.user_values import as_number, positive_number, whole_number
from zerojax.weights import open_weights

DECODER = "decoder"
"""Key of `about` for the options of `config.json` that restore and export compare."""


def model_of(
    folder: str | os.PathLike[str],
    *,
    lora: Lora | None = None,
    trainable: Any = None,
    attention: Implementation = "auto",
    mlp_tiles: int = 0,
    seq_tiles: int = 1,
    loss_tiles: int | None = None,
    neftune_noise_alpha: float = 0.0,
    capacity_factor: float | None = None,
    expert_groups: int = 1,
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
      lora: adapters; all other parameters are frozen, except for its `modules_to_save`.
      trainable: filter that selects the trainable parameters, as in `zerojax.from_flax`. None: the
        adapters and their `modules_to_save` if there are any, else all parameters.
      attention: "xla"; "cudnn"; "blocks", which never holds the scores in full (`zj.attention`); or
        "auto": cuDNN's attention if it supports the model, and blocks if XLA's would hold more
        than 1 GiB of scores. The choice is logged.
      mlp_tiles: number of tiles in which the weights of each MLP are stored and used, one tile at a
        time (`zerojax.TiledMLP`), for matrices too large for a device; 0: untiled. Import and
        export support both.
      seq_tiles: number of tiles of a row's tokens in which each MLP or mixture of experts is
        computed, one after another (`zerojax.over_tokens`), so that its hidden activations exist
        for one tile only; 1: for all tokens at once. The tokens of a row divide by it.
      loss_tiles: number of vocabulary tiles in which the loss is computed; None: chosen by size.
      neftune_noise_alpha: size of NEFTune's noise (arXiv:2310.05914), such as 5.0, which training
        adds to the embeddings: uniform in +-alpha / sqrt(T H). 0: none.
      capacity_factor: for a mixture of experts, the cells of an expert per token that visits it, as
        in `zerojax.moe`: tokens without a cell are dropped, and the metric `dropped_fraction` shows
        how many. None: no token is dropped.
      expert_groups: for a mixture of experts, the number of groups of neighboring experts in which
        a layer's experts are stored and used, one group at a time, for layers too large for a
        device; a divisor of the number of experts. `generate` then reads only the groups that its
        tokens visit. Import and export support any number. Not on a mesh with `expert`.
      loss: a loss of the targets' log-probabilities, such as `zerojax.dpo_loss(0.1)`. None: the
        mean cross entropy.
      families: model families by `model_type`: `zerojax.hf.FAMILIES`, or a copy with your own
        added.

    Returns:
      The model; its parameters do not exist yet.

    Raises:
      ValueError: the folder's model is not supported, or an option does not fit; the error names
        it. Vision, quantized checkpoints, unknown kinds of rotary embeddings,
        and unknown keys of `config.json` that may change what is computed are refused.
    """
    family, config = read_family(folder, families)
    lora = _narrowed(lora, config)
    options = Options(
        lora=lora,
        attention=attention,
        mlp_tiles=mlp_tiles,
        seq_tiles=whole_number("seq_tiles", seq_tiles, 1),
        loss_tiles=loss_tiles,
        neftune_noise_alpha=neftune_noise_alpha,
        capacity_factor=capacity_factor,
        expert_groups=whole_number("expert_groups", expert_groups, 1),
    )
    _check_options(options, config)
    if lora is not None:
        check_lora(lora, config, mlp_tiles)
    if trainable is None and lora is not None:
        trainable = choose_trained(lora)
    if config.mixture is not None and config.mixture.correction:
        trainable = nnx.All(... if trainable is None else trainable, nnx.Not(Untrained))
    # Longer rows rotate cached keys in another way than the keys that follow.
    max_length = min((rope.length for rope in config.ropes if rope.length), default=None)
    parts = choose_parts(config)
    read_context = functools.partial(build_context, has_row_lengths=max_length is not None)
    task = build_task(loss, config.vocab, loss_tiles, read_context)

    def compute_loss(head: Head, embed: Embed, x: Any, batch: Batch) -> Loss:
        return parts.with_usage(task.loss(head, embed, parts.hidden(x), batch), x, batch)

    per_layer = build_per_layer(config)

    def build(run: Run) -> LayeredModel:
        block = family.block or parts.blocks[run.has_experts]
        layers = slice(run.first, run.first + run.num_layers)
        model = from_flax(
            embed=lambda rngs: parts.embed(config, options, rngs=rngs),
            block=lambda rngs: block(config, options, rngs=rngs),
            head=lambda rngs: Head(config, options, rngs=rngs),
            num_layers=run.num_layers,
            loss=compute_loss,
            predict=lambda head, embed, x, batch: task.predict(head, embed, parts.hidden(x), batch),
            trainable=trainable,
            context=task.context,
            per_layer={name: a[layers] for name, a in per_layer.items()},
            cache=Cache(
                build_cache_init(config), lambda block, *args: block.cached(*args), max_length
            ),
        )
        if lora is None or not lora.can_be_off:
            return model
        return dataclasses.replace(model, block=switch_adapters(model.block))

    model = join_stacks(config.runs, map(build, config.runs))
    about: dict[str, Any] = {DECODER: config.computes()}
    if lora is not None:
        check_modules(lora, _list_modules(model), mlp_tiles)
        about["lora"] = dataclasses.asdict(lora)

    def check_batch(batch: Batch) -> None:
        task.check_batch(batch)
        if ADAPTERS in batch and lora is not None:
            check_switch(lora)

    return dataclasses.replace(
        with_specs(model, _specs(model)), about=about, check_batch=check_batch
    )


def _narrowed(lora: Lora | None, config: DecoderConfig) -> Lora | None:
    """Return adapters for all projections of attention if a mixture is given adapters for all.

    PEFT adapts experts too if it is given the names of an MLP's projections.
    """
    if lora is None or config.mixture is None or set(lora.targets) != set(PROJECTIONS):
        return lora
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if config.latent is not None:
        targets = ["o_proj"] if config.latent.query_rank is not None else ["q_proj", "o_proj"]
    return dataclasses.replace(lora, targets=tuple(targets))


def _check_options(options: Options, config: DecoderConfig) -> None:
    """Raise ValueError if an option is unknown, or two of them cannot be combined."""
    if options.attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention={options.attention!r} is unknown: choose from {', '.join(IMPLEMENTATIONS)}"
        )
    if options.capacity_factor is not None:
        positive_number("model_of: capacity_factor", options.capacity_factor, ", or None")
        if config.mixture is None:
            raise ValueError(
                f"capacity_factor={options.capacity_factor}: this model has no experts; leave it "
                "None"
            )
    targets = () if options.lora is None else options.lora.targets
    adapted = {"gate_proj", "up_proj", "down_proj"} & set(targets)
    if config.mixture is not None and adapted:
        raise ValueError(
            f"targets={targets!r} of a Lora: {', '.join(sorted(adapted))} are projections of "
            "experts, which have no adapters: choose from q_proj, k_proj, v_proj and o_proj, or "
            "'all' for all of attention"
        )
    if config.latent is not None:
        known = {"o_proj"} | ({"q_proj"} if config.latent.query_rank is None else set())
        unknown = [name for name in targets if name not in known]
        if unknown:
            raise ValueError(
                f"targets={targets!r} of a Lora: {', '.join(unknown)}: latent attention has no "
                f"such projection with an adapter: choose from {', '.join(sorted(known))}"
            )
    if config.mixture is not None and options.mlp_tiles:
        raise ValueError(
            f"mlp_tiles={options.mlp_tiles}: experts are not stored in tiles of their width: use "
            "mlp_tiles=0, and expert_groups= for groups of experts"
        )
    _check_expert_groups(options.expert_groups, config)
    if options.seq_tiles > 1:
        _check_seq_tiles(options, config, bool(adapted))
    alpha = as_number(options.neftune_noise_alpha)
    if alpha is None or not 0 <= alpha < math.inf:
        raise ValueError(
            f"neftune_noise_alpha={options.neftune_noise_alpha!r}: a finite number of at least 0 "
            "is needed, such as 5.0"
        )


def _check_expert_groups(count: int, config: DecoderConfig) -> None:
    """Raise ValueError unless a layer's experts can be stored in a number of groups."""
    if count == 1:
        return
    if config.mixture is None:
        raise ValueError(f"expert_groups={count}: this model has no experts; leave it 1")
    experts = config.mixture.experts
    if experts % count:
        raise ValueError(
            f"expert_groups={count} does not divide the {experts} experts of a layer: {experts} % "
            f"{count} = {experts % count}"
        )


def _check_seq_tiles(options: Options, config: DecoderConfig, is_adapted: bool) -> None:
    """Raise ValueError unless MLPs can be computed over tiles of the tokens."""
    where = f"seq_tiles={options.seq_tiles}"
    if options.capacity_factor is not None:
        raise ValueError(
            f"{where} cannot be combined with capacity_factor={options.capacity_factor}: cells "
            "would be counted in each tile, so other tokens would be dropped: use seq_tiles=1 or "
            "capacity_factor=None"
        )
    if options.expert_groups > 1:
        raise ValueError(
            f"{where} cannot be combined with expert_groups={options.expert_groups}, which each "
            "tile of tokens would read again: use seq_tiles=1 or expert_groups=1"
        )
    if options.mlp_tiles:
        raise ValueError(
            f"{where} cannot be combined with mlp_tiles={options.mlp_tiles}, which tiles weights: "
            "use seq_tiles=1 or mlp_tiles=0"
        )
    if options.lora is not None and options.lora.dropout and is_adapted:
        raise ValueError(
            f"{where}: the dropout of adapters would be the same in all tiles: use dropout=0, or "
            "targets outside of the MLP, such as 'q_proj'"
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
    return read_family(folder, families)[1]


def read_family(
    folder: str | os.PathLike[str], families: Mapping[str, Family]
) -> tuple[Family, DecoderConfig]:
    """Return the family of a folder's model, and its decoder.

    Folders of models of images may leave open whether the head is tied: it is, unless the folder
    has weights with a head of their own.

    Args:
      folder: path of a folder that holds `config.json`.
      families: model families by `model_type`.

    Raises:
      ValueError: the folder's model is not supported.
    """
    folder = os.path.expanduser(os.fspath(folder))
    raw = read_config(folder)
    config_path = os.path.join(folder, CONFIG)
    family = find_family(raw, families, config_path)
    if family.inside and "tie_word_embeddings" not in text_config(raw, family):
        raw = {**raw, "tie_word_embeddings": not _has_head(folder)}
    return family, decoder_config(raw, family, config_path)


def _has_head(folder: str) -> bool:
    """Return whether a folder has weights with a head."""
    try:
        tensors = open_weights(folder).tensors
    except CheckpointError:
        return False
    return any(name.endswith("lm_head.weight") for name in tensors)


def build_context(batch: Batch, *, has_row_lengths: bool = False) -> dict[str, jax.Array]:
    """Return the arrays of a batch that all blocks read: positions, and segments if given.

    Positions default to 0 .. T - 1 in each row.

    Args:
      batch: the batch.
      has_row_lengths: whether to add the number of positions of each row, on which some rotations
        depend. Tokens after `last` do not count.
    """
    check_batch(batch)
    tokens = batch["tokens"]
    positions = batch.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = {"positions": positions}
    if "segment_ids" in batch:
        context["segment_ids"] = batch["segment_ids"]
    if has_row_lengths:
        largest = jnp.max(positions, axis=1)
        if LAST in batch:
            largest = jnp.take_along_axis(positions, batch[LAST][:, None], axis=1)[:, 0]
        context["row_lengths"] = largest.astype(jnp.int32) + 1  # [B]
    if ADAPTERS in batch:
        context[ADAPTERS] = jnp.asarray(batch[ADAPTERS], jnp.float32)
    return context


def build_cache_init(c: DecoderConfig) -> Callable[[int, int, Any], Cached]:
    """Return a function that creates the empty cache of one layer."""

    def init(rows: int, length: int, dtype: Any) -> Cached:
        if c.latent is not None:
            widths = {"latent": c.latent.rank, "rotated": c.latent.rope_dim}
            return {name: jnp.zeros((rows, length, n), dtype) for name, n in widths.items()}
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
    if any(rope.length for rope in distinct):
        long = [rope.long_frequencies or rope.frequencies for rope in distinct]
        arrays["long_frequencies"] = np.asarray(long, np.float32)[kinds]  # [L, D / 2]
        arrays["length"] = np.asarray([rope.length for rope in distinct], np.int32)[kinds]
        arrays["growth"] = np.asarray([rope.growth for rope in distinct], np.float32)[kinds]
    if c.chunked is not None:
        arrays["is_rotated"] = np.asarray(c.chunked.rotated)
    if len(set(c.windows)) > 1:
        arrays["window"] = np.asarray(c.windows, np.int32)
    return arrays


def _specs(model: LayeredModel) -> dict[str, PartitionSpec]:
    """Return the rules for `with_specs` that match a parameter of this model."""
    columns = "(q_proj|k_proj|v_proj|gate_proj|up_proj|lm_head)"
    rows = "(o_proj|down_proj)"
    rules = {
        rf"{columns}/(kernel|lora/lora_b)$": PartitionSpec(None, TENSOR),
        rf"{columns}/(bias|lora/lora_m)$": PartitionSpec(TENSOR),
        r"self_attn/(q_b_proj|kv_b_proj)/kernel$": PartitionSpec(None, TENSOR),
        rf"{rows}/(kernel|lora/lora_a)$": PartitionSpec(TENSOR, None),
        r"self_attn/sinks$": PartitionSpec(TENSOR),
        r"mlp/(gate|up)$": PartitionSpec(None, TENSOR),
        r"mlp/down$": PartitionSpec(TENSOR, None),
        r"(embed_tokens|lm_head)/embedding$": PartitionSpec(TENSOR, None),
        r"embed_tokens/lora/lora_a$": PartitionSpec(TENSOR, None),
    }
    paths = _list_paths(model)

    def matches(rule: str) -> bool:
        return any(re.search(rule, path) for path in paths)

    return {rule: spec for rule, spec in rules.items() if matches(rule)}


def _list_paths(model: LayeredModel) -> list[str]:
    """Return the paths of a model's parameters, such as "block//mlp/up_proj/kernel".

    After "block" is the name of the stack, "" if there is only one.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    trees = {"embed": model.init_embed, "head": model.init_head}
    for stack in list_stacks(model):
        trees[f"block/{stack.name}"] = stack.model.init_block
    shapes = {name: jax.eval_shape(init, key) for name, init in trees.items()}
    flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def _list_modules(model: LayeredModel) -> set[str]:
    """Return the names in the files of modules with parameters, in the first layer or outside."""
    modules = set[str]()
    for path in _list_paths(model):
        part, *names = path.split("/")
        if "lora" not in names:
            modules.add(module_of(tuple(names[part == "block" :])))
    return modules
