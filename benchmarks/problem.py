"""Define the contenders' common problem in numpy: a GPT's initial weights and a token stream.

Each weight has its own generator, seeded by its name, so any framework can create any part of the
model. The text is over 64 symbols spread over the vocabulary; four times in five a symbol is
followed by its successor in a fixed permutation, which a model learns in a few steps.
"""

import argparse
import dataclasses
import zlib

import numpy as np

SYMBOLS, PREDICTABLE = 64, 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and settings of a run.

    Attributes:
      layers: number of blocks.
      hidden: width of the residual stream.
      heads: number of attention heads.
      seq: tokens per sequence.
      vocab: number of distinct tokens.
      batch: sequences per step, over all devices.
      steps: number of steps.
      learning_rate: learning rate of AdamW.
      precision: "fp32" or "bf16" with float32 master weights.
      seed: seed of the weights and of the text.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    seq: int = 256
    vocab: int = 8192
    batch: int = 4
    steps: int = 8
    learning_rate: float = 1e-3
    precision: str = "fp32"
    seed: int = 0

    @property
    def num_params(self) -> int:
        """Number of the model's parameters."""
        return sum(int(np.prod(shape)) for shape in shapes(self).values())

    def arguments(self) -> list[str]:
        """Return command-line arguments that `from_arguments` reads back."""
        return [f"--{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option to a parser for each field of `Problem`."""
    for field in dataclasses.fields(Problem):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)


def from_arguments(options: argparse.Namespace) -> Problem:
    """Return the problem in options parsed with `add_arguments`."""
    return Problem(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Problem)})


def shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name; matrices are [out, in]."""
    h = p.hidden
    found: dict[str, tuple[int, ...]] = {"wte.weight": (p.vocab, h), "wpe.weight": (p.seq, h)}
    for i in range(p.layers):
        block = {
            "ln1": (h,),
            "qkv": (3 * h, h),
            "proj": (h, h),
            "ln2": (h,),
            "fc": (4 * h, h),
            "out": (h, 4 * h),
        }
        for name, shape in block.items():
            found[f"blocks.{i}.{name}.weight"] = shape
            found[f"blocks.{i}.{name}.bias"] = shape[:1]
    return found | {"ln_f.weight": (h,), "ln_f.bias": (h,), "head.weight": (p.vocab, h)}


def weight(p: Problem, name: str) -> np.ndarray:
    """Return one initial float32 parameter.

    Norms are one, biases are zero, and matrices are normal with GPT-2's deviations. With precision
    "bf16" the values are bfloat16 numbers: DeepSpeed makes its float32 masters from the rounded
    weights, and masters that start between two bfloat16 numbers learn faster at first.
    """
    shape, kind = shapes(p)[name], name.split(".")[-2]
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if kind.startswith("ln"):
        return np.ones(shape, np.float32)
    std = 0.02 / (2 * p.layers) ** 0.5 if kind in ("proj", "out") else 0.02
    random = np.random.default_rng([p.seed, zlib.crc32(name.encode())])
    value = random.standard_normal(shape, dtype=np.float32) * np.float32(std)
    return to_bf16(value) if p.precision == "bf16" else value


def to_bf16(value: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to bfloat16, ties to even; their dtype stays float32."""
    bits = value.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def weights(p: Problem) -> dict[str, np.ndarray]:
    """Return all initial parameters by name."""
    return {name: weight(p, name) for name in shapes(p)}


def batches(p: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens, targets) of each step, int64[batch, seq] each."""
    count = p.steps * p.batch * (p.seq + 1)
    symbols = min(SYMBOLS, p.vocab)
    successor = np.random.default_rng([p.seed + 1, 0]).permutation(symbols)
    follows = np.random.default_rng([p.seed + 1, 1]).random(count) < PREDICTABLE
    text = (np.random.default_rng([p.seed + 1, 2]).random(count) * symbols).astype(np.int64)
    for i in np.flatnonzero(follows[1:]) + 1:
        text[i] = successor[text[i - 1]]
    rows = (text * (p.vocab // symbols)).reshape(p.steps, p.batch, p.seq + 1)
    return [(row[:, :-1], row[:, 1:]) for row in rows]
