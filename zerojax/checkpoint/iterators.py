"""Positions of a run's data iterators: one per process, as JSON in that process's manifest.

    {"json": result of get_state()}     if JSON reproduces it
    {"bytes": base64}                   if it is bytes, as for grain's iterators

A position belongs to the process that read that part of the data. So only the same number of
processes can restore positions.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax

from host_offload.fields import Field
from zerojax.checkpoint.errors import IteratorError


def encoded_position(data: Any) -> dict[str, Any]:
    """Return an iterator's position in a form that JSON can hold.

    Args:
      data: iterator with `get_state` and `set_state`.

    Raises:
      ValueError: it has no position, or its position is neither bytes nor JSON.
    """
    if not hasattr(data, "get_state") or not hasattr(data, "set_state"):
        raise ValueError(
            f"data is a {type(data).__name__}: an iterator with get_state and set_state, "
            "such as grain's, is needed"
        )
    position = data.get_state()
    if isinstance(position, bytes):
        return {"bytes": base64.b64encode(position).decode()}
    try:
        decoded = json.loads(json.dumps(position))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state of data is neither bytes nor representable as JSON: {error}"
        ) from error
    if decoded != position:  # JSON turns tuples into lists, and keys into text
        raise ValueError(
            "the state of data does not survive JSON: use lists, not tuples, and text as keys; "
            f"or bytes: {position!r}"
        )
    return {"json": decoded}


def decoded_position(entry: Field) -> Any:
    """Return the position that `encoded_position` encoded.

    Raises:
      FieldError: the entry is not an encoded position.
    """
    data = entry.get("bytes")
    if data is not None:
        return data.data()
    if "json" not in entry.value:
        entry.refuse('{"json": ...} or {"bytes": ...}')
    return entry.value["json"]  # may be null


def check_position(data: Any) -> None:
    """Raise ValueError if an iterator's position cannot be saved; None has no position."""
    if data is not None:
        encoded_position(data)


def own_position(folder: str, num_processes: int, positions: Mapping[int, Any]) -> Any:
    """Return the saved position of this process's iterator.

    Args:
      folder: folder of the saved state.
      num_processes: number of processes that saved it.
      positions: positions by process.

    Raises:
      IteratorError: no position was saved, or another number of processes saved; all processes
        raise it.
    """
    if num_processes != jax.process_count():
        raise IteratorError(
            f"{folder} holds the iterators of {num_processes} processes, and this run has "
            f"{jax.process_count()}: restore without data, and set the iterator's position from "
            "state.step"
        )
    # All positions are checked, not only this process's, so that all processes raise.
    missing = [process for process in range(num_processes) if process not in positions]
    if missing:
        raise IteratorError(
            f"{folder} holds no state of the iterator of process {missing[0]}: save with data=, "
            "or restore without it"
        )
    return positions[jax.process_index()]
