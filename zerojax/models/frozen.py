"""Trainable and frozen leaves of a model. A step reads frozen leaves and never writes them.

    frozen = the leaves that `model.frozen` marks, and all integer or boolean leaves, which have no
    derivative

A tree of one kind of leaves has the structure of the parameters, with None in place of the leaves
of the other kind. Paths therefore stay the same, so a mask, or a function that labels paths, keeps
its meaning for the optimizer, which sees only the trainable leaves.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.models.model import BLOCKS, LayeredModel, Model, of_every_stack
from zerojax.trees import Params

_PARTS = {"embed": "embed", "block": BLOCKS, "head": "head"}
"""Keys of `LayeredModel.frozen`, with the corresponding keys of the parameter tree."""


def frozen_flags(model: Model | LayeredModel, abstract_params: Params) -> Any:
    """Return a tree of bool over the parameters: True for frozen leaves.

    Args:
      model: model with `frozen`.
      abstract_params: parameters, abstract or not.

    Raises:
      ValueError: there are no parameters, or none to train; a leaf is neither floating, integer nor
        boolean; or `model.frozen` does not have the structure of the parameters, or holds a leaf
        that is not a bool.
    """
    leaves = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params)[0]
    ]
    if not leaves:
        raise ValueError("the model has no parameters: init returned a tree without arrays")
    wrong = []
    for name, leaf in leaves:
        if not any(jnp.issubdtype(leaf.dtype, k) for k in (jnp.floating, jnp.integer, jnp.bool_)):
            wrong.append(f"{name} ({leaf.dtype})")
    if wrong:
        raise ValueError(
            "parameters must be floating, or integers or booleans, which are frozen; but "
            f"{', '.join(wrong)} are not: keep such arrays out of the tree"
        )
    flags = []
    marked_flags = _marked_flags(model, abstract_params)
    for (name, leaf), flag in zip(leaves, marked_flags, strict=True):
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"frozen holds {flag!r} for {name}: True or False is needed")
        flags.append(bool(flag) or not jnp.issubdtype(leaf.dtype, jnp.floating))
    if all(flags):
        raise ValueError(
            f"all {len(flags)} parameter leaves are frozen, so nothing is left to train: `frozen` "
            "of the model is True, or marks every floating leaf"
        )
    return jax.tree.unflatten(jax.tree.structure(abstract_params), flags)


def _marked_flags(model: Model | LayeredModel, params: Params) -> list[Any]:
    """Return the value of `model.frozen` for each leaf."""
    frozen = False if model.frozen is None else model.frozen
    if isinstance(model, LayeredModel) and isinstance(frozen, Mapping):
        unknown = sorted(set(frozen) - set(_PARTS), key=str)
        if unknown:
            raise ValueError(
                f"frozen has keys {unknown}: only 'embed', 'block' and 'head' are allowed"
            )
        frozen = {key: frozen.get(part, False) for part, key in _PARTS.items()}
        frozen[BLOCKS] = of_every_stack(model, frozen[BLOCKS], False)
    elif isinstance(model, LayeredModel) and not isinstance(frozen, bool):
        raise ValueError(
            f"frozen={frozen!r}: a bool is needed, or a dict with some of the keys 'embed', "
            "'block' and 'head'"
        )
    try:
        # A flag of the prefix applies to every leaf below it.
        flags = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), frozen, params)
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(
            "frozen must mirror the parameters (for 'block', which is 'blocks' here, the "
            f"parameters of one layer), or be a prefix of their tree: {e}"
        ) from e
    return jax.tree.leaves(flags)
