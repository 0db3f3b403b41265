"""Specs given by rules over the paths of leaves, for models without annotations.

    rules   {r"(qkv|fc)/kernel": P(None, "tensor"), r"(proj|out)/kernel": P("tensor", None)}
    paths   block/qkv/kernel  W[D, F]  ->  W[D, F_tensor]
            block/out/kernel  W[F, D]  ->  W[F_tensor, D]

A path consists of a leaf's keys, joined by "/", in the tree that `specs` describes. In a
LayeredModel it begins with embed/, block/ or head/; with several stacks, block/ is followed by the
stack's name. A rule matches like `re.search`: anywhere in the path, unless it is anchored. Shapes
are found by tracing the init functions, so no arrays are created.

A spec describes one weight of one layer. The dims that count layers and tiles are not part of it,
and stay unsplit.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import jax
from jax.sharding import PartitionSpec

from zerojax.models.model import LayeredModel, Model, by_stack, of_every_stack
from zerojax.sharding import CONTEXT, FSDP, PIPE, broadcast_specs, parse_axes
from zerojax.trees import Params

_SHOWN = 24
"""Maximum number of paths shown in an error."""


@overload
def with_specs(model: Model, rules: Mapping[Any, PartitionSpec | None]) -> Model: ...
@overload
def with_specs(model: LayeredModel, rules: Mapping[Any, PartitionSpec | None]) -> LayeredModel: ...
def with_specs(model: Any, rules: Mapping[Any, PartitionSpec | None]) -> Any:
    """Return a model whose leaves are split by rules over their paths.

    The result is the same as with annotations in the model's modules.

        model = zj.with_specs(model, {r"(qkv|fc)/(kernel|bias)": P(None, "tensor"),
                                      r"(proj|out)/kernel": P("tensor", None)})

    A leaf that no rule matches keeps its spec. The spec of a rule replaces the leaf's: P() leaves
    the leaf unsplit.

    Args:
      model: any model; nothing of it is computed.
      rules: spec of one weight, by a regular expression that is searched for in paths such as
        "block/qkv/kernel" ("block/encoder/qkv/kernel" with several stacks, "blocks/0/qkv/kernel"
        for a Model that holds a list). The spec has no entry for the dim that counts layers, and
        none for the dim T of a stack of tiles W[T, ...]. It may have fewer entries than the weight
        has dims.

    Returns:
      A copy with the new `specs`. Building a program checks what depends on the mesh: unknown axes,
      and dims that are not divisible.

    Raises:
      ValueError: a rule is not a regular expression, or matches no leaf; two rules match one leaf;
        or a spec has more entries than the leaf has dims, names an axis twice, or names `fsdp`,
        whose dims ZeRO chooses.
    """
    if not isinstance(model, Model | LayeredModel):
        raise ValueError(
            f"with_specs takes a zerojax.Model or LayeredModel, got {type(model).__name__}; see "
            "zerojax.from_flax"
        )
    trees = _trees(model)
    leaves, structure = jax.tree_util.tree_flatten_with_path(trees.abstract)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    specs = broadcast_specs(trees.specs, trees.abstract)
    tiles = jax.tree.leaves(jax.tree.broadcast(trees.tiles, trees.abstract))
    for i, (rule, spec) in _matched(rules, paths).items():
        lead = int(tiles[i] is not False)
        _check(
            f"with_specs: rule {rule!r} gives {paths[i]} the spec {spec}",
            leaves[i][1].shape,
            spec,
            lead,
        )
        specs[i] = PartitionSpec(*(None,) * lead, *spec) if len(spec) else PartitionSpec()
    return dataclasses.replace(model, specs=jax.tree.unflatten(structure, specs))


class _Trees(NamedTuple):
    """Trees over the parameters, in the structure of a model's `specs`.

    Attributes:
      abstract: shapes and dtypes; for blocks, of one layer.
      specs: specs of the model, or a prefix of them.
      tiles: `tiles` of the model, or a prefix of them.
    """

    abstract: Params
    specs: Any
    tiles: Any


def _trees(model: Model | LayeredModel) -> _Trees:
    """Return the parameters' shapes, and the model's specs and tiles."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if isinstance(model, Model):
        return _Trees(jax.eval_shape(model.init, key), model.specs, model.tiles)
    abstract = {
        "embed": jax.eval_shape(model.init_embed, key),
        "block": by_stack(model, lambda stack: jax.eval_shape(stack.model.init_block, key)),
        "head": jax.eval_shape(model.init_head, key),
    }
    specs = {part: (model.specs or {}).get(part) for part in abstract}
    specs["block"] = of_every_stack(model, specs["block"], None)
    tiles = {"embed": False, "block": of_every_stack(model, model.tiles, False), "head": False}
    return _Trees(abstract, specs, tiles)


