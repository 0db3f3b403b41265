"""The tokenizer of a folder, whose files are checked before transformers reads them.

transformers runs no code of the folder (`trust_remote_code=False`, so it does not ask, either) and downloads nothing. The
tokenizers library walks over all ids up to the largest one, so an id of a damaged file could take hours.
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

MOST_TOKENS = 2**24
"""Ids are below it; the largest vocabularies have 2**18 tokens."""


def load_tokenizer(folder: str | os.PathLike[str], *, chat_template: str | os.PathLike[str] | None = None) -> Any:
    """Return the tokenizer of a folder, as `AutoTokenizer` of transformers loads it, from its files alone.

    Args:
      folder: holds tokenizer.json, as `save_pretrained` of transformers writes it.
      chat_template: file of a Jinja template, used in place of the folder's; None: the folder's.

    Raises:
      ValueError: the files of the tokenizer, or that of the template, cannot be read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError("a tokenizer of transformers needs it: pip install 'zerojax[hf]'") from error
    path = pathlib.Path(folder)
    _check(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each damaged file fails in its own way, in tokenizers with an Exception
        hint = ""
        if "trust_remote_code" in str(error):
            hint = "it needs code of its own, which is not run: take a folder with a tokenizer.json. "
        raise ValueError(f"{path}: its tokenizer cannot be read: {hint}{type(error).__name__}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(path: str | os.PathLike[str]) -> str:
    """Return the chat template that a file holds.

    Raises:
      ValueError: it is no file, or holds no text.
    """
    if not os.path.isfile(path):
        raise ValueError(f"chat_template={os.fspath(path)!r}: no such file; a file with a Jinja template is needed")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={os.fspath(path)!r}: it cannot be read as text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"chat_template={os.fspath(path)!r}: the file is empty")
    return text


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
    for token, number in _ids(tree):
        if not isinstance(number, int) or not 0 <= number < MOST_TOKENS:
            raise ValueError(
                f"{path}: the id of the token {token!a} is {number!r}: a number from 0 to {MOST_TOKENS - 1} is needed"
            )


def _ids(tree: dict[str, Any]) -> Iterator[tuple[object, object]]:
    """Yield (token, id) of a vocabulary; models that number tokens by their order have no ids."""
    vocab, added = tree["model"].get("vocab"), tree.get("added_tokens")
    if isinstance(vocab, dict):
        yield from vocab.items()
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            yield entry.get("content"), entry.get("id")
