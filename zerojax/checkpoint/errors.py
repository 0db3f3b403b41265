"""Errors of checkpoints: each says what failed and, for a known error number, how to fix it.

A state of another optimizer is described in words rather than by names of leaves:

    opt_state[0].mu['w'], opt_state[0].nu['w'], opt_state[0].count
      ->  Adam's moments (count, mu, nu) at opt_state[0]
    opt_state[2].count
      ->  a count of steps, as a schedule keeps
"""

import contextlib
import errno as errnos
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from host_offload.disk import ChecksumError, NotRegularError, SwapError, TruncatedError

_REMEDIES = {
    errnos.ENOSPC: "free space on that file system (or inodes, see df -i), "
    "or keep fewer checkpoints; the training state and older checkpoints are unchanged",
    errnos.EDQUOT: "the user's disk quota is used up: free space, or raise the quota; "
    "older checkpoints are unchanged",
    errnos.EROFS: "the file system is mounted read-only: use another directory",
    errnos.EACCES: "give this user permission to read, write and search that folder, "
    "or use another directory",
    errnos.EPERM: "give this user permission to read, write and search that folder, "
    "or use another directory",
    errnos.EIO: "the disk failed (see dmesg and smartctl)",
    errnos.ENOENT: "it does not exist: something removed it, or the path is wrong",
    errnos.EMFILE: "this process has too many files open: raise the limit (ulimit -n), "
    "or find the leak of descriptors",
    errnos.ENFILE: "the machine has too many files open: raise fs.file-max",
    errnos.ENOMEM: "the machine has no memory left: free some, and try again",
    errnos.ESTALE: "the network file system lost the file: remount it, and try again",
}
_EUCLEAN = getattr(errnos, "EUCLEAN", errnos.EIO)  # Linux only
_DAMAGE = {errnos.ENOENT, errnos.ENOTDIR, errnos.EISDIR, errnos.EIO, errnos.EBADMSG, _EUCLEAN}
"""Error numbers that mean a missing file or lost bytes.

EBADMSG and EUCLEAN: a file system found that its own checksum or structure is wrong.
"""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, or does not fit the program.

    Attributes:
      errno: error number from the operating system, or None.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        """Use a message, and the operating system's error number if there is one."""
        super().__init__(message)
        self.errno = errno


class DamagedError(CheckpointError):
    """A checkpoint is damaged: a file is missing, or its size or checksum is not the saved one."""


class IteratorError(CheckpointError):
    """A checkpoint holds no position for the iterators of these processes.

    Attributes:
      errno: None, because no operation of the operating system failed.
    """


def explained(error: BaseException, action: str) -> CheckpointError:
    """Return the CheckpointError to raise for an error that made an action fail.

    A CheckpointError is returned unchanged.

    Args:
      error: the error.
      action: the failed action, such as "reading FILE".
    """
    if isinstance(error, CheckpointError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    cause = str(error) or type(error).__name__
    if number is not None:
        file = f", {error.filename}" if isinstance(error, OSError) and error.filename else ""
        # Its own text says more than the number's, for example at which byte a file cannot be read.
        text = (isinstance(error, OSError) and error.strerror) or os.strerror(number)
        cause = f"{errnos.errorcode.get(number, 'errno')} ({number}), {text}{file}"
    remedy = None if number is None else _REMEDIES.get(number)
    return CheckpointError(
        f"{action} failed: {cause}{f'; {remedy}' if remedy else ''}", errno=number
    )


def unreadable(error: OSError, action: str, damage: str) -> CheckpointError:
    """Return the error to raise if a checkpoint cannot be read.

    Args:
      error: error of the file system, or the fault found in a record.
      action: the failed action, such as "reading FILE".
      damage: message that says what is damaged, and how.

    Returns:
      DamagedError if the bytes are lost. Another CheckpointError if they may be intact and only
        cannot be read now, for lack of memory or permission: that is no reason to use an older
        checkpoint.
    """
    if (
        isinstance(error, ChecksumError | NotRegularError | TruncatedError)
        or error.errno in _DAMAGE
    ):
        return DamagedError(damage, errno=error.errno)
    return explained(error, action)


@contextlib.contextmanager
def explaining(action: str, root: str | None = None) -> Iterator[None]:
    """Raise file system errors as CheckpointErrors with their remedies; other errors pass through.

    Args:
      action: the action in progress, such as "writing FILE".
      root: folder that is written, or None. A SwapError about a file in it becomes a
        CheckpointError too: the swap folder's code also writes a checkpoint's records, and its
        error would send the user to the swap folder.
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
        # Its text and remedy are about the swap folder, so only its number and file are used.
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
"""Fields that identify optax's states.

The first field in a name that holds no nested state ends the transformation's name.
"""
_NESTING = {"inner_state", "inner_states"}
_KNOWN = "|".join(sorted((name for name in _FIELDS if name not in _NESTING), key=len, reverse=True))
_FIELD = re.compile(rf"\.({_KNOWN})(?=[.\[]|$)")
_STATE = "opt_state"


def optimizer_difference(
    program_leaves: Iterable[str], saved: Iterable[str], step_folder: str
) -> str:
    """Return how a checkpoint's optimizer state differs, and how to continue from its weights.

    Args:
      program_leaves: names of the leaves of the program's state.
      saved: names of the leaves in the checkpoint.
      step_folder: folder of the step.

    Returns:
      Sentences to append to an error, or "" if both optimizers have the same state.
    """
    ours = _transformations(program_leaves)
    theirs = _transformations(saved)
    names = sorted(ours.keys() | theirs.keys())
    differences = [_compared(name, ours.get(name), theirs.get(name)) for name in names]
    differences = [difference for difference in differences if difference]
    if not differences:
        return ""
    return (
        f". The optimizer's state: {'; '.join(differences)}. Restore it with the optimizer "
        "that it was saved with; or import only its weights, for a fresh optimizer state: "
        f"zerojax.import_params(program, {step_folder!r}, key=key)"
    )


def _transformations(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the fields of each transformation's state, by the transformation's name."""
    fields_by_owner: dict[str, set[str]] = {}
    for name in names:
        if not name.startswith(_STATE):
            continue
        match = _FIELD.search(name)
        owner = name[: match.start()] if match else name
        field = match[1] if match else ""
        fields_by_owner.setdefault(owner, set()).add(field)
    return {owner: frozenset(fields) for owner, fields in fields_by_owner.items()}


def _compared(name: str, program: frozenset[str] | None, saved: frozenset[str] | None) -> str:
    """Return how one transformation's state differs, or ""."""
    if program == saved:
        return ""
    if saved is None:
        assert program is not None
        return f"this program has {_described(program)} at {name}, and the checkpoint has none"
    if program is None:
        return f"the checkpoint has {_described(saved)} at {name}, and this program has none"
    return (
        f"at {name} this program has {_described(program)}, and the checkpoint has "
        f"{_described(saved)}"
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
    """Return a description of a transformation's state, from its fields."""
    if fields == {"count"}:
        return "a count of steps, as a schedule keeps,"
    listed = ", ".join(sorted(field for field in fields if field))
    kind = _KINDS.get(fields - {"count"}, "state")
    return f"{kind} ({listed})" if listed else kind
