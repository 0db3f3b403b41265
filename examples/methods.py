"""Methods of finetune.py that learn from preferences, with their options, data and losses.

    sft            the mean cross entropy of the tokens that count
    dpo            chosen and rejected answers, compared with the model before training
    orpo           chosen and rejected answers, without a reference
    kto            single answers with a label, or the answers of pairs one by one

The reference's log-probabilities are computed once, from the state before the first step, and kept
in a file beside the data: later runs and resumed runs read them. No second model is held.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from corpus import split_weights
from jax.experimental import multihost_utils

import zerojax as zj
from zerojax.data import PairRows, Preferences, pack_pairs, read_preferences
from zerojax.preferences import read_reference, reference_log_probs, write_reference
from zerojax.runtime import AllProcesses

Method = Literal["sft", "dpo", "orpo", "kto"]
OF_TEXTS = ("form", "each_answer")
"""Options of data that only next tokens are learned from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of the methods.

    Attributes:
      method: what is learned: next tokens (sft), chosen rather than rejected answers (dpo, orpo),
        or desirable answers (kto).
      dpo_kind: loss of dpo: sigmoid, ipo or simpo; simpo needs no reference.
      beta: factor of the rewards, or for orpo the weight of the odds. By default 0.1, and 2 for
        simpo.
      gamma: margin of simpo.
      desirable_weight: weight of desirable answers in kto.
      undesirable_weight: weight of undesirable answers in kto.
      reference: file of the reference's log-probabilities, which is written if it does not exist;
        by default next to the data.
    """

    method: Method = "sft"
    dpo_kind: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    beta: float | None = None
    gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: str | None = None


def check_method(options: Any) -> None:
    """Check the options of a method.

    Raises:
      ValueError: an option is out of range, or the method does not read it.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(MethodOptions)}
    read_by = {
        "dpo_kind": ("dpo",),
        "beta": ("dpo", "orpo", "kto"),
        "gamma": ("dpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "reference": ("dpo", "kto"),
    }
    for name, methods in read_by.items():
        if getattr(options, name) != defaults[name] and options.method not in methods:
            raise ValueError(
                f"--{name.replace('_', '-')} is for --method {' or '.join(methods)}, not for "
                f"--method {options.method}"
            )
    check_numbers(options)
    if options.gamma != defaults["gamma"] and options.dpo_kind != "simpo":
        raise ValueError("--gamma is for --dpo-kind simpo")
    if options.method == "sft":
        return
    for name in OF_TEXTS:
        if getattr(options, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for --method sft: the records of --method "
                f"{options.method} have one form (docs/preferences.md)"
            )
    if options.stream or len(options.data) > 1 or split_weights(options.data)[1] is not None:
        raise ValueError(
            f"--method {options.method} reads one file, all of it: --stream and several files or "
            "weights in --data are for --method sft"
        )
    loss = build_loss(options)
    if loss is not None and loss.reads_reference:
        folder = os.path.dirname(os.path.abspath(options.reference or data_path(options)))
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ValueError(
                f"--reference: {folder} is not a writable folder, and the reference's "
                "log-probabilities are kept there: name a file in another one"
            )
    elif options.reference is not None:
        raise ValueError(f"--reference: --dpo-kind {options.dpo_kind} reads no reference")


def data_path(options: Any) -> str:
    """Return the path in `--data`, of a method that reads one file."""
    return split_weights(options.data)[0][0]


def build_loss(options: Any) -> Any:
    """Return the loss of a method, or None for next tokens."""
    if options.method == "sft":
        return None
    kind = options.dpo_kind if options.method == "dpo" else options.method
    beta = options.beta
    if beta is None:
        beta = 2.0 if kind == "simpo" else 0.1
    return zj.dpo_loss(
        beta,
        kind,
        gamma=options.gamma,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )


def recorded(options: Any) -> dict[str, Any]:
    """Return the values of a method that a resumed run must have, too."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(MethodOptions)}


# --- data -----------------------------------------------------------------------------------------


def read(options: Any, path: str, tokenizer: Any, split: str | None, template: Any) -> Preferences:
    """Return the answers of a file in the form that the method reads.

    Raises:
      ValueError: a record cannot be read, or has no form of the method.
    """
    answers = read_preferences(path, tokenizer, split=split, template_options=template)
    if options.method == "kto":
        return answers.unpaired()
    if not answers.is_paired:
        raise ValueError(
            f"{path}: its records have single answers with labels, which --method kto reads; "
            f"--method {options.method} reads 'chosen' and 'rejected'"
        )
    return answers


def pack(options: Any, answers: Preferences) -> PairRows:
    """Return the rows of a method's answers."""
    pairs = answers.with_mismatches() if options.method == "kto" else answers
    return pack_pairs(pairs, options.seq, too_long=options.too_long)


def abstract_arrays(options: Any, rows: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch's arrays besides those of its tokens."""
    loss = build_loss(options)
    if loss is None:
        return {}
    size = options.batch_size
    arrays = {"labels": jax.ShapeDtypeStruct((size, rows.room), np.int32)}
    if loss.reads_reference:
        arrays["reference"] = jax.ShapeDtypeStruct((size, 2 * rows.room), np.float32)
    return arrays


def count_pairs(batch: Any) -> Any:
    """Return the number of pairs in a batch, over which its loss is a mean."""
    return (batch["labels"] != 0).sum()


def describe(rows: PairRows) -> str:
    """Return a summary of rows of pairs in words."""
    c = rows.counts
    full = 100 * c.positions / (c.rows * rows.seq)
    text = f"{c.examples // 2:,} pairs in {c.rows:,} rows of {rows.seq:,}, {full:.0f} % full"
    text += f"; {c.counted:,} tokens of answers"
    if c.truncated:
        text += f"; {c.truncated:,} sequences cut"
    if c.dropped:
        text += f"; {c.dropped // 2:,} pairs left out"
    return text


# --- the reference --------------------------------------------------------------------------------


def add_reference(
    options: Any,
    program: zj.Program,
    parts: list[PairRows],
    base: dict[str, Any],
    make: Callable[[], zj.TrainState],
    say: Callable[[str], None],
) -> tuple[list[PairRows], zj.TrainState | None]:
    """Return rows with the reference's log-probabilities, from the file if it exists.

    Args:
      options: options of the run.
      program: program that trains.
      parts: rows to train on, and held-out rows.
      base: JSON-serializable description of the weights that the run begins with.
      make: function that returns the state before the first step.
      say: function that prints a line.

    Returns:
      (the rows, the state before the first step if it was made for this, else None).

    Raises:
      ValueError: the file belongs to another model or other sequences, or cannot be written.
    """
    key = json.dumps({**base, "sequences": [rows.fingerprint() for rows in parts]}, sort_keys=True)
    short = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = options.reference or f"{os.path.normpath(data_path(options))}.reference-{short}.npz"
    together = AllProcesses(program.mesh, "reading the reference's log-probabilities", ValueError)
    sizes = [len(rows.pairs) for rows in parts]
    values = _read_together(together, path, key, sum(sizes))
    state = None
    if values is None:
        say(f"computing the reference's log-probabilities of {2 * sum(sizes):,} sequences")
        state = make()
        found = [reference_log_probs(program, state, rows, options.batch_size) for rows in parts]
        values = np.concatenate(found)
        together.do(lambda: _write(path, values, key))
    say(f"reference: {path}")
    pieces = np.split(values, np.cumsum(sizes)[:-1])
    return [rows.with_reference(piece) for rows, piece in zip(parts, pieces, strict=True)], state


def _read_together(together: AllProcesses, path: str, key: str, count: int) -> np.ndarray | None:
    """Return the log-probabilities that the first process reads from a file, or None."""
    values: list[np.ndarray] = []

    def read_file() -> None:
        found = None if jax.process_index() else read_reference(path, key)
        if found is not None:
            values.append(found)

    together.do(read_file)
    if jax.process_count() == 1:
        return values[0] if values else None
    has_file = multihost_utils.broadcast_one_to_all(np.int32(len(values)))
    if not has_file:
        return None
    own = values[0] if values else np.zeros((count, 2), np.float32)
    return np.asarray(multihost_utils.broadcast_one_to_all(own))


def _write(path: str, values: np.ndarray, key: str) -> None:
    if jax.process_index():
        return
    if not np.isfinite(values).all():
        raise ValueError(
            "--model: its log-probabilities of the data's answers are not finite, so it cannot be "
            "a reference: check its weights, or use another --precision"
        )
    try:
        write_reference(path, values, key)
    except OSError as error:
        raise ValueError(f"--reference {path}: {error}") from error


def default_rate(options: Any) -> float:
    """Return the default learning rate: for preferences a tenth of the rate for next tokens."""
    rate = 2e-4 if options.lora_rank or options.adapters is not None else 1e-5
    return rate if options.method == "sft" else rate / 10


def check_numbers(options: Any) -> None:
    """Check the numbers of a method.

    Raises:
      ValueError: a number is not positive and finite.
    """
    names = ("beta", "desirable_weight", "undesirable_weight")
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: a positive number is needed")
    if not 0 <= options.gamma < math.inf:
        raise ValueError(f"--gamma {options.gamma}: a number of at least 0 is needed")