def _matched(rules: Mapping[Any, Any], paths: list[str]) -> dict[int, tuple[str, PartitionSpec]]:
    """Return the matching rule and its spec for each matched path, by the path's index."""
    if not isinstance(rules, Mapping):
        raise ValueError(
            f"with_specs takes a dict of regular expressions and specs, got {type(rules).__name__}"
        )
    matches: dict[int, list[tuple[str, PartitionSpec]]] = {}
    unused: list[str] = []
    for rule, spec in rules.items():
        if not (spec is None or isinstance(spec, PartitionSpec)):
            raise ValueError(
                f"with_specs: rule {rule!r} gives {spec!r}: a jax.sharding.PartitionSpec or None "
                "is needed"
            )
        try:
            pattern = re.compile(rule)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"with_specs: rule {rule!r} is not a regular expression: {error}"
            ) from error
        leaf_ids = [i for i, path in enumerate(paths) if pattern.search(path)]
        if not leaf_ids:
            unused.append(repr(pattern.pattern))
        for i in leaf_ids:
            leaf_spec = PartitionSpec() if spec is None else spec
            matches.setdefault(i, []).append((pattern.pattern, leaf_spec))
    if unused:
        raise ValueError(
            f"with_specs: no leaf is matched by {', '.join(unused)}; the paths are {_listed(paths)}"
        )
    ambiguous = []
    for i, leaf_matches in matches.items():
        if len(leaf_matches) > 1:
            leaf_rules = " and ".join(repr(rule) for rule, _ in leaf_matches)
            ambiguous.append(f"{paths[i]} by {leaf_rules}")
    if ambiguous:
        raise ValueError(
            f"with_specs: at most one rule may match a leaf, but several do: {_listed(ambiguous)}"
        )
    return {i: leaf_matches[0] for i, leaf_matches in matches.items()}


def _listed(items: list[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check(subject: str, shape: tuple[int, ...], spec: PartitionSpec, lead: int) -> None:
    """Raise ValueError for a spec that is wrong on any mesh.

    Args:
      subject: beginning of the error, which names the rule, the leaf and the spec.
      shape: shape of the leaf.
      spec: spec of one weight.
      lead: 1 for a stack of tiles, else 0.
    """
    wrong = [entry for entry in spec if not (entry is None or isinstance(entry, str | tuple))]
    if wrong:
        raise ValueError(
            f"{subject}, which holds {wrong[0]!r}: an entry is None, an axis, or a tuple of axes"
        )
    if len(spec) > len(shape) - lead:
        of_tiles = ", whose first dim counts tiles and is never split" if lead else ""
        raise ValueError(f"{subject}, which has {len(spec)} entries for shape {shape}{of_tiles}")
    axes = list(itertools.chain(*map(parse_axes, spec)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{subject}, which names an axis twice")
    assigned = [axis for axis in axes if axis in (FSDP, CONTEXT, PIPE)]
    if assigned:
        raise ValueError(
            f"{subject}: ZeRO chooses the dim that {assigned[0]!r} splits, so use only other axes, "
            "such as 'tensor'"
        )
