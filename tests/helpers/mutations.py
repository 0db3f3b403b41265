"""Randomly changed descriptions, for readers that must refuse nonsense with a CheckpointError."""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from zerojax.checkpoint.errors import CheckpointError

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES = [
    None, True, False, -1, 0, 1, 2, 7, 4096, 2**31, 2**62, 2**63, 3 * 10**8, 10**30, -(2**70), 1.5, float("nan"), float("inf"),
    "", ".", "..", "../x", "/etc/passwd", "a/../b", "a\0b", "\ud800", "²", "float32", "bfloat16", "object", "int4", "i4,i4",
    "AAAA", "A", "0" * 16, "x" * 300, [], {}, [[]], [1, 2, 3], [2**62, 2**62], [-1], {"json": 1}, {"bytes": "?"}, DEEP,
]  # fmt: skip


def mutated(text: str | bytes, seed: int) -> Any:
    """Return the value of a JSON text, changed in one to three places."""
    tree, rng = json.loads(text), random.Random(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [(tree, key) for key in _keys(tree)]
        for node, key in places:  # grows during the iteration
            places += [(node[key], inner) for inner in _keys(node[key])]
        if not places:
            break
        node, key = rng.choice(places)
        other, other_key = rng.choice(places)
        value = node[key]
        match rng.randrange(6):
            case 0:
                node[key] = rng.choice(VALUES)
            case 1:
                del node[key]
            case 2:
                node[key] = json.loads(json.dumps(other[other_key]))
            case 3 if isinstance(node, dict):
                node[rng.choice(("", "a", "..", "²", str(other_key)))] = node.pop(key)
            case 4 if isinstance(value, list) and value:
                value.append(json.loads(json.dumps(rng.choice(value))))
            case _ if isinstance(value, int):
                node[key] = rng.choice(
                    (value + 1, value - 1, 2 * value, -value, value + 4096, value // 2)
                )
            case _:
                node[key] = [value]
    return tree


def _keys(node: Any) -> list[Any]:
    return (
        list(node)
        if isinstance(node, dict)
        else list(range(len(node)))
        if isinstance(node, list)
        else []
    )


def flipped(data: bytes, seed: int, stop: int | None = None) -> bytes:
    """Return the bytes with one bit flipped, at an offset below `stop`."""
    changed, rng = bytearray(data), random.Random(seed)
    changed[rng.randrange(stop or len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def outcomes(calls: dict[int, Callable[[], None]]) -> Counter[str]:
    """Count calls' outcomes by seed; any error but CheckpointError fails the test with its seed."""
    found: Counter[str] = Counter()
    for seed, call in calls.items():
        try:
            call()
            found["success"] += 1
        except CheckpointError as error:
            found[type(error).__name__] += 1
            str(error).encode()  # the error can be printed
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return found
