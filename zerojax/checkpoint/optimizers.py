"""How the optimizer's state in a checkpoint differs from a program's, in words instead of names of leaves.

    opt_state[0].mu['blocks']['w'], opt_state[0].nu[..], opt_state[0].count    ->    Adam's moments (count, mu, nu) at opt_state[0]
    opt_state[2].count                                                         ->    a count of steps, as a schedule keeps

Leaves that belong to one transformation share the name before their field. Fields are those of optax's states.
"""

import os
import re
from collections.abc import Iterable, Mapping

_FIELDS = (
    "count", "mu", "nu", "nu_max", "trace", "ema", "ema_params", "hyperparams", "hyperparams_states", "v_row", "v_col", "v",
    "sum_of_squares", "mini_step", "gradient_step", "acc_grads", "inner_state", "inner_states", "z", "rng_key",
)  # fmt: skip
"""Fields by which optax's states are known. The first in a name that holds no other state ends the transformation's name."""
_NESTING = {"inner_state", "inner_states"}
_KNOWN = "|".join(sorted((name for name in _FIELDS if name not in _NESTING), key=len, reverse=True))
_FIELD = re.compile(rf"\.({_KNOWN})(?=[.\[]|$)")
_STATE = "opt_state"


def optimizer_difference(here: Iterable[str], saved: Iterable[str], step_folder: str) -> str:
    """Return what to say where the optimizer's state of a checkpoint is another's, and how to go on from its weights.

    Args:
      here: names of the leaves of the program's state.
      saved: names of the leaves in the checkpoint.
      step_folder: of the checkpoint.

    Returns:
      Sentences to append to an error, or "" where both keep the same.
    """
    ours, theirs = _transformations(here), _transformations(saved)
    parts = [_compared(name, ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())]
    different = [part for part in parts if part]
    if not different:
        return ""
    return (
        f". The optimizer's state: {'; '.join(different)}. Restore it with the optimizer that it was saved with; or take its "
        f"weights alone, for a fresh optimizer state: zerojax.import_params(program, {os.path.normpath(step_folder)!r}, key=key)"
    )


def _transformations(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the fields of each transformation's state, by its name."""
    found: dict[str, set[str]] = {}
    for name in names:
        if not name.startswith(_STATE):
            continue
        match = _FIELD.search(name)
        owner, field = (name[: match.start()], match[1]) if match else (name, "")
        found.setdefault(owner, set()).add(field)
    return {owner: frozenset(fields) for owner, fields in found.items()}


def _compared(name: str, here: frozenset[str] | None, saved: frozenset[str] | None) -> str:
    """Return how one transformation's state differs, or ""."""
    if here == saved:
        return ""
    if saved is None:
        assert here is not None
        return f"this program has {_described(here)} at {name}, and the checkpoint has none"
    if here is None:
        return f"the checkpoint has {_described(saved)} at {name}, and this program has none"
    return f"at {name} this program has {_described(here)}, and the checkpoint has {_described(saved)}"


_KINDS: Mapping[frozenset[str], str] = {
    frozenset({"mu", "nu"}): "Adam's moments",
    frozenset({"mu"}): "a first moment",
    frozenset({"nu"}): "a second moment",
    frozenset({"trace"}): "momentum",
    frozenset({"v_row", "v_col", "v"}): "factored second moments",
    frozenset({"sum_of_squares"}): "sums of squares",
    frozenset({"hyperparams"}): "injected hyperparameters",
    frozenset({"hyperparams", "hyperparams_states"}): "injected hyperparameters",
    frozenset({"ema"}): "an average",
    frozenset({"ema_params"}): "averages of the weights",
}


def _described(fields: frozenset[str]) -> str:
    """Return what a transformation keeps, by its fields."""
    if fields == {"count"}:
        return "a count of steps, as a schedule keeps,"
    listed = ", ".join(sorted(field for field in fields if field))
    kind = _KINDS.get(fields - {"count"}, "state")
    return f"{kind} ({listed})" if listed else kind
