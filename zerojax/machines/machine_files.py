"""A machine's figures as a TOML file: one `key = value` per line, in the units of `Machine`.

    base = "h200"
    nodes = 2
    host_bytes = 2e12
    flops.bf16 = 6.4e14
    source.flops.bf16 = "measured with our own matmul"

Writing and reading a file reproduces its figures bit for bit. The standard library reads TOML but
cannot write it; the keys here are flat, so writing takes one line of text per figure. When reading,
a key may also be in a table (`[flops]`, then `bf16 = 6.4e14`).
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_MOST_BYTES = 1 << 20


def to_text(entries: Mapping[str, str | int | float]) -> str:
    """Return entries, keyed by dotted name, as TOML with one line per entry."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in entries.items())


def _value(value: str | int | float) -> str:
    """Return a value as TOML."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        # TOML also forbids this control character, which JSON allows.
        return text.replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    # Use the fewest digits that read back as the same number: 17 suffice for any float.
    for digits in range(1, 17):
        text = f"{value:.{digits}g}"
        if float(text) == value:
            return text
    return f"{value:.17g}"


def read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's values by dotted key, and the location of each, such as "lab.toml, line 3".

    Raises:
      ValueError: the path is not a regular file, or its text is not valid TOML; the message has the
        line.
      OSError: the file cannot be read.
    """
    try:
        text = _read_text(path)
        values = _flat(_parsed(path, text))
    except RecursionError as error:
        raise ValueError(
            f"{path} is nested too deeply: figures are top-level keys or keys of a top-level table"
        ) from error
    if not values:
        raise ValueError(f"{path} is empty: add a line for each figure, such as `link_up = 5e10`")
    lines = text.splitlines()
    return values, {key: f"{path}{_line(key, lines)}" for key in values}


def _read_text(path: str) -> str:
    """Return the text of a file of figures.

    Raises:
      ValueError: the path is not a regular file, or the file is too large or not UTF-8.
      OSError: the file cannot be read.
    """
    if os.path.isdir(path):
        raise ValueError(
            f"{path} is a folder: pass the path of a TOML file of figures, such as {path}/lab.toml"
        )
    if not os.path.exists(path):
        raise ValueError(
            f"{path} does not exist: pass the path of a TOML file of figures, such as one "
            "written by zerojax probe --out"
        )
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file: pass the path of a TOML file of figures")
    size = os.path.getsize(path)
    if size > _MOST_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes: a TOML file of figures has at most {_MOST_BYTES:,}"
        )
    with open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number with too many digits raises a plain ValueError
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            values |= _flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _line(key: str, lines: list[str]) -> str:
    """Return ", line N" for the line that sets a key, or "" if no such line is found.

    The line has either the full dotted key, or its last part within a table.
    """
    names = key.split(".")
    for key_names, table in ((names, ""), (names[-1:], ".".join(names[:-1]))):
        # A name may be quoted, and dots may have spaces around them.
        quoted_names = [rf"[\"']?{re.escape(name)}[\"']?" for name in key_names]
        pattern = re.compile(r"\s*" + r"\s*\.\s*".join(quoted_names) + r"\s*=")
        current_table = ""
        for n, line in enumerate(lines, 1):
            if header := re.match(r"\s*\[\s*([^\]]*?)\s*\]", line):
                current_table = header[1]
            elif current_table == table and pattern.match(line):
                return f", line {n}"
    return ""
