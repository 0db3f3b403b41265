"""Values as users give them, made into Python's own: numbers of numpy and JAX, flags, and paths
with `~`.

A whole number may be an `int`, a numpy integer, or an array of shape () that holds one. A finite
number may also be a float of any of these kinds. A bool is no number. The functions return Python's
`int`, `float`, `bool` or `str`, which JSON can hold.
"""

import math
import os
from typing import Any

import numpy as np

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MOST_SHOWN = 100
"""Characters of a value in an error."""


def as_integer(value: object) -> int | None:
    """Return a whole number as an `int`; None for anything else, a float or a bool among them."""
    plain = _plain(value)
    return plain if isinstance(plain, int) and not isinstance(plain, bool) else None


def as_number(value: object) -> float | None:
    """Return a finite number as a `float`; None for anything else, NaN, infinity and a bool among
    them.
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
    """Return a finite number as an `int` if it is of a whole kind, else as a `float`; None for
    anything else.
    """
    whole = as_integer(value)
    return as_number(value) if whole is None else whole


def as_flag(value: object) -> bool | None:
    """Return True or False, of Python or of numpy, as a `bool`; None for anything else."""
    plain = _plain(value)
    return plain if isinstance(plain, bool) else None


def as_string(value: object) -> str | None:
    """Return a string, of Python or of numpy, as a `str`; None for anything else, an enum's member
    among them.
    """
    plain = _plain(value)
    return plain if type(plain) is str else None


def in_float32(number: float, least: float = _SMALLEST, most: float = _LARGEST) -> float | None:
    """Return a number that lies in a range once it is rounded to float32; None: it does not.

    Args:
      number: finite. 3.4028235e38 is float32's largest number as it is commonly written, and above
        it in float64.
      least: the smallest that is allowed, which float32 holds.
      most: the largest that is allowed, which float32 holds.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    return min(max(number, least), most) if least <= rounded <= most else None


def shown(value: object) -> str:
    """Return a value as an error shows it: its `repr`, the middle of a long one left out."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to print an int of thousands of digits
        return f"a value of type {type(value).__name__} that cannot be printed"
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]}..{text[-_MOST_SHOWN // 4 :]} ({len(text)} characters)"


def whole_number(name: str, value: object, least: int, otherwise: str = "") -> int:
    """Return a whole number as an `int`.

    Args:
      name: of the argument.
      value: as given.
      least: the smallest value that is allowed.
      otherwise: what else the argument may be, for the error: ", or None for ..".

    Raises:
      ValueError: it is no whole number, or too small.
    """
    number = as_integer(value)
    if number is None or number < least:
        raise ValueError(
            f"{name}={shown(value)}: an integer of at least {least} is needed{otherwise}"
        )
    return number


def positive_number(name: str, value: object, otherwise: str = "") -> float:
    """Return a finite number above 0 as a `float`; arguments as `whole_number`.

    Raises:
      ValueError: it is no number, not finite or not positive, or would be so in float32.
    """
    number = as_number(value)
    held = None if number is None else in_float32(number)
    if held is None:
        raise ValueError(
            f"{name}={shown(value)}: a positive finite number that float32 holds is needed{otherwise}"
        )
    return held


def as_path(value: object) -> str | None:
    """Return a path as a `str`, `~` and `~user` replaced by the home folder; None for anything that
    names no file.
    """
    if not isinstance(value, str | os.PathLike):
        return None
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path:
        return None
    return os.path.expanduser(path)


def _plain(value: Any) -> object:
    """Return a numpy scalar, or an array of shape (), as Python's own value, and anything else as
    it is.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        return value  # it holds no number, and its `item` would be 0
    is_scalar = isinstance(value, np.generic) or (
        hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    )
    if not is_scalar or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except Exception:  # an array that is traced, or deleted, has no value: what is wrong with it is that it is no number
        return value
