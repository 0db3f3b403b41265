"""Inputs of finetune.py in tests: a tiny model, its tokenizer, and conversations."""

import pathlib

import numpy as np
from chat_tokenizers import byte_tokenizer, conversation, write
from hf_models import write as write_model


def write_inputs(folder: pathlib.Path) -> list[str]:
    """Write a tiny model, its tokenizer, and 200 conversations; returns command-line options."""
    write_model("llama", folder / "model", vocab_size=259)
    byte_tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 50, (200, 2)).tolist()
    chats = [conversation(f"{a} + {b} = ?", f"It is {a + b}.") for a, b in pairs]
    data = write(folder / "chats.jsonl", chats)
    return ["--model", str(folder / "model"), "--data", str(data)]
