"""Types for argparse: numbers in a range, with errors that say what is needed.

`float` accepts "nan", "inf" and 1e400, which is infinite. `int` accepts integers that no float can
represent. The types in this module accept only finite numbers in a range. argparse puts the
option's name before their messages.
"""

import argparse
import math
from collections.abc import Callable

MOST = 10**18
"""The largest number that a command accepts."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count(text: str) -> int:
    """Return the integer that a text such as "175B", "1T" or "7.5e9" stands for.

    Raises:
      argparse.ArgumentTypeError: the text is not a whole number from 1 to `MOST`.
    """
    unit = text[-1:].upper()
    digits = text[:-1] if unit in _UNITS else text
    value = _float(digits) * _UNITS.get(unit, 1.0)
    if not 1 <= value <= MOST or value != int(value):
        raise argparse.ArgumentTypeError(
            f"{_short(text)}: a whole number from 1 to {MOST:.0e}, such as 7.5e9, 175B or 1T, "
            "is needed"
        )
    return int(value)


def integer(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return an argparse type for integers from `least` to `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{_short(text)}: it must be at least {least}, at most {most:,}, and whole"
            )
        return value

    return convert


def number(
    least: float, most: float = float(MOST), *, above: bool = False
) -> Callable[[str], float]:
    """Return an argparse type for finite numbers from `least` to `most`, or above `least`.

    Args:
      least: smallest number.
      most: largest number.
      above: whether `least` itself is rejected.
    """

    def convert(text: str) -> float:
        value = _float(text)
        if not least <= value <= most or (above and value == least):
            lower = f"above {least:g}" if above else f"from {least:g}"
            raise argparse.ArgumentTypeError(
                f"{_short(text)}: a number {lower} to {most:g} is needed"
            )
        return value

    return convert


def _float(text: str) -> float:
    """Return a finite number, or NaN, which is in no range."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}.."
