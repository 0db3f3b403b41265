"""A folder's tokenizer in the terms of GGUF.

llama.cpp does not read the regular expression by which a tokenizer splits a text. It knows some by
name, and with another one it would split texts differently without saying so. So the expression in
tokenizer.json must be one of those in `SPLITS`.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from host_offload.fields import parse_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[tuple[str, bool], str] = {
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}|{_REST}", False): "qwen2",
}
"""llama.cpp's name for an expression, and for whether whole words skip merges (`ignore_merges`)."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in GGUF."""
ADVICE = "export the folder, and convert it with llama.cpp's own script"


@dataclasses.dataclass(frozen=True)
class GGUFTokens:
    """The tokens of a tokenizer.

    Attributes:
      split: llama.cpp's name for how texts are split.
      tokens: text of each token.
      types: type of each token.
    """

    split: str
    tokens: list[str]
    types: list[int]


def read_tokens(folder: str, vocab: int) -> GGUFTokens:
    """Return the tokens of a folder's tokenizer.json.

    Args:
      folder: path of the folder.
      vocab: number of tokens of the model; those that the tokenizer lacks are written as unused.

    Raises:
      ValueError: the tokenizer cannot be read, or llama.cpp would read it differently.
    """
    path = os.path.join(folder, "tokenizer.json")
    try:
        with open(path, encoding="utf-8") as file:
            tokenizer = parse_json(file.read())
        split = _split(tokenizer, path)
        ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
        added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
        ids |= {text: token["id"] for text, token in added.items()}
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}. For GGUF, {ADVICE}") from error
    if max(ids.values()) >= vocab:
        raise ValueError(
            f"{path} has the token {max(ids.values())}, but the model has {vocab} tokens, "
            "numbered from 0"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab)]
    types = [UNUSED] * vocab
    for text, i in ids.items():
        tokens[i] = text
        types[i] = NORMAL
        if text in added:
            types[i] = CONTROL if added[text].get("special") else USER_DEFINED
    return GGUFTokens(split, tokens, types)


def _split(tokenizer: Mapping[str, Any], path: str) -> str:
    """Return llama.cpp's name for how a tokenizer splits texts.

    Raises:
      ValueError: it has none that is known here.
    """
    model = tokenizer["model"]
    pre = tokenizer.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers") or [pre]
    expressions = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    is_byte_level = any(
        part.get("type") == "ByteLevel" and not part.get("use_regex", True) for part in parts
    )
    if model.get("type") == "BPE" and is_byte_level and len(expressions) == 1:
        name = SPLITS.get((expressions[0], bool(model.get("ignore_merges"))))
        if name is not None:
            return name
    raise ValueError(
        f"{path}: this tokenizer ({model.get('type')}, {expressions or 'no expression'}) is none "
        f"of those that are written to GGUF, {' and '.join(SPLITS.values())}: {ADVICE}"
    )
