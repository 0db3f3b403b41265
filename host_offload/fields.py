"""Read JSON descriptions field by field, and check every value before it is used.

    Field({"shape": [3, -1]})["shape"].integers()
    # FieldError: shape[1] is -1, and an integer from 0 to 2^63 - 1 is needed

Descriptions are read from disks and may come from other people. A checksum only proves that a
description is unchanged since it was written, not that it makes sense: a size may be negative or
larger than any file, a name may point outside its folder, a number may be a list. Each method of
`Field` returns a value of one type and range, or raises an error that names the field.
"""

import base64
import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn

MOST = 2**63 - 1
"""The largest integer in a description, which is the largest offset in a file."""
_MOST_DIMS = 32
_NOTHING = object()


class FieldError(ValueError):
    """A description's field is missing or invalid; the message begins with the field's name."""


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: the text is not JSON, repeats a name in an object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for n, name in enumerate(names) if name in names[:n])
        raise FieldError(f"{_shown(twice)} appears twice")
    return fields


@dataclasses.dataclass(frozen=True)
class Field:
    """A value in a description.

    Attributes:
      value: value that the JSON parser returned.
      name: path of the value, such as "stores[0].leaves[1].offset"; "" is the description itself.
    """

    value: Any
    name: str = ""

    def refuse(self, needed: str) -> NoReturn:
        """Raise FieldError with this value and the needed value.

        Args:
          needed: description of a valid value, for the message.
        """
        raise FieldError(f"{self.name or 'it'} is {_shown(self.value)}, and {needed} is needed")

    def __getitem__(self, key: str) -> "Field":
        """Return a field of an object.

        Raises:
          FieldError: this value is not an object, or has no such field.
        """
        if (field := self.get(key)) is None:
            raise FieldError(f"{self._child(key)} is missing")
        return field

    def get(self, key: str) -> "Field | None":
        """Return a field of an object, or None if it is missing or null."""
        value = self._object().get(key, _NOTHING)
        return None if value is _NOTHING or value is None else Field(value, self._child(key))

    def fields(self) -> Iterator[tuple[str, "Field"]]:
        """Yield (name, field) for each field of an object with arbitrary names."""
        for key, value in self._object().items():
            Field(key, f"a name in {self.name or 'it'}").text()
            yield key, Field(value, self._child(key))

    def items(self) -> list["Field"]:
        """Return the items of a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [Field(value, f"{self.name}[{n}]") for n, value in enumerate(self.value)]

    def integer(self, least: int = 0, most: int = MOST) -> int:
        """Return an integer from `least` to `most`."""
        if type(self.value) is not int or not least <= self.value <= most:
            if least == most:
                span = f"{least}"
            else:
                span = f"from {least} to {'2^63 - 1' if most == MOST else most}"
            self.refuse(f"an integer, {span},")
        return self.value

    def integers(self, least: int = 0) -> tuple[int, ...]:
        """Return a list of integers, one per dim of an array."""
        items = self.items()
        if len(items) > _MOST_DIMS:
            self.refuse(f"a list of at most {_MOST_DIMS} integers")
        return tuple(item.integer(least) for item in items)

    def flag(self) -> bool:
        """Return a bool."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def text(self) -> str:
        """Return a string that is valid as a name and can be printed."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        try:
            self.value.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            self.refuse("a text of UTF-8")
        return self.value

    def inner_path(self) -> str:
        """Return a path below the folder of the description."""
        path = self.text()
        if not is_inner_path(path):
            self.refuse("a path below the folder of the description")
        return path

    def data(self) -> bytes:
        """Return the bytes of a base64 text."""
        try:
            return base64.b64decode(self.text(), validate=True)
        except FieldError:
            raise
        except ValueError:
            self.refuse("base64")

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of an array with this shape.

        Args:
          itemsize: bytes of one element.
        """
        shape = self.integers()
        # Skip dims of 0: numpy also multiplies the remaining dims.
        if math.prod(max(1, n) for n in shape) * itemsize > MOST:
            self.refuse("a shape of less than 2^63 bytes")
        return math.prod(shape) * itemsize

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def _child(self, key: str) -> str:
        if not key.isidentifier():
            return f"{self.name}[{_shown(key)}]"
        return f"{self.name}.{key}" if self.name else key


def is_inner_path(path: str) -> bool:
    """Return whether a relative path stays below its folder; links are not resolved."""
    return (
        not os.path.isabs(path) and "\0" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))
    )


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def _shown(value: Any) -> str:
    return _REPR.repr(value)
