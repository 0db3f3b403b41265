"""Random batches of every kind, and the outcome of each.

A batch is refused with an error that names it, gives the right result, or is reported as out of
range.
"""

import collections
import math
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_decoder import VOCAB, batch_of

KEYS = ("tokens", "targets", "segment_ids", "positions")
INTEGERS = (
    "int8",
    "int16",
    ">i2",
    "int32",
    ">i4",
    "int64",
    ">i8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
ODD_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bool",
    "object",
    "U3",
    "S2",
    "complex64",
    "M8[s]",
    ml_dtypes.bfloat16,
)


def clean_batch(rng):
    rows, length = rng.choice([1, 2, 4]), rng.choice([1, 6])
    batch = batch_of(rows, length, int(rng.integers(1 << 30)))
    if rng.random() < 0.5:
        batch["segment_ids"] = np.sort(rng.integers(0, 3, (rows, length)).astype(np.int32), axis=1)
    if rng.random() < 0.3:
        batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return batch


def other_dtype(rng, array):
    return array.astype(
        str(rng.choice(INTEGERS))
    )  # a number may wrap; the wrapped value is then the batch's value


def odd_dtype(rng, array):
    dtype = ODD_DTYPES[rng.integers(len(ODD_DTYPES))]
    return array.astype("int64").astype(dtype) if dtype == "M8[s]" else array.astype(dtype)


def number(rng, array):
    if not isinstance(array, np.ndarray) or not array.size or array.dtype.kind not in "iu":
        return array
    array = array.astype(np.int64)
    value = rng.choice(
        [
            -1,
            -2,
            -100,
            VOCAB - 1,
            VOCAB,
            2**24,
            2**24 + 1,
            2**31 - 1,
            2**31,
            2**32,
            2**32 + 3,
            -(2**31) - 1,
        ]
    )
    array[tuple(rng.integers(n) for n in array.shape)] = value
    return array if abs(int(value)) >= 2**31 else array.astype(np.int32)


def shape(rng, array):
    if not isinstance(array, np.ndarray):
        return array
    kinds = [
        lambda a: a[:, :-1], lambda a: a[:-1], lambda a: a[:0], lambda a: a[:, :0], lambda a: a[0], lambda a: a[None],
        lambda a: a[..., None], lambda a: a.T, lambda a: a.reshape(-1), lambda a: a.sum(), lambda a: np.concatenate([a, a]),
    ]  # fmt: skip
    try:
        return kinds[rng.integers(len(kinds))](array)
    except (IndexError, ValueError, TypeError, np.exceptions.AxisError):
        return array


def memory(rng, array):
    """Return the same numbers in a different memory layout."""
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "iu":
        return array
    read_only = array.copy()
    read_only.flags.writeable = False
    reversed_twice = np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    wide = np.repeat(array, 2, 1)[:, ::2]
    kinds = [
        read_only,
        reversed_twice,
        wide,
        np.asfortranarray(array),
        np.ma.masked_array(array),
        np.asmatrix(array),
    ]
    return kinds[rng.integers(len(kinds))]


def value(rng, array):
    """Return a value that is not a numpy array, or a masked array."""
    kinds = [
        None, "text", b"bytes", 3, 2.5, math.nan, True, 2**70, {}, [], (), object(), range(4), len, [None], {"a": 1}, {1, 2},
        np.ma.masked_all((2, 6), np.int32), np.float32(1), np.int64(3), jax.ShapeDtypeStruct((4, 6), np.int32),
        jax.random.key(0), np.full((4, 6), math.nan), np.array(["a", 3, None], object), np.dtype("int32"),
    ]  # fmt: skip
    if isinstance(array, np.ndarray) and array.ndim == 2 and array.dtype.kind in "iu":
        kinds += [
            array.tolist(),
            tuple(map(tuple, array.tolist())),
            list(array),
            memoryview(np.ascontiguousarray(array)),
        ]
        if array.dtype.itemsize <= 4 and array.dtype.isnative:
            kinds += [jnp.asarray(array)] * 4
    return kinds[rng.integers(len(kinds))]


def whole(rng, batch):
    """Replace the batch by another object, or change its keys."""
    tokens = batch.get("tokens")
    kinds = [
        lambda: list(batch.values()), lambda: tuple(batch.items()), lambda: None, lambda: tokens, lambda: "batch", lambda: {},
        lambda: {key: a for key, a in batch.items() if key != "tokens"}, lambda: {"batch": batch}, lambda: [batch], lambda: 0,
        lambda: {key: a for key, a in batch.items() if key != "targets"}, lambda: collections.OrderedDict(batch),
        lambda: {**batch, "attention_mask": tokens}, lambda: {**batch, 3: tokens}, lambda: {**batch, None: 1},
        lambda: {**batch, "labels": tokens}, lambda: {**batch, "id": "row"}, lambda: {k.upper(): a for k, a in batch.items()},
        lambda: {**batch, "last": 0}, lambda: {**batch, "cache": None}, lambda: collections.defaultdict(list, batch),
        lambda: {**batch, ("tokens",): tokens}, lambda: set(batch), lambda: iter([batch]),
    ]  # fmt: skip
    return kinds[rng.integers(len(kinds))]()


CHANGES = np.array(
    [other_dtype, other_dtype, odd_dtype, number, number, shape, memory, value], object
)


def fuzzed(seed):
    rng = np.random.default_rng(seed)
    batch = clean_batch(rng)
    for _ in range(rng.integers(1, 4)):
        key = str(rng.choice(list(batch)))
        change = rng.choice(CHANGES)
        try:
            with warnings.catch_warnings(action="ignore"):
                batch[key] = change(rng, batch[key])
        except (
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ):  # make that change to a value of that kind
            continue
    return whole(rng, batch) if rng.random() < 0.2 else batch


def clean_of(batch):
    """Return the same batch in int32, and whether its numbers are in range.

    Whether they are is computed in Python's own integers.
    """
    clean, is_good = {}, True
    for key in KEYS:
        if key in batch:
            numbers = np.asarray(batch[key]).astype(object)
            least, most = {
                "tokens": (0, VOCAB - 1),
                "targets": (-math.inf, VOCAB - 1),
                "positions": (0, 2**24),
            }.get(key, (-math.inf, math.inf))
            is_good &= all(least <= int(n) <= most for n in numbers.flat)
            clean[key] = numbers.astype(np.int64).astype(np.int32)
    return clean, is_good


def outcome_of(program, state, batch):
    """Return "refused", "right" or "out of range"; otherwise, what went wrong, with the batch."""
    try:
        loss = float(program.eval(state, batch))
    except ValueError as error:
        named = [
            *map(repr, (*KEYS, "last", "cache")),
            "not read",
            "cannot be read",
            "a batch is a dict",
        ]
        if "batch" not in str(error) or not any(word in str(error) for word in named):
            return f"not named: {error} of {batch!r}"
    except Exception as error:
        return f"bare: {type(error).__name__}: {error} of {batch!r}"
    else:
        clean, is_good = clean_of(batch)
        if not is_good:
            return (
                "out of range" if math.isnan(loss) else f"wrong: {loss} out of range of {batch!r}"
            )
        expected = float(program.eval(state, clean))
        return (
            "right" if abs(loss - expected) < 1e-6 else f"wrong: {loss} for {expected} of {batch!r}"
        )
    with pytest.raises(ValueError, match="batch"):
        program.step(state, batch)
    return "refused"
