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
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # TOML also forbids this control character, which JSON allows
    if isinstance(value, int):
        return str(value)
    # The fewest digits that read back as the same number.
    return next(text for digits in range(1, 18) if float(text := f"{value:.{digits}g}") == value)


def read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's values by dotted key, and the location of each, such as "lab.toml, line 3".

    Raises:
      ValueError: the path is not a regular file, or its text is not valid TOML; the message has the
        line.
      OSError: the file cannot be read.
    """
    try:
        if os.path.isdir(path):
            raise ValueError(
                f"{path} is a folder: pass the path of a TOML file of figures, such as "
                f"{path}/lab.toml"
            )
        if not os.path.exists(path):
            raise ValueError(
                f"{path} does not exist: pass the path of a TOML file of figures, such as one "
                "written by zerojax probe --out"
            )
        if not os.path.isfile(path):
            raise ValueError(
                f"{path} is not a regular file: pass the path of a TOML file of figures"
            )
        if (size := os.path.getsize(path)) > _MOST_BYTES:
            raise ValueError(
                f"{path} has {size:,} bytes: a TOML file of figures has at most {_MOST_BYTES:,}"
            )
        with open(path, "rb") as file:
            data = file.read()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        values = _flat(_parsed(path, text))
    except RecursionError as error:
        raise ValueError(
            f"{path} is nested too deeply: figures are top-level keys or keys of a top-level table"
        ) from error
    if not values:
        raise ValueError(f"{path} is empty: add a line for each figure, such as `link_up = 5e10`")
    lines = text.splitlines()
    return values, {key: f"{path}{_line(key, lines)}" for key in values}


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number with too many digits raises a plain ValueError
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entries.items():
        found |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def _line(key: str, lines: list[str]) -> str:
    """Return ", line N" for the line that sets a key, or "" if no such line is found.

    The line has either the full dotted key, or its last part within a table.
    """
    parts = key.split(".")
    for name, table in ((parts, ""), (parts[-1:], ".".join(parts[:-1]))):
        # A part may be quoted, and dots may have spaces around them.
        pattern = re.compile(
            r"\s*" + r"\s*\.\s*".join(rf"[\"']?{re.escape(part)}[\"']?" for part in name) + r"\s*="
        )
        now = ""
        for n, line in enumerate(lines, 1):
            if header := re.match(r"\s*\[\s*([^\]]*?)\s*\]", line):
                now = header[1]
            elif now == table and pattern.match(line):
                return f", line {n}"
    return ""
