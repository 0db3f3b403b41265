"""Generate tokens from a batch of prompts of different lengths.

Prompts are padded on the right. Attention is causal, so positions after a row's last token are not
read, and a new token replaces the first padding. The logits of each row's last token are computed
in one of two ways:

    with a cache      The prompts are read once; each further pass reads one token per row.
    without           Each pass reads all tokens of all rows, by `program.apply`.

Both give the same tokens, unless two logits are equal within rounding. Parameters in host memory or
on disk are loaded layer by layer in each pass, which determines its time. If experts are in groups,
only the groups that the tokens of the pass visit are loaded.
"""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zerojax.inference.arguments import (
    checked_count,
    checked_ends,
    checked_key,
    checked_prompts,
    checked_temperature,
    checked_top_p,
    checked_use_cache,
)
from zerojax.inference.sampling import next_tokens
from zerojax.models import LAST, LayeredModel, at_last
from zerojax.program import Program
from zerojax.sharding import (
    ActivationSpec,
    describe_optional_axes,
    num_batch_shards,
    uncommitted,
    without_mesh,
)
from zerojax.state import TrainState

logger = logging.getLogger("zerojax")


@without_mesh
def generate(
    program: Program,
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    *,
    key: jax.Array | None = None,
    eos: int | Collection[int] | None = None,
    use_cache: bool | None = None,
) -> list[np.ndarray]:
    """Continue prompts, token by token.

    The model's `predict` must return logits [B, T, V] for a batch of `tokens` and `positions`,
    i32[B, T], in which tokens attend only to earlier tokens; or logits [B, V] at the position
    `batch["last"]` of each row. If there are several processes, all of them pass the same arguments
    and get all tokens.

    Args:
      program: program of a model with `predict`.
      state: state to generate with, in any tier; it is only read.
      prompts: token ids of each prompt, at least one per prompt.
      max_new_tokens: maximum number of tokens to generate for each prompt, at least 1.
      temperature: temperature of the softmax, at least 0; 0 chooses the likeliest token.
      top_p: probability mass, above 0 and at most 1, of the likeliest tokens to draw from.
      key: random key; needed if the temperature is above 0.
      eos: token or tokens below V that end a row; None: no token does.
      use_cache: whether to use the model's cache; None: if there is one and it can be used.

    Returns:
      The new tokens of each prompt, i32, including the token that ended it.

    Raises:
      ValueError: an argument has a wrong type or is out of range, or the model does not support
        this use; the error names the argument.
      NotImplementedError: the program's mesh has `expert` or `context`.
    """
    rows = checked_prompts(prompts)
    lengths = np.asarray([len(row) for row in rows])
    max_new_tokens = checked_count(max_new_tokens, int(lengths.max()))
    temperature = checked_temperature(temperature)
    top_p = checked_top_p(top_p)
    key = checked_key(key, temperature)
    if key is not None:
        key = uncommitted(key)
    ends = checked_ends(eos)
    use_cache = checked_use_cache(use_cache)
    _check_mesh(program.mesh)
    # The last token is not read, so it needs no position.
    width = int(lengths.max()) + max_new_tokens - 1
    tokens, lengths = _padded_batch(rows, width, num_batch_shards(program.mesh))
    logits_of = _logits(program, state, width, use_cache)
    new_tokens: list[list[int]] = [[] for _ in rows]
    is_open = np.ones(len(rows), bool)
    for step in range(max_new_tokens):
        logits = logits_of(tokens, lengths)
        if step == 0:
            _check_vocabulary(rows, ends, logits.shape[-1])
        with jax.set_mesh(program.mesh):
            step_key = None if key is None else jax.random.fold_in(key, step)
            drawn = np.asarray(_drawn(logits, step_key, temperature, top_p))
        for i in np.flatnonzero(is_open):
            new_tokens[i].append(int(drawn[i]))
            is_open[i] = drawn[i] not in ends
            if lengths[i] < width:
                tokens[i, lengths[i]] = drawn[i]
                lengths[i] += 1
        if not is_open.any():
            break
    return [np.asarray(row, np.int32) for row in new_tokens]


def _check_mesh(mesh: Mesh) -> None:
    """Raise NotImplementedError for a mesh on which nothing is generated."""
    if axes := describe_optional_axes(mesh):
        raise NotImplementedError(
            f"generate does not run on a mesh with {axes}: save a checkpoint, and restore "
            "it with a program on a mesh with these devices on fsdp"
        )


