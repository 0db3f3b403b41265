"""Convert user-supplied values to plain Python: numbers, flags, strings and paths.

An integer may be an `int`, a numpy integer, or a numpy or JAX array of shape () that holds one. A
finite number may also be a float of any of these kinds. A bool is not a number. The functions
return Python's `int`, `float`, `bool` or `str`, which JSON can represent.
"""

import math
import os
from typing import Any

import numpy as np

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
_MOST_SHOWN = 100
"""Most characters of a value that an error message shows."""


def as_integer(value: object) -> int | None:
    """Return an integer as an `int`; None for anything else, including floats and bools."""
    plain = _plain(value)
    return plain if isinstance(plain, int) and not isinstance(plain, bool) else None


def as_number(value: object) -> float | None:
    """Return a finite number as a `float`; None for anything else.

    NaN, infinity and bools give None.
    """
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        return None
    try:
        number = float(plain)
    except OverflowError:  # an int beyond the largest float
        return None
    return number if math.isfinite(number) else None


def as_int_or_float(value: object) -> int | float | None:
    """Return a finite number as an `int` if its type is integral, else as a `float`.

    Anything else gives None.
    """
    integer = as_integer(value)
    return as_number(value) if integer is None else integer


def as_flag(value: object) -> bool | None:
    """Return a Python or numpy bool as a `bool`; None for anything else."""
    plain = _plain(value)
    return plain if isinstance(plain, bool) else None


def as_string(value: object) -> str | None:
    """Return a Python or numpy string as a `str`; None for anything else, such as enum members."""
    plain = _plain(value)
    return plain if type(plain) is str else None


def in_float32(number: float, least: float = _SMALLEST, most: float = _LARGEST) -> float | None:
    """Return a number if its float32 rounding is in a range, clamped to the range; None if not.

    Args:
      number: finite number. For example 3.4028235e38, the usual decimal form of float32's largest
        number, is above it in float64.
      least: smallest allowed value, exact in float32.
      most: largest allowed value, exact in float32.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    return min(max(number, least), most) if least <= rounded <= most else None


def shown(value: object) -> str:
    """Return a value's `repr` for an error message, shortened in the middle if it is long."""
    try:
        text = repr(value)
    except Exception:  # for example, Python refuses to print an int of thousands of digits
        return f"a value of type {type(value).__name__} that cannot be printed"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]}..{text[-_MOST_SHOWN // 4 :]} ({len(text)} characters)"


def whole_number(name: str, value: object, least: int, otherwise: str = "") -> int:
    """Return an integer as an `int`.

    Args:
      name: name of the argument, for the error.
      value: value that the user gave.
      least: smallest allowed value.
      otherwise: other allowed values, appended to the error: ", or None for ..".

    Raises:
      ValueError: the value is not an integer, or is too small.
    """
    number = as_integer(value)
    if number is None or number < least:
        raise ValueError(
            f"{name}={shown(value)}: an integer of at least {least} is needed{otherwise}"
        )
    return number


def positive_number(name: str, value: object, otherwise: str = "") -> float:
    """Return a finite number above 0 as a `float`.

    Args:
      name: name of the argument, for the error.
      value: value that the user gave.
      otherwise: other allowed values, appended to the error: ", or None for ..".

    Raises:
      ValueError: the value is not a number, or it is not finite and positive in float32.
    """
    number = as_number(value)
    clamped = None if number is None else in_float32(number)
    if clamped is None:
        raise ValueError(
            f"{name}={shown(value)}: a positive finite number that float32 holds is "
            f"needed{otherwise}"
        )
    return clamped


def as_path(value: object) -> str | None:
    """Return a path as a `str`, with `~` and `~user` expanded; None if it cannot name a file."""
    if not isinstance(value, str | os.PathLike):
        return None
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path:
        return None
    return os.path.expanduser(path)


def _plain(value: Any) -> object:
    """Return a numpy scalar or array of shape () as a Python value, and anything else unchanged."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        return value  # a masked value is not a number, but its `item` is 0
    is_scalar = isinstance(value, np.generic) or (
        hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    )
    if not is_scalar or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except Exception:  # a traced or deleted array has no value, so it is not a number
        return value
