"""A task whose answers a rule judges: repeat a word, in small or in capital letters.

    text        docstrings of Python's standard library, which the model is trained on from scratch
    sft         "repeat carbon:" -> " carbon" or " CARBON", each for half of the words
    dpo         capital letters are chosen, small ones rejected, for the same words
    judge       held-out words: repeated correctly, and in capital letters

All words have as many letters, so all examples have as many tokens and each batch holds the same
number of them, packed or not.
"""

import ast
import collections
import dataclasses
import json
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

LETTERS = 6
"""Number of letters of a word."""
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
"""Sizes of the model, which has 0.9 million parameters."""


@dataclasses.dataclass(frozen=True)
class Words:
    """Words to train on, and held-out words."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Score:
    """Fractions of the held-out words.

    Attributes:
      correct: repeated correctly, in either style.
      capitals: repeated correctly in capital letters.
    """

    correct: float
    capitals: float


def read_sources() -> list[str]:
    """Return the modules of Python's standard library, in the order of their names."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.py"))]


def find_docstrings(sources: Iterable[str]) -> list[str]:
    """Return the docstrings of modules, in their order."""
    found = []
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text is not None and text.isascii():
                    found.append(text)
    return found


def choose_words(texts: Iterable[str], num_train: int, num_held_out: int) -> Words:
    """Return the most frequent words of LETTERS letters, in an order that a seed draws.

    Raises:
      ValueError: the texts have fewer words.
    """
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(re.findall(rf"\b[a-z]{{{LETTERS}}}\b", text))
    frequent = [word for word, _ in counts.most_common(num_train + num_held_out)]
    if len(frequent) < num_train + num_held_out:
        raise ValueError(f"{num_train + num_held_out} words are needed, got {len(frequent)}")
    order = np.random.default_rng(0).permutation(len(frequent))
    words = [frequent[i] for i in order]
    return Words(tuple(words[:num_train]), tuple(words[num_train:]))


def prompt_of(word: str) -> str:
    """Return the prompt for a word."""
    return f"repeat {word}:"


def answer_of(word: str, capitals: bool) -> str:
    """Return the correct answer in a style."""
    return f" {word.upper() if capitals else word}"


def write_lines(path: pathlib.Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_data(folder: pathlib.Path, texts: Sequence[str], words: Words) -> None:
    """Write `texts.jsonl`, `sft.jsonl` and `dpo.jsonl` into a folder."""
    write_lines(folder / "texts.jsonl", ({"text": text} for text in texts))
    for method in ("sft", "dpo"):
        lines = [record(method, word, i % 2 == 0) for i, word in enumerate(words.train)]
        write_lines(folder / f"{method}.jsonl", lines)


def record(method: str, word: str, capitals: bool) -> dict[str, str]:
    """Return the example of a word: a completion in a style, or a pair that prefers capitals."""
    if method == "sft":
        return {"prompt": prompt_of(word), "completion": answer_of(word, capitals)}
    return {
        "prompt": prompt_of(word),
        "chosen": answer_of(word, capitals=True),
        "rejected": answer_of(word, capitals=False),
    }


def judge(words: Sequence[str], answers: Sequence[str]) -> Score:
    """Return which fractions of the answers follow the rule."""
    both = list(zip(words, answers, strict=True))
    correct = [answer in (answer_of(w, True), answer_of(w, False)) for w, answer in both]
    capitals = [answer == answer_of(word, True) for word, answer in both]
    return Score(float(np.mean(correct)), float(np.mean(capitals)))


def write_model(folder: pathlib.Path, sizes: dict[str, int]) -> None:
    """Write a Llama with random weights, and a tokenizer of bytes."""
    import torch
    import transformers

    alphabet_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    fields: dict[str, Any] = {"vocab_size": 260, "tie_word_embeddings": False, **sizes}
    config = transformers.LlamaConfig(eos_token_id=256, pad_token_id=257, **fields)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def alphabet_tokenizer() -> Any:
    """Return a tokenizer of the 256 bytes, the end of a text, and a token that fills rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")
