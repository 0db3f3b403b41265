"""List the mixes of tiers to check, and the sizes of the checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from problem import Problem

CLIP = 0.5
H = "pinned_host"
Fields = Mapping[str, Any]
STATES: dict[str, Any] = {"params": H, "grads": H, "opt_state": H}
IN_BACKWARD: dict[str, Any] = STATES | {"update": "in_backward"}
ON_HOST: dict[str, Any] = {"opt_state": H, "update_on": "host"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Sizes of a Llama, and the tokens of its steps.

    Attributes:
      layers: number of layers.
      hidden: width of the residual stream.
      heads: number of attention heads.
      ff: hidden width of the MLP.
      vocab: number of distinct tokens.
      seq: tokens per sequence.
      tokens: the two numbers of tokens per step.
    """

    layers: int
    hidden: int
    heads: int
    ff: int
    vocab: int
    seq: int
    tokens: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """A stack of records in host memory, and matrix products that run during its copies.

    Attributes:
      shape: [L, D, F], the shape of the float32 stack.
      left: [M, K], the shape of `a` in `a @ b`, in bfloat16.
      right: [K, K], the shape of `b`.
      products: numbers of products per tick: one that takes less time than a copy, and one that
        takes more.
    """

    shape: tuple[int, int, int]
    left: tuple[int, int]
    right: tuple[int, int]
    products: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of every check.

    Attributes:
      equal: problem of "fp32", "bf16", "activations", "tiles" and the compared steps of "nvme".
      lean: problem of "memory", with few activations, so that states dominate.
      fast: problem of "speed".
      swapped: problem of the timed steps of "nvme".
      rounds: number of timed steps of each mix.
      link_bytes: bytes of the array that measures the link.
      llama: sizes of the steps with states in host memory.
      short: sizes of the steps of 8 layers, in the parts "first" and "groups".
      on_disk: sizes of the steps on a disk and on a RAM disk; smaller disks get fewer layers.
      copied: stack and products of the loops of copies.
      host_params: number of parameters that the host's kernel updates.
      peer: problem of the comparison with other frameworks.
      few: whether to run only the mixes of FEW.
    """

    equal: Problem
    lean: Problem
    fast: Problem
    swapped: Problem
    rounds: int
    link_bytes: int
    llama: LlamaSizes
    short: LlamaSizes
    on_disk: LlamaSizes
    copied: Copied
    host_params: int
    peer: Problem
    few: bool = False


_TINY = Problem(
    layers=3, hidden=32, heads=4, seq=16, vocab=128, batch=4, steps=10, learning_rate=1e-3
)
_MIDDLE = Problem(
    layers=8, hidden=256, heads=4, seq=128, vocab=1024, batch=8, steps=10, learning_rate=1e-3
)
_LARGE = Problem(
    layers=16, hidden=2048, heads=16, seq=1024, vocab=32768, batch=8, steps=6, precision="bf16"
)
_TINY_LLAMA = LlamaSizes(
    layers=3, hidden=128, heads=2, ff=256, vocab=256, seq=64, tokens=(128, 256)
)
_LLAMA = LlamaSizes(
    layers=32, hidden=4096, heads=32, ff=11008, vocab=32000, seq=2048, tokens=(16384, 32768)
)
_TINY_COPIES = Copied(shape=(4, 32, 48), left=(64, 64), right=(64, 64), products=(1, 2))
SMALL = Sizes(
    equal=_TINY,
    lean=_TINY,
    fast=_TINY,
    swapped=_TINY,
    rounds=3,
    link_bytes=1 << 22,
    llama=_TINY_LLAMA,
    short=_TINY_LLAMA,
    on_disk=_TINY_LLAMA,
    copied=_TINY_COPIES,
    host_params=1 << 16,
    peer=dataclasses.replace(_TINY, steps=4, precision="bf16"),
    few=True,
)
GPU = Sizes(
    equal=_MIDDLE,
    lean=dataclasses.replace(_LARGE, layers=8, seq=128, vocab=8192, batch=1),
    fast=_LARGE,
    swapped=dataclasses.replace(_LARGE, layers=8, vocab=8192),
    rounds=6,
    link_bytes=1 << 30,
    llama=_LLAMA,
    short=dataclasses.replace(_LLAMA, layers=8),
    on_disk=dataclasses.replace(_LLAMA, layers=18),
    copied=Copied(shape=(32, 4096, 11008), left=(16384, 4096), right=(4096, 4096), products=(3, 6)),
    host_params=100_000_000,
    peer=dataclasses.replace(_LARGE, layers=24, seq=2048),
)


EQUAL_MIXES: Mapping[str, Fields] = {
    "params, distance 0": {"params": H, "prefetch_distance": 0},
    "params, 4 microbatches": {"params": H, "num_microbatches": 4},
    "grads, clipped": {"grads": H, "clip_norm": CLIP},
    "grads, opt_state, distance 0": {"grads": H, "opt_state": H, "prefetch_distance": 0},
    "opt_state, clipped": {"opt_state": H, "clip_norm": CLIP},
    "half of opt_state, distance 2": {
        "opt_state": H, "opt_state_device_fraction": 0.5, "prefetch_distance": 2,
    },
    "params, half of opt_state, in_backward": {
        "params": H, "opt_state": H, "opt_state_device_fraction": 0.5, "update": "in_backward",
    },
    "all, clipped, distance 2, gather_ahead": STATES | {
        "clip_norm": CLIP, "prefetch_distance": 2, "gather_ahead": True,
    },
    "all, activations, clipped, 4 microbatches": STATES | {
        "activations": H, "clip_norm": CLIP, "num_microbatches": 4,
    },
    "all, in_backward, distance 0": IN_BACKWARD | {"prefetch_distance": 0},
    "all, in_backward, 4 microbatches": IN_BACKWARD | {"num_microbatches": 4},
    "all, activations, in_backward, gather_ahead": IN_BACKWARD | {
        "activations": H, "gather_ahead": True,
    },
    "all, in_backward, distance 2, gather_ahead": IN_BACKWARD | {
        "prefetch_distance": 2, "gather_ahead": True,
    },
    "opt_state, updated on the host": ON_HOST,
    "all, activations, updated on the host": STATES | ON_HOST | {"activations": H},
    "all, clipped, 4 microbatches, updated on the host": STATES | ON_HOST | {
        "clip_norm": CLIP, "num_microbatches": 4,
    },
    "all, in_backward, updated on the host": IN_BACKWARD | ON_HOST,
}  # fmt: skip

ACTIVATION_MIXES: Mapping[str, Fields] = {
    "pinned_host": {"activations": H},
    "pinned_host, distance 0": {"activations": H, "prefetch_distance": 0},
    "pinned_host, params, distance 2, 4 microbatches": {
        "activations": H, "params": H, "prefetch_distance": 2, "num_microbatches": 4,
    },
    "a named value": {"activations": "remat", "offloaded_names": ("squashed",)},
    "a named value, 4 microbatches": {
        "activations": "remat", "offloaded_names": ("squashed",), "num_microbatches": 4,
    },
    "a named value, pinned_host, gather_ahead": {
        "activations": H, "offloaded_names": ("squashed",), "gather_ahead": True,
    },
}  # fmt: skip

NUM_TILES = 4
TILE_MIXES: Mapping[str, Fields] = {
    "params": {"params": H, "activations": "remat"},
    "all, clipped, distance 2, 4 microbatches": STATES
    | {"prefetch_distance": 2, "clip_norm": CLIP, "num_microbatches": 4},
    "all, activations, in_backward": IN_BACKWARD | {"activations": H},
    "all in_backward, distance 0": IN_BACKWARD | {"prefetch_distance": 0, "activations": "remat"},
}
"""Mixes of "tiles", whose MLPs have NUM_TILES tiles."""

RESIDENT: dict[str, Any] = {"activations": "remat"}
RESIDENT_STEP = "resident"
MEMORY_MIXES: Mapping[str, Fields] = {
    RESIDENT_STEP: RESIDENT,
    "opt_state": RESIDENT | {"opt_state": H},
    "all, activations": STATES | {"activations": H},
    "all, activations, in_backward": IN_BACKWARD | {"activations": H},
    "all, activations, in_backward, distance 2": IN_BACKWARD
    | {"activations": H, "prefetch_distance": 2},
}

SPEED_MIXES: Mapping[str, Fields] = {
    "all, in_backward": RESIDENT | IN_BACKWARD,
    "all, in_backward, distance 0": RESIDENT | IN_BACKWARD | {"prefetch_distance": 0},
    "all, in_backward, distance 2": RESIDENT | IN_BACKWARD | {"prefetch_distance": 2},
    "all": RESIDENT | STATES,
    "params": RESIDENT | {"params": H},
    "opt_state": RESIDENT | {"opt_state": H},
    "all, activations, in_backward": IN_BACKWARD | {"activations": H},
    "all, in_backward, updated on the host": RESIDENT | IN_BACKWARD | ON_HOST,
}
D = "nvme"
ON_DISK: dict[str, Any] = {"params": D, "grads": D, "opt_state": D}
NVME_MIXES: Mapping[str, Fields] = {
    "all, activations, clipped": ON_DISK | {"activations": D, "clip_norm": CLIP},
    "all, in_backward, distance 2, gather_ahead": ON_DISK | {
        "update": "in_backward", "prefetch_distance": 2, "gather_ahead": True,
    },
    "all, distance 0, 4 microbatches": ON_DISK | {"prefetch_distance": 0, "num_microbatches": 4},
    "all, activations, updated on the host": ON_DISK | {"activations": D, "update_on": "host"},
    "opt_state, by tensorstore": {"opt_state": D, "io": "tensorstore"},
}  # fmt: skip
NVME_SPEED_MIXES: Mapping[str, Fields] = {
    "all, in_backward": RESIDENT | ON_DISK | {"update": "in_backward"},
    "all, activations": ON_DISK | {"activations": D},
    "all, in_backward, updated on the host": RESIDENT
    | ON_DISK
    | {"update": "in_backward", "update_on": "host"},
    "params": RESIDENT | {"params": D},
}
BESIDE_PEER: dict[str, Any] = IN_BACKWARD | ON_HOST | {"activations": "save"}
"""Config that matches FSDP2's CPUOffloadPolicy.

States and optimizer are on the host, activations on the device.
"""

FEW: Mapping[str, Sequence[str]] = {
    "fp32": ["half of opt_state, distance 2"],
    "bf16": ["all, activations, clipped, 4 microbatches"],
    "activations": ["a named value, pinned_host, gather_ahead"],
    "tiles": ["all, activations, in_backward"],
    "memory": [RESIDENT_STEP, "all, activations, in_backward"],
    "speed": ["all, in_backward"],
    "nvme": ["all, activations, clipped", "all, in_backward"],
}


def chosen(check: str, mixes: Mapping[str, Fields], sizes: Sizes) -> dict[str, Fields]:
    """Return the mixes that a check runs at the given sizes."""
    return {name: fields for name, fields in mixes.items() if not sizes.few or name in FEW[check]}
