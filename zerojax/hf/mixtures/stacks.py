"""Layers with and without experts: runs of equal layers, each a stack of a LayeredModel.

    layers      dense dense dense experts experts ..        DeepSeek V3
    stacks      blocks.dense_0 [3, ..]    blocks.experts_1 [58, ..]

A decoder whose layers are all equal has a single stack, without a name.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.models import Cache, LayeredModel, Stack
from zerojax.weights import LAYER, read_places

BLOCKS = "blocks."
"""Prefix of the names of layers' parameters."""

_STACK = re.compile(r"blocks\.((?:dense|experts)_[0-9]+)\.")


class Run(NamedTuple):
    """A run of layers of the same kind.

    Attributes:
      name: name of the stack; "" if it is the only one.
      first: number of the first layer.
      num_layers: number of layers.
      has_experts: whether they have experts.
    """

    name: str
    first: int
    num_layers: int
    has_experts: bool

    @property
    def prefix(self) -> str:
        """Beginning of the names of its parameters."""
        return f"{BLOCKS}{self.name}." if self.name else BLOCKS


def list_runs(sparse: Sequence[bool]) -> tuple[Run, ...]:
    """Return the runs of equal layers, given which layers have experts."""
    groups = [(kind, len(list(group))) for kind, group in itertools.groupby(sparse)]
    if len(groups) == 1:
        return (Run("", 0, groups[0][1], groups[0][0]),)
    runs: list[Run] = []
    first = 0
    for number, (has_experts, count) in enumerate(groups):
        name = f"{'experts' if has_experts else 'dense'}_{number}"
        runs.append(Run(name, first, count, has_experts))
        first += count
    return tuple(runs)


def stack_of(name: str) -> str:
    """Return the stack in the name of a layer's parameter; "" for the only stack."""
    match = _STACK.match(name)
    return "" if match is None else match[1]


def name_by_stack(names: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Return a table of names, with the stack of each layer in the names of parameters.

    Args:
      names: table for a single stack.
      runs: runs of the layers.
    """
    if len(runs) == 1:
        return dict(names)
    table: dict[str, Any] = {}
    for name, value in names.items():
        places = read_places(value, name)
        if LAYER not in name:
            table[name] = value
            continue
        for run in runs:
            moved = [
                place._replace(name=run.prefix + place.name.removeprefix(BLOCKS))
                for place in places
            ]
            for layer in range(run.num_layers):
                numbered = name.replace(LAYER, str(run.first + layer))
                table[numbered] = [place._replace(layer=layer) for place in moved]
    return table


def join_stacks(runs: Sequence[Run], models: Iterable[LayeredModel]) -> LayeredModel:
    """Return one model whose stacks are the layers of several models, in order.

    Args:
      runs: runs of the layers.
      models: a model of each run, all with the same embedding and head.
    """
    parts = dict(zip([run.name for run in runs], models, strict=True))
    first = next(iter(parts.values()))
    if len(parts) == 1:
        return first
    stacks = tuple(
        Stack(name, model.num_layers, model.init_block, model.block)
        for name, model in parts.items()
    )
    frozen = first.frozen
    if isinstance(frozen, Mapping):
        frozen = {**frozen, "block": {n: model.frozen["block"] for n, model in parts.items()}}
    assert first.specs is not None
    cache = first.cache
    if cache is not None:
        blocks: dict[str, Any] = {}
        for name, model in parts.items():
            assert model.cache is not None
            blocks[name] = model.cache.block
        cache = Cache(cache.init, blocks, cache.max_length)
    return dataclasses.replace(
        first,
        init_block=None,
        block=None,
        stacks=stacks,
        specs={**first.specs, "block": {n: model.specs["block"] for n, model in parts.items()}},
        tiles={name: model.tiles for name, model in parts.items()},
        frozen=frozen,
        per_layer={name: model.per_layer for name, model in parts.items()},
        stochastic=any(model.stochastic for model in parts.values()),
        cache=cache,
    )
