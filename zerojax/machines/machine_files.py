"""A machine's figures as a TOML file: one `key = value` a line, in the units of `Machine`.

    base = "h200"
    nodes = 2
    host_bytes = 2e12
    flops.bf16 = 6.4e14
    source.flops.bf16 = "measured with our own matmul"

What is written is read back to the same figures, bit for bit. The standard library reads TOML but
writes none; here keys are flat, so that a line of text is all there is to write. A key may also be
in a table (`[flops]`, then `bf16 = 6.4e14`).
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_MOST_BYTES = 1 << 20


def to_text(entries: Mapping[str, str | int | float]) -> str:
    """Return entries by dotted key as TOML, a line each."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in entries.items())


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # TOML forbids this one control besides JSON's
    if isinstance(value, int):
        return str(value)
    # The fewest digits that give the same number again.
    return next(text for digits in range(1, 18) if float(text := f"{value:.{digits}g}") == value)


def read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's values by dotted key, and where each is, such as "lab.toml, line 3".

    Raises:
      ValueError: it is a folder, or no TOML; the message has the line.
      OSError: it cannot be read.
    """
    try:
        if os.path.isdir(path):
            raise ValueError(
                f"{path} is a folder: the path of a TOML file of figures is needed, such as {path}/lab.toml"
            )
        if not os.path.exists(path):
            raise ValueError(
                f"{path} is not there: the path of a TOML file of figures is needed, as zerojax probe --out writes it"
            )
        if not os.path.isfile(path):
            raise ValueError(
                f"{path} is no regular file: the path of a TOML file of figures is needed"
            )
        if (size := os.path.getsize(path)) > _MOST_BYTES:
            raise ValueError(
                f"{path} has {size:,} bytes: a TOML file of figures has no more than {_MOST_BYTES:,}"
            )
        with open(path, "rb") as file:
            data = file.read()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
        values = _flat(_parsed(path, text))
    except RecursionError as error:
        raise ValueError(
            f"{path} is nested too deeply: figures are keys of the file, or of one of its tables"
        ) from error
    if not values:
        raise ValueError(
            f"{path} is empty: a line for each figure is needed, such as `link_up = 5e10`"
        )
    lines = text.splitlines()
    return values, {key: f"{path}{_line(key, lines)}" for key in values}


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number of too many digits is a ValueError
        raise ValueError(f"{path} is no TOML: {error}") from error


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
    """Return ", line N": of the whole key, or of its last part within a table; nothing where it is
    written otherwise.
    """
    parts = key.split(".")
    for name, table in ((parts, ""), (parts[-1:], ".".join(parts[:-1]))):
        # A part may be quoted, and there may be spaces around the dots.
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
