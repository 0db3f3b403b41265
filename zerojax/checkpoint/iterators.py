"""The positions of a run's data iterators: one for each process, as JSON in that process's
manifest.

    {"json": what get_state() returned}       if JSON returns the same
    {"bytes": base64}                         if it returned bytes, as grain's iterators do

A position belongs to the process that read that part of the data. So positions are restored only by
as many processes as saved them.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax

from host_offload.fields import Field
from zerojax.checkpoint.errors import IteratorError


def encoded_position(data: Any) -> dict[str, Any]:
    """Return what JSON can hold of an iterator's position.

    Raises:
      ValueError: it has none, or one that is neither bytes nor JSON.
    """
    if not hasattr(data, "get_state") or not hasattr(data, "set_state"):
        raise ValueError(
            f"data is a {type(data).__name__}: an iterator with get_state and set_state, as grain's, is needed"
        )
    position = data.get_state()
    if isinstance(position, bytes):
        return {"bytes": base64.b64encode(position).decode()}
    try:
        decoded = json.loads(json.dumps(position))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state of data cannot be told as JSON, and is no bytes: {error}"
        ) from error
    if decoded != position:  # JSON makes lists of tuples, and text of keys
        raise ValueError(
            f"the state of data is another once told as JSON: use lists, not tuples, and text as keys; or bytes: {position!r}"
        )
    return {"json": decoded}


def decoded_position(entry: Field) -> Any:
    """Return the position that was encoded.

    Raises:
      FieldError: it is none.
    """
    if (data := entry.get("bytes")) is not None:
        return data.data()
    if "json" not in entry.value:
        entry.refuse('{"json": ...} or {"bytes": ...}')
    return entry.value["json"]  # may be null


def check_position(data: Any) -> None:
    """Raise ValueError for an iterator whose position cannot be saved; None is none."""
    if data is not None:
        encoded_position(data)


def own_position(folder: str, num_processes: int, positions: Mapping[int, Any]) -> Any:
    """Return where this process's iterator was.

    Args:
      folder: of the state that was saved.
      num_processes: that saved it.
      positions: by process.

    Raises:
      IteratorError: that was not saved, or by other processes; it is raised in all processes.
    """
    if num_processes != jax.process_count():
        raise IteratorError(
            f"{folder} holds the iterators of {num_processes} processes, and these are {jax.process_count()}: "
            "restore without data, and set the iterator's position from state.step"
        )
    # All positions are looked at, and not this process's alone, so that all processes raise.
    if missing := [process for process in range(num_processes) if process not in positions]:
        raise IteratorError(
            f"{folder} holds no state of the iterator of process {missing[0]}: save it with data=, or restore without"
        )
    return positions[jax.process_index()]
