"""Errors of the disk: what failed, for which file and layer, and how to fix it.

An error of the nvme tier occurs in a callback or an I/O thread, and is raised later elsewhere. By
then only its message is left, so the message states the operation, the file, the layer, the errno
and the remedy.
"""

import errno as errnos
import os
import re

TRUNCATED = "truncated"
CHECKSUM = "checksum"
NOT_REGULAR = "not regular"
STATE_LOST = "the state on the disk is lost: restore a checkpoint, or make a state with init"
_LACKS = (
    "that file system does not support this call: set swap_dir to a folder of a local disk "
    "(ext4, xfs)"
)
_REMEDIES: dict[int | str, str] = {
    errnos.ENOSPC: "free space, or files if it has no inodes left (df -i), on that file system, or "
    "set swap_dir to a folder of a larger disk",
    errnos.EDQUOT: "the user's disk quota is used up: free space, raise the quota, or set swap_dir "
    "to another file system",
    errnos.EFBIG: "the file is larger than this process or file system allows: raise RLIMIT_FSIZE "
    "(ulimit -f)",
    errnos.EIO: "the disk failed (see dmesg and smartctl): set swap_dir to another disk",
    errnos.ENOENT: "something removed it while it was in use: keep cleaners (tmpwatch, "
    "systemd-tmpfiles) off swap_dir",
    errnos.EROFS: "the file system is mounted read-only (a failing disk is remounted read-only, "
    "see dmesg): set another swap_dir",
    errnos.EACCES: "give this user the right to read, write and search that folder, or set "
    "swap_dir to a folder of this user",
    errnos.EPERM: "give this user the right to read, write and search that folder, or set "
    "swap_dir to a folder of this user",
    errnos.EMFILE: "this process has too many files open: raise the limit (ulimit -n), or find "
    "the code that leaks descriptors",
    errnos.ENFILE: "the machine has too many files open: raise fs.file-max",
    errnos.ESTALE: "the network file system lost the file: set swap_dir to a local disk",
    **dict.fromkeys((errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOLCK, errnos.EINVAL), _LACKS),
    TRUNCATED: "another program changed its size: keep other programs off swap_dir",
    CHECKSUM: "a bit flipped, or another program overwrote it: keep other programs off swap_dir "
    "and check the disk",
    NOT_REGULAR: "another program put it there: remove it, and keep other programs off swap_dir",
}


class SwapError(RuntimeError):
    """An operation of the nvme tier failed.

    Attributes:
      file: path of the file concerned, or None.
      layer: index of the layer whose record is concerned, or None.
      errno: error number of the operating system, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        layer: int | None = None,
        errno: int | None = None,
    ) -> None:
        """Create an error from its message and attributes."""
        super().__init__(message)
        self.file = file
        self.layer = layer
        self.errno = errno


class TruncatedError(OSError):
    """A file is shorter or longer than its record."""


class ChecksumError(OSError):
    """A record's bytes differ from the bytes that were written."""


class NotRegularError(OSError):
    """Something other than a regular file has a record's name."""


def of_tensorstore(error: Exception) -> Exception:
    """Return the OSError that a tensorstore error describes, or `error` itself if there is none.

    tensorstore raises NotImplementedError for ENOSYS and ValueError for all other disk errors, and
    gives the errno only in the text.
    """
    text = str(error)
    if match := re.search(r"os_error_code='(\d+)'", text):
        return OSError(int(match.group(1)), text)
    if "Not enough data" in text or "End of data expected" in text:
        return TruncatedError(text.splitlines()[0])
    return OSError(errnos.ENOENT, text) if text.startswith("NOT_FOUND") else error


def explain(
    error: BaseException, *, doing: str, file: str | None = None, layer: int | None = None
) -> SwapError:
    """Return a SwapError that explains an error; the caller raises it or passes it on.

    Args:
      error: an OSError or any other exception; a SwapError is returned unchanged.
      doing: operation that failed, such as "reading params".
      file: path of the file concerned.
      layer: index of the layer whose record is concerned.
    """
    if isinstance(error, SwapError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    subject = doing
    if layer is not None:
        subject += f" of layer {layer}"
    if file is not None:
        subject += f", {file}"
    if isinstance(error, OSError) and number is not None:
        cause = f"{errnos.errorcode.get(number, 'errno')} ({number}), {os.strerror(number)}"
    else:
        cause = str(error) or type(error).__name__
        if not isinstance(error, OSError):
            cause = f"{type(error).__name__}: {cause}"
    message = f"{subject} failed: {cause}"
    if remedy := _remedy(error, number):
        message += f"; {remedy}"
    result = SwapError(message, file=file, layer=layer, errno=number)
    # Set by hand: the result is raised later, often in another thread, without `raise ... from`.
    result.__cause__ = error
    return result


def _remedy(error: BaseException, number: int | None) -> str | None:
    if isinstance(error, TruncatedError):
        return _REMEDIES[TRUNCATED]
    if isinstance(error, ChecksumError):
        return _REMEDIES[CHECKSUM]
    if isinstance(error, NotRegularError):
        return _REMEDIES[NOT_REGULAR]
    return None if number is None else _REMEDIES.get(number)
