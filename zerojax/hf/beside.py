"""The files next to a model's weights: found and checked before an export, and copied after it.

    file                                copied
    link to a file                      copied if it leads to a file of the folder; in a snapshot of
                                        the hub's cache (models--org--name/snapshots/REVISION), also
                                        if it leads to models--org--name/blobs
    folder                              copied recursively, or left out if it has weights
    hidden, weights, an adapter         left out
    anything else                       an error

A downloaded folder may hold any link, for example to a key in the home directory, which an export
must not publish. An export takes long, so everything that would make it fail is found before it
begins.
"""

import dataclasses
import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence

from host_offload.disk import NotRegularError, ReadFile, open_regular
from zerojax.checkpoint import explaining
from zerojax.hf.config import CONFIG, read_config
from zerojax.hf.quantized.folder import QUANTIZATION, is_decoded

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
GENERATION = "generation_config.json"
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
_OF_CHECKPOINTS = ("manifest.0.json", "_METADATA", ".zarray", "zarr.json", "manifest.ocdbt")
"""Files that identify zerojax checkpoints, Orbax checkpoints and zarr arrays.

Their other files have no distinctive suffix.
"""
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MOST_JSON = 1 << 26


@dataclasses.dataclass(frozen=True)
class FileBeside:
    """A file to copy.

    Attributes:
      source: path of the file, with links resolved.
      name: path relative to the folder.
    """

    source: str
    name: str


def files_beside(folder: str | os.PathLike[str]) -> list[FileBeside]:
    """Return the files that an export copies from a model's folder.

    Raises:
      ValueError: a link leads out of the folder or is broken, or an entry is neither a file nor a
        folder, or cannot be read.
    """
    return _Finder(os.fspath(folder)).files


class _Finder:
    """Walks a folder and checks each entry.

    Attributes:
      files: files to copy, in order.
    """

    def __init__(self, folder: str) -> None:
        """Walk `folder`."""
        self.files: list[FileBeside] = []
        self._folder = folder
        self._root = os.path.realpath(folder)
        self._blobs = _find_blobs(self._root)
        with explaining(f"reading {folder}"):
            self._walk(self._root, "")

    def _walk(self, path: str, name: str) -> None:
        """Add the files of a folder, recursively."""
        for entry in sorted(os.listdir(path)):
            is_weights = not name and (entry.endswith(_WEIGHTS) or entry in ADAPTER_FILES)
            if not entry.startswith(".") and not is_weights:
                self._add(os.path.join(path, entry), os.path.join(name, entry))

    def _add(self, path: str, name: str) -> None:
        source = self._resolved(path, name)
        mode = os.stat(source).st_mode
        if stat.S_ISREG(mode):
            self._check_readable(source, name)
            self.files.append(FileBeside(source, name))
        elif stat.S_ISDIR(mode):
            # Links to folders could form cycles, or reach one folder by 2^n paths.
            if source != path:
                raise self._error(name, f"is a link to {source}, which is a folder")
            if not _holds_weights(source):
                self._walk(source, name)
        else:
            kind = next((kind for check, kind in _KINDS if check(mode)), "something else")
            raise self._error(name, f"is {kind}, not a regular file")

    def _resolved(self, path: str, name: str) -> str:
        """Return the path of an entry with links resolved, if the link may be followed."""
        if not os.path.islink(path):
            return path
        target = os.readlink(path)
        try:
            source = os.path.realpath(path, strict=True)
        except FileNotFoundError:
            raise self._error(name, f"is a link to {target}, which does not exist") from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._error(name, "is a link that leads to itself") from None
        is_inside = os.path.commonpath([source, self._root]) == self._root
        if not is_inside and os.path.dirname(source) != self._blobs:
            raise self._error(name, f"is a link to {source}, outside of the folder")
        return source

    def _check_readable(self, source: str, name: str) -> None:
        try:
            os.close(open_regular(source, os.O_RDONLY))
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror or error})") from error

    def _error(self, name: str, fault: str) -> ValueError:
        return ValueError(
            f"{os.path.join(self._folder, name)} {fault}: an export copies all files next to the "
            "weights. Remove it, or replace it with the file itself"
        )


def _find_blobs(root: str) -> str | None:
    """Return the blobs folder of the hub's cache if `root` is a snapshot in it, else None."""
    snapshots = os.path.dirname(root)
    model = os.path.dirname(snapshots)
    is_cached = os.path.basename(snapshots) == "snapshots" and os.path.basename(model).startswith(
        "models--"
    )
    return os.path.join(model, "blobs") if is_cached else None


def _holds_weights(folder: str) -> bool:
    """Return whether a folder or any of its subfolders has weights in any format."""
    names = (name for _, _, files in os.walk(folder) for name in files)
    return any(name.endswith(_WEIGHTS) or name in _OF_CHECKPOINTS for name in names)


def copy_beside(
    files: Sequence[FileBeside], folder: str | os.PathLike[str], *, dtype: str | None = None
) -> None:
    """Copy files into a folder.

    Args:
      files: files to copy, as `files_beside` returns them.
      folder: path of the destination folder.
      dtype: dtype of the exported weights, written into `config.json`; None: `config.json` is
        copied unchanged, without the description of quantized weights if these were decoded.

    Raises:
      OSError: a file cannot be read or written.
    """
    for file in files:
        target = os.path.join(folder, file.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # A checked file may have been replaced by a link since.
        with (
            os.fdopen(open_regular(file.source, os.O_RDONLY), "rb") as source,
            open(target, "xb") as out,
        ):
            shutil.copyfileobj(source, out)
    config = read_config(folder)
    if dtype is not None or is_decoded(config):
        if is_decoded(config):
            del config[QUANTIZATION]
        # transformers reads `dtype`; versions before 4.56 read `torch_dtype`.
        keys = [key for key in ("torch_dtype", "dtype") if key in config]
        if dtype is not None:
            config |= dict.fromkeys(keys or ["dtype"], dtype)
        with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as out:
            json.dump(config, out, indent=2)


def end_tokens(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the tokens that end an answer, from `generation_config.json`; empty without the file.

    Negative numbers, such as the -1 of some folders, are skipped.

    Args:
      folder: path of a model's folder.

    Raises:
      ValueError: the file is not a JSON object, or its `eos_token_id` is not a token id, a list of
        token ids, or null.
    """
    path = os.path.join(os.path.expanduser(os.fspath(folder)), GENERATION)
    if not os.path.lexists(path):
        return ()
    try:
        config = json.loads(ReadFile(path).read_all(_MOST_JSON))
    except RecursionError:
        raise ValueError(f"{path} is not JSON: it is nested too deeply") from None
    except (OSError, NotRegularError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, but a JSON object is needed")
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    tokens = eos if isinstance(eos, list) else [eos]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise ValueError(
            f"{path}: eos_token_id is {eos!r}: a token id, a list of token ids, or null is needed"
        )
    return tuple(token for token in tokens if token >= 0)
