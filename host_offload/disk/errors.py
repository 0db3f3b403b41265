"""Errors of the disk: what failed, for which file and layer, and what to do about it.

An error of the nvme tier occurs in a callback or an I/O thread, and is raised elsewhere, later. By
then its message is all that is known, so it states the operation, the file, the layer, the errno of
the operating system and the repair.
"""

import errno as errnos
import os
import re

TRUNCATED = "truncated"
CHECKSUM = "checksum"
NOT_REGULAR = "not regular"
STATE_LOST = "the state on the disk is lost: make one by init"
_LACKS = "that file system does not offer this call: set swap_dir to a folder of a local disk (ext4, xfs)"
_REMEDIES: dict[int | str, str] = {
    errnos.ENOSPC: "free space, or files if it has none left (df -i), on that file system, or set swap_dir to a folder of a "
    "larger disk",
    errnos.EDQUOT: "the user's disk quota is used up: free space, raise the quota, or set swap_dir to another file system",
    errnos.EFBIG: "the file is larger than this process or file system allows: raise RLIMIT_FSIZE (ulimit -f)",
    errnos.EIO: "the disk failed (see dmesg and smartctl): set swap_dir to another disk",
    errnos.ENOENT: "something removed it in use: keep cleaners (tmpwatch, systemd-tmpfiles) off swap_dir",
    errnos.EROFS: "the file system is mounted read-only (a failing disk is remounted so, see dmesg): set another swap_dir",
    errnos.EACCES: "give this user the right to read, write and search that folder, or set swap_dir to one of its own",
    errnos.EPERM: "give this user the right to read, write and search that folder, or set swap_dir to one of its own",
    errnos.EMFILE: "this process has too many files open: raise the limit (ulimit -n), or look for what leaks descriptors",
    errnos.ENFILE: "the machine has too many files open: raise fs.file-max",
    errnos.ESTALE: "the network file system lost the file: set swap_dir to a local disk",
    **dict.fromkeys((errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOLCK, errnos.EINVAL), _LACKS),
    TRUNCATED: "something else changed its size: keep other programs off swap_dir",
    CHECKSUM: "bit flipped or overwritten by something else: keep other programs off swap_dir and check the disk",
    NOT_REGULAR: "something else put it there: remove it, and keep other programs off swap_dir",
}


class SwapError(RuntimeError):
    """An operation of the nvme tier failed.

    Attributes:
      file: path of the file, if it is about one.
      layer: index of the layer whose record it is, if any.
      errno: of the operating system, if it gave one.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        layer: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.file, self.layer, self.errno = file, layer, errno


class TruncatedError(OSError):
    """A file ends before its record does, or after it."""


class ChecksumError(OSError):
    """A record is not what was written."""


class NotRegularError(OSError):
    """Something else than a regular file has a record's name."""


def of_tensorstore(error: Exception) -> Exception:
    """Return the OSError that the text of tensorstore's error describes, or the error itself if
    there is none.

    It raises NotImplementedError for ENOSYS, and ValueError for all others.
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
    """Return the SwapError to raise, or to carry out of a thread, from an error.

    Args:
      error: an OSError, or any other exception; a SwapError is returned as it is.
      doing: the operation, such as "reading params".
      file: path of the file.
      layer: index of the layer whose record it is.
    """
    if isinstance(error, SwapError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    where = ("" if layer is None else f" of layer {layer}") + ("" if file is None else f", {file}")
    if isinstance(error, OSError) and number is not None:
        cause = f"{errnos.errorcode.get(number, 'errno')} ({number}), {os.strerror(number)}"
    else:
        cause = str(error) or type(error).__name__
        if not isinstance(error, OSError):
            cause = f"{type(error).__name__}: {cause}"
    remedy = _remedy(error, number)
    result = SwapError(
        f"{doing}{where} failed: {cause}{f'; {remedy}' if remedy else ''}",
        file=file,
        layer=layer,
        errno=number,
    )
    # By hand: the result is raised later, often in another thread, where no `raise ... from` can
    # add it.
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
