"""Errors of checkpoints: each says what failed and, where the operating system gave a known error
number, how to repair it.

The state of another optimizer is described in words instead of names of leaves:

    opt_state[0].mu['w'], opt_state[0].nu['w'], opt_state[0].count   ->   Adam's moments (count, mu, nu) at opt_state[0]
    opt_state[2].count                                               ->   a count of steps, as a schedule keeps
"""

import contextlib
import errno as errnos
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from host_offload.disk import ChecksumError, NotRegularError, SwapError, TruncatedError

_REMEDIES = {
    errnos.ENOSPC: "free space, or files if it has none left (df -i), on that file system, or keep fewer checkpoints; the "
    "training state and older checkpoints are as they were",
    errnos.EDQUOT: "the user's disk quota is used up: free space, or raise the quota; older checkpoints are as they were",
    errnos.EROFS: "the file system is mounted read-only: give another directory",
    errnos.EACCES: "give this user the right to read, write and search that folder, or give another directory",
    errnos.EPERM: "give this user the right to read, write and search that folder, or give another directory",
    errnos.EIO: "the disk failed (see dmesg and smartctl)",
    errnos.ENOENT: "it is not there: something removed it, or the path is wrong",
    errnos.EMFILE: "this process has too many files open: raise the limit (ulimit -n), or look for what leaks descriptors",
    errnos.ENFILE: "the machine has too many files open: raise fs.file-max",
    errnos.ENOMEM: "the machine has no memory left: free some, and try again",
    errnos.ESTALE: "the network file system lost the file: mount it anew, and try again",
}
_EUCLEAN = getattr(errnos, "EUCLEAN", errnos.EIO)  # of Linux alone
_DAMAGE = {errnos.ENOENT, errnos.ENOTDIR, errnos.EISDIR, errnos.EIO, errnos.EBADMSG, _EUCLEAN}
"""What the operating system says of a file that is not there, or whose bytes are lost. EBADMSG and
EUCLEAN: a file system found that its own checksum or structure is wrong."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be made, or is not what was saved.

    Attributes:
      errno: of the operating system, if it gave one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class DamagedError(CheckpointError):
    """A checkpoint is not whole: a file is missing, of another size, or does not have its checksum."""


class IteratorError(CheckpointError):
    """A checkpoint holds no position for the iterators of these processes."""


def explained(error: BaseException, action: str) -> CheckpointError:
    """Return the CheckpointError to raise for an error that made an action fail.

    A CheckpointError is returned as it is.
    """
    if isinstance(error, CheckpointError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    cause = str(error) or type(error).__name__
    if number is not None:
        where = f", {error.filename}" if isinstance(error, OSError) and error.filename else ""
        # Its own text tells more than the number's where a part of a file cannot be read: at which
        # byte.
        text = (isinstance(error, OSError) and error.strerror) or os.strerror(number)
        cause = f"{errnos.errorcode.get(number, 'errno')} ({number}), {text}{where}"
    remedy = None if number is None else _REMEDIES.get(number)
    return CheckpointError(
        f"{action} failed: {cause}{f'; {remedy}' if remedy else ''}", errno=number
    )


def unreadable(error: OSError, action: str, damage: str) -> CheckpointError:
    """Return the error to raise where a checkpoint cannot be read.

    Args:
      error: of the file system, or what was found instead of a record.
      action: what is under way.
      damage: says what is damaged, and how.

    Returns:
      DamagedError where the bytes are lost. Another CheckpointError where they may be there, and
      only cannot be read now, for
      want of memory or of a right: that is no reason to go back to an older checkpoint.
    """
    if (
        isinstance(error, ChecksumError | NotRegularError | TruncatedError)
        or error.errno in _DAMAGE
    ):
        return DamagedError(damage, errno=error.errno)
    return explained(error, action)


@contextlib.contextmanager
def explaining(action: str, root: str | None = None) -> Iterator[None]:
    """Raise the file system's errors as CheckpointErrors, with their remedies; all others pass.

    Args:
      action: what is under way.
      root: folder that is written. A SwapError about a file in it is raised as a CheckpointError
        too: a checkpoint's records are written by the swap folder's means, and without it the error
        would tell the user to look after the swap folder.
    """
    try:
        yield
    except OSError as error:
        raise explained(error, action) from error
    except SwapError as error:
        if (
            root is None
            or error.errno is None
            or error.file is None
            or not error.file.startswith(root)
        ):
            raise
        # Its text and remedy are about the swap folder, so a new error is made of its number and
        # file.
        cause = OSError(error.errno, os.strerror(error.errno), error.file)
        raise explained(cause, action) from error


# --- the state of another optimizer ---------------------------------------------------------------

_FIELDS = (
    "count",
    "mu",
    "nu",
    "nu_max",
    "trace",
    "ema",
    "ema_params",
    "hyperparams",
    "hyperparams_states",
    "v_row",
    "v_col",
    "v",
    "sum_of_squares",
    "mini_step",
    "gradient_step",
    "acc_grads",
    "inner_state",
    "inner_states",
    "z",
    "rng_key",
)
"""Fields by which optax's states are known.

The first in a name that holds no other state ends the transformation's name.
"""
_NESTING = {"inner_state", "inner_states"}
_KNOWN = "|".join(sorted((name for name in _FIELDS if name not in _NESTING), key=len, reverse=True))
_FIELD = re.compile(rf"\.({_KNOWN})(?=[.\[]|$)")
_STATE = "opt_state"


def optimizer_difference(here: Iterable[str], saved: Iterable[str], step_folder: str) -> str:
    """Return what to say where the optimizer's state of a checkpoint is another's, and how to go on
    from its weights.

    Args:
      here: names of the leaves of the program's state.
      saved: names of the leaves in the checkpoint.
      step_folder: of the checkpoint.

    Returns:
      Sentences to append to an error, or "" where both keep the same.
    """
    ours, theirs = _transformations(here), _transformations(saved)
    parts = [
        _compared(name, ours.get(name), theirs.get(name))
        for name in sorted(ours.keys() | theirs.keys())
    ]
    different = [part for part in parts if part]
    if not different:
        return ""
    return (
        f". The optimizer's state: {'; '.join(different)}. Restore it with the optimizer that it was "
        "saved with; or take its weights alone, for a fresh optimizer state: "
        f"zerojax.import_params(program, {step_folder!r}, key=key)"
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
    return (
        f"at {name} this program has {_described(here)}, and the checkpoint has {_described(saved)}"
    )


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
