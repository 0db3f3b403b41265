"""Log-probabilities under a reference, the model before training, computed once.

    reference[i] = (log p(chosen), log p(rejected)) of pair i        f32[E, 2], 8 bytes per pair

No second model is held: the state before the first step is the reference, or at any time the same
base with its adapters switched off, which computes the same bits. One forward pass over the data is
read back from a file in every later epoch and run. A reference within each step would instead cost
a third more compute in every epoch, and for layers on a disk one more read of all of them.
"""

import os
import zipfile
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.data import PairRows, batches_once
from zerojax.models import LayeredModel
from zerojax.program import Program
from zerojax.state import TrainState

_ADAPTERS = "adapters"
_FACTORS = ("lora_a", "lora_b")
_VERSION = 1


def reference_log_probs(
    program: Program,
    state: TrainState,
    rows: PairRows,
    batch_size: int,
    *,
    adapters: bool = True,
) -> np.ndarray:
    """Return the log-probabilities of all sequences of pairs, f32[E, 2].

        reference = reference_log_probs(program, state, rows, 8)       # before the first step
        rows = rows.with_reference(reference)

    Parameters are read where they are stored, in any tier. If there are several processes, all of
    them must call this, and each gets the full result.

    Args:
      program: program of a model whose loss is `zerojax.dpo_loss`.
      state: state to read.
      rows: packed pairs. Pairs that packing left out have 0.
      batch_size: rows per forward pass, over all processes.
      adapters: whether to compute with adapters. False gives the base's log-probabilities, also
        from a state whose adapters are trained.

    Raises:
      ValueError: `adapters` is False, but the model has none, or trains other parameters too, so
        the base is not what it was.
    """
    if not adapters:
        _check_adapters(program.model)
    out = np.zeros((len(rows.pairs), 2), np.float32)
    part, num_parts = program.batch_part
    first = 0
    for batch in batches_once(rows, batch_size, part=part, num_parts=num_parts):
        batch.pop("reference", None)
        if not adapters:
            batch[_ADAPTERS] = np.zeros((), np.float32)
        sums = _whole(program.apply(state, batch))  # [batch_size, 2 P]
        for row in range(first, min(first + batch_size, len(rows))):
            members = rows.members(row)
            out[members] = sums[row - first, : 2 * len(members)].reshape(-1, 2)
        first += batch_size
    return out


def _whole(array: jax.Array) -> np.ndarray:
    """Return an array of all processes."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _check_adapters(model: Any) -> None:
    """Raise ValueError unless adapters are all that a model trains."""
    frozen = model.frozen if isinstance(model, LayeredModel) else None
    flags = jax.tree_util.tree_flatten_with_path(frozen)[0]
    trained = [path for path, is_frozen in flags if not is_frozen]
    others = [
        jax.tree_util.keystr(path)
        for path in trained
        if jax.tree_util.keystr(path[-1:], simple=True) not in _FACTORS
    ]
    if not trained or others:
        found = f"it trains {', '.join(others[:3])}" if others else "it has no adapters"
        raise ValueError(
            f"adapters=False needs a model that trains only adapters A B, but {found}: compute the "
            "reference from the state before the first step"
        )


def write_reference(path: str | os.PathLike[str], reference: np.ndarray, key: str) -> None:
    """Write log-probabilities into a file, which replaces an earlier one at once.

    Args:
      path: path of the file.
      reference: f32[E, 2].
      key: text that says which model and which sequences they belong to.

    Raises:
      OSError: the file cannot be written.
    """
    path = os.fspath(path)
    new = f"{path}.{os.getpid()}.new"
    try:
        with open(new, "wb") as file:
            np.savez(
                file,
                reference=np.asarray(reference, np.float32),
                key=np.asarray(key),
                version=np.asarray(_VERSION),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        if os.path.exists(new):
            os.remove(new)
        raise


def read_reference(path: str | os.PathLike[str], key: str) -> np.ndarray | None:
    """Return the log-probabilities in a file, f32[E, 2]; None if there is no such file.

    Args:
      path: path of the file.
      key: text that was given to `write_reference`.

    Raises:
      ValueError: the file belongs to another model or to other sequences, or cannot be read.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            version = int(file["version"])
            found = str(file["key"])
            reference = np.asarray(file["reference"], np.float32)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: not a file of reference log-probabilities: {error}; delete it, and it is "
            "computed again"
        ) from error
    if version != _VERSION or found != key:
        raise ValueError(
            f"{path} holds the log-probabilities of another model, or of other sequences: delete "
            "it, and it is computed again, or name another file"
        )
    return reference
