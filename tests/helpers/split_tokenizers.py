"""Byte-level BPE tokenizers that split texts as those of Llama 3 and Qwen 2 do."""

import pathlib
from typing import Any

from chat_tokenizers import PLAIN
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from zerojax.hf.gguf_files.tokenizer import SPLITS

TEXT = "It's 1234 and 5678: the quick brown fox jumps over the lazy dog.\n\n  We're here, ÄÖ!"


def split_tokenizer(name: str, has_bos: bool = False) -> Any:
    """Return a tokenizer with a template; `name` is llama.cpp's for how it splits texts."""
    ((expression, ignores_merges),) = (key for key, value in SPLITS.items() if value == name)
    inner = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT] * 4,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet),
    )
    if has_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", inner.token_to_id("<|bos|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|bos|>" if has_bos else None,
        eos_token="<|im_end|>",
        additional_special_tokens=special[:1],
    )
    tokenizer.chat_template = PLAIN
    return tokenizer


def save(tokenizer: Any, folder: pathlib.Path) -> None:
    """Save a tokenizer next to a model."""
    tokenizer.save_pretrained(folder)
