"""The tokenizer of a folder, whose files are checked before transformers reads them.

transformers runs no code of the folder (`trust_remote_code=False`, so it does not ask, either) and
downloads nothing. The tokenizers library walks over all ids up to the largest one, so an id of a
damaged file could take hours.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zerojax.given import as_path

MOST_TOKENS = 2**24
"""Ids are below it; the largest vocabularies have 2**18 tokens."""


def load_tokenizer(
    folder: str | os.PathLike[str], *, chat_template: str | os.PathLike[str] | None = None
) -> Any:
    """Return the tokenizer of a folder, as `AutoTokenizer` of transformers loads it, from its files
    alone.

    Args:
      folder: holds tokenizer.json, as `save_pretrained` of transformers writes it; `~` is the
        user's home.
      chat_template: file of a Jinja template, used in place of the folder's; None: the folder's.

    Raises:
      ValueError: the files of the tokenizer, or that of the template, cannot be read.
    """
    path = _folder(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            "a tokenizer of transformers needs it: pip install 'zerojax[hf]'"
        ) from error
    _check(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # each damaged file fails in its own way, in tokenizers with an Exception
        hint = ""
        if "trust_remote_code" in str(error):
            hint = (
                "it needs code of its own, which is not run: take a folder with a tokenizer.json. "
            )
        elif not (path / "tokenizer.json").exists():
            hint = "it holds no tokenizer.json. "
        raise ValueError(
            f"{path}: its tokenizer cannot be read: {hint}{type(error).__name__}: {error}"
        ) from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(
            f"{path / 'tokenizer_config.json'}: model_max_length is {longest!a}: a number is needed, or null"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(path: str | os.PathLike[str]) -> str:
    """Return the chat template that a file holds.

    Raises:
      ValueError: it is no file, or holds no text.
    """
    given = f"chat_template={path!r}"
    found = as_path(path)
    if not found:
        raise ValueError(f"{given}: the path of a file is needed")
    file = pathlib.Path(found)
    if not file.is_file():
        raise ValueError(f"{given}: {_kind(file)}; a file with a Jinja template is needed")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{given}: it cannot be read as text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{given}: the file is empty")
    return text


def _kind(path: pathlib.Path) -> str:
    """Return what a path that is no file leads to, for an error."""
    if path.is_dir():
        return "it is a folder"
    return "it is a pipe or a device" if path.exists() else "no such file"


def _folder(folder: object) -> pathlib.Path:
    """Return the path of a folder.

    Raises:
      ValueError: it is no path, or no folder is there.
    """
    found = as_path(folder)
    if not found:
        raise ValueError(f"folder={folder!r}: the path of a folder is needed")
    path = pathlib.Path(found)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(
            f"folder={str(folder)!r} is no folder: give the one that holds tokenizer.json"
        )
    name = str(folder)
    repo = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else "OWNER/NAME"
    raise ValueError(
        f"folder={name!r}: no such folder; one that holds tokenizer.json is needed, because nothing is downloaded here. To "
        f"use a model of the Hugging Face Hub, download it first: hf download {repo} --local-dir FOLDER"
    )


def _check(folder: pathlib.Path) -> None:
    """Raise ValueError for a tokenizer.json that tokenizers would fail on, or work on without end."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return  # transformers makes one of other files, or says what is missing
    if not path.is_file():
        raise ValueError(f"{path}: a file is needed")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ValueError(f"{path}: it holds no tokenizer: an object with the key 'model' is needed")
    # An added token may replace one of the vocabulary, and then has its id.
    for ids in (_vocabulary(tree["model"]), _added(tree)):
        _check_ids(path, ids)


def _check_ids(path: pathlib.Path, ids: Iterable[tuple[object, object]]) -> None:
    """Raise ValueError for (token, id) whose id is out of range, or is also that of another token."""
    seen: dict[int, object] = {}
    for token, number in ids:
        if not isinstance(number, int) or not 0 <= number < MOST_TOKENS:
            raise ValueError(
                f"{path}: the id of the token {token!a} is {number!r}: a number from 0 to {MOST_TOKENS - 1} is needed"
            )
        other = seen.setdefault(number, token)
        if other != token:
            raise ValueError(
                f"{path}: the tokens {other!a} and {token!a} have the same id, {number}: the file is damaged"
            )


def _vocabulary(model: dict[str, Any]) -> Iterable[tuple[object, object]]:
    """Return (token, id) of a vocabulary; models that number tokens by their order have no ids."""
    vocab = model.get("vocab")
    return vocab.items() if isinstance(vocab, dict) else ()


def _added(tree: dict[str, Any]) -> Iterator[tuple[object, object]]:
    """Yield (token, id) of the tokens that were added to a vocabulary."""
    added = tree.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            yield entry.get("content"), entry.get("id")