def _padded_batch(
    prompts: Sequence[np.ndarray], width: int, num_shards: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens i32[B, width] that begin with the prompts, and the rows' lengths [B].

    Extra rows of one token make B divisible by `num_shards`.
    """
    size = -(-len(prompts) // num_shards) * num_shards
    tokens = np.zeros((size, width), np.int32)
    lengths = np.ones(size, int)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return tokens, lengths


def _check_vocabulary(prompts: Sequence[np.ndarray], ends: np.ndarray, vocab: int) -> None:
    """Raise ValueError if a prompt or `ends` has a token that the model's vocabulary lacks."""
    largest = max(int(row.max()) for row in prompts)
    if largest >= vocab:
        raise ValueError(
            f"a prompt has token {largest}, but the model has {vocab} tokens, counted from 0"
        )
    if ends.size and ends.max() >= vocab:
        raise ValueError(
            f"eos has token {ends.max()}, but the model has {vocab} tokens, counted from 0, so no "
            "row would end with it: use the token of this model's tokenizer"
        )


def _logits(
    program: Program, state: TrainState, width: int, use_cache: bool | None
) -> Callable[..., jax.Array]:
    """Return `logits(tokens[B, width], lengths[B])`, which returns [B, V] at each row's last token.

    It must be called in the order of the tokens.
    """
    model = program.model
    if model.predict is None:
        raise ValueError(
            "generate needs logits: pass predict= to the model, a function that returns them for a "
            "batch"
        )
    cache = model.cache if isinstance(model, LayeredModel) else None
    why = None
    if cache is None:
        why = "the model has no cache="
    elif cache.max_length is not None and width > cache.max_length:
        why = f"this model's cache serves at most {cache.max_length} tokens per row, not {width}"
    if use_cache and why is not None:
        raise ValueError(f"use_cache=True: {why}; leave it None to read all tokens in each pass")
    if why is None and use_cache is not False:
        return _Cached(program, state, width)
    if why is None:
        why = "use_cache=False"
    logger.info("generate reads all tokens in each pass: %s", why)
    return _Uncached(program, state)


def _placed(program: Program, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return arrays, which every process holds completely, sharded over the mesh."""

    def place(a: np.ndarray) -> jax.Array:
        a = a.astype(np.int32)
        return jax.make_array_from_callback(
            a.shape, ActivationSpec(program.mesh).batch(a.ndim), lambda index: a[index]
        )

    return {name: place(a) for name, a in batch.items()}


@jax.jit
def _select_last(logits: jax.Array, last: jax.Array) -> jax.Array:
    """Return the logits [B, V] at one position, if the model returns them at all positions."""
    return logits if logits.ndim == 2 else at_last(logits, {LAST: last})


@functools.partial(jax.jit, static_argnums=(2, 3))
def _drawn(logits: jax.Array, key: jax.Array | None, temperature: float, top_p: float) -> jax.Array:
    """Return the next tokens, replicated on every device."""
    return jax.lax.with_sharding_constraint(
        next_tokens(logits, key, temperature, top_p), PartitionSpec()
    )


class _Uncached:
    """Computes logits by reading all tokens in each pass."""

    def __init__(self, program: Program, state: TrainState) -> None:
        """Take the program and the state to read."""
        self._program = program
        self._state = state

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Return the logits [B, V] at each row's last token."""
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        batch = _placed(
            self._program, {"tokens": tokens, "positions": positions, LAST: lengths - 1}
        )
        return _select_last(self._program.apply(self._state, batch), batch[LAST])


class _Cached:
    """Computes logits by reading the prompts once, then only the last token of each row."""

    def __init__(self, program: Program, state: TrainState, width: int) -> None:
        """Take the program, the state, and the number of tokens per row that the cache holds."""
        self._program = program
        self._state = state
        self._width = width
        self._cache: Any = None

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Return the logits [B, V] at each row's last token."""
        if self._cache is None:
            longest = lengths.max()
            positions = np.broadcast_to(np.arange(longest), (len(tokens), longest))
            last = lengths - 1
            tokens = tokens[:, :longest]
        else:
            # A row that has ended reads its last token again, which leaves its cache unchanged.
            positions = lengths[:, None] - 1
            last = np.zeros_like(lengths)
            tokens = np.take_along_axis(tokens, positions, 1)
        batch = _placed(self._program, {"tokens": tokens, "positions": positions, LAST: last})
        logits, self._cache = self._program.apply_cached(
            self._state, batch, self._cache, self._width
        )
        return _select_last(logits, batch[LAST])
