"""Load the tokenizer of a folder, after checking its files.

transformers runs no code from the folder (`trust_remote_code=False`, which also prevents a prompt)
and downloads nothing. The tokenizers library iterates over all ids up to the largest one, so a
wrong id in a damaged file could take hours.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zerojax.user_values import as_path

MOST_TOKENS = 2**24
"""Exclusive upper bound of token ids; the largest vocabularies have 2**18 tokens."""


def load_tokenizer(
    folder: str | os.PathLike[str], *, chat_template: str | os.PathLike[str] | None = None
) -> Any:
    """Return the tokenizer of a folder, loaded by transformers from local files only.

    Args:
      folder: path of a folder that holds tokenizer.json, as `save_pretrained` of transformers
        writes it; `~` is expanded to the user's home.
      chat_template: path of a Jinja template that replaces the folder's chat template; None: the
        folder's.

    Returns:
      The tokenizer that `AutoTokenizer` of transformers loads.

    Raises:
      ValueError: the files of the tokenizer or of the template cannot be read.
    """
    path = _folder(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            "loading a tokenizer needs transformers: pip install 'zerojax[hf]'"
        ) from error
    _check(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # the type depends on which file is damaged; tokenizers raises plain Exception
        hint = ""
        if "trust_remote_code" in str(error):
            hint = (
                "it needs code of its own, which is not run: use a folder with a tokenizer.json. "
            )
        elif not (path / "tokenizer.json").exists():
            hint = "it holds no tokenizer.json. "
        raise ValueError(
            f"{path}: its tokenizer cannot be read: {hint}{type(error).__name__}: {error}"
        ) from error
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(
            f"{path / 'tokenizer_config.json'}: model_max_length is {longest!a}: a number or null "
            "is needed"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(path: str | os.PathLike[str]) -> str:
    """Return the chat template that a file holds.

    Args:
      path: path of a file with a Jinja template, in UTF-8.

    Raises:
      ValueError: `path` is not a file, or the file holds no text.
    """
    setting = f"chat_template={path!r}"
    path_text = as_path(path)
    if not path_text:
        raise ValueError(f"{setting}: the path of a file is needed")
    file = pathlib.Path(path_text)
    if not file.is_file():
        raise ValueError(f"{setting}: {_kind(file)}; a file with a Jinja template is needed")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: it cannot be read as text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{setting}: the file is empty")
    return text


def _kind(path: pathlib.Path) -> str:
    """Describe a path that is not a regular file, for an error message."""
    if path.is_dir():
        return "it is a folder"
    return "it is a pipe or a device" if path.exists() else "no such file"


def _folder(folder: object) -> pathlib.Path:
    """Return the path of an existing folder.

    Raises:
      ValueError: `folder` is not a path, or no such folder exists.
    """
    path_text = as_path(folder)
    if not path_text:
        raise ValueError(f"folder={folder!r}: the path of a folder is needed")
    path = pathlib.Path(path_text)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(
            f"folder={str(folder)!r} is not a folder: give the one that holds tokenizer.json"
        )
    name = str(folder)
    repo = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else "OWNER/NAME"
    raise ValueError(
        f"folder={name!r}: no such folder; one that holds tokenizer.json is needed, because "
        "nothing is downloaded here. To use a model of the Hugging Face Hub, download it first: hf "
        f"download {repo} --local-dir FOLDER"
    )


def _check(folder: pathlib.Path) -> None:
    """Raise ValueError for a tokenizer.json on which tokenizers would fail or not terminate."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return  # transformers builds one from other files, or reports what is missing
    if not path.is_file():
        raise ValueError(f"{path}: a file is needed")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise ValueError(f"{path}: it holds no tokenizer: an object with the key 'model' is needed")
    # An added token may replace a token of the vocabulary, and then has the same id.
    for ids in (_vocabulary(tree["model"]), _added(tree)):
        _check_ids(path, ids)


def _check_ids(path: pathlib.Path, ids: Iterable[tuple[object, object]]) -> None:
    """Raise ValueError if an id is out of range, or if two different tokens share it."""
    token_of_id: dict[int, object] = {}
    for token, number in ids:
        if not isinstance(number, int) or not 0 <= number < MOST_TOKENS:
            raise ValueError(
                f"{path}: the id of the token {token!a} is {number!r}: a number from 0 to "
                f"{MOST_TOKENS - 1} is needed"
            )
        first_token = token_of_id.setdefault(number, token)
        if first_token != token:
            raise ValueError(
                f"{path}: the tokens {first_token!a} and {token!a} have the same id, {number}: the "
                "file is damaged"
            )


def _vocabulary(model: dict[str, Any]) -> Iterable[tuple[object, object]]:
    """Return (token, id) pairs of a vocabulary; empty for models that number tokens by order."""
    vocab = model.get("vocab")
    return vocab.items() if isinstance(vocab, dict) else ()


def _added(tree: dict[str, Any]) -> Iterator[tuple[object, object]]:
    """Yield (token, id) of each token that was added to the vocabulary."""
    added = tree.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            yield entry.get("content"), entry.get("id")
