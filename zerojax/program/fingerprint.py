"""The parts of a program that all processes of a run must have in common, as lines of text.

A function is compared by its trace: hyperparameters are hidden in the closures of an optimizer or a
loss, but each is a literal or a constant of the trace. The lines of a trace are its equations with
their shapes, plain parameters and constants, counted and sorted. Equal layers therefore share a
line, and the order of the trace does not matter:

    2 x mul(float32[16,40], 0.001) -> float32[16,40]

Details that could differ between equal programs are left out: names of variables, objects with
addresses, and parameters of callbacks.
"""

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from zerojax.state import Layout
from zerojax.trees import Batch

_LOCAL = ("swap_dir",)
"""Config fields that may differ between processes: each process has its own disk."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST_SHOWN = 4
_MOST_HASHED = 1 << 24
"""Most elements of a constant that are shown, and most bytes of it that are hashed."""


def build_parts(layout: Layout) -> dict[str, list[str]]:
    """Return the parts that processes compare when they build a program, as lines by name."""
    config = layout.config
    mesh = layout.mesh
    fields = [field.name for field in dataclasses.fields(config) if field.name not in _LOCAL]
    return {
        "versions": [f"{name} {version(name)}" for name in ("jax", "jaxlib")],
        "mesh": [
            f"axes {dict(mesh.shape)}",
            f"devices {[device.id for device in mesh.devices.flat]}",
        ],
        "config": [f"{name}={getattr(config, name)!r}" for name in fields],
        "model": [
            f"{leaf.name} {leaf.dtype}{list(leaf.shape)}{' frozen' if leaf.frozen else ''}"
            for leaf in layout.all_leaves
        ],
        "optimizer's state": trace_lines(jax.make_jaxpr(layout.tx.init)(layout.abstract_params)),
        "optimizer": trace_lines(layout.update_jaxpr),
    }


def key_lines(key: jax.Array) -> list[str]:
    """Return the lines that processes compare of a random key."""
    return [f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"]


def batch_key(batch: Batch) -> Any:
    """Return a hashable key for the shapes and dtypes of a batch, as this process gives it."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((getattr(a, "shape", None), getattr(a, "dtype", type(a))) for a in leaves)


def batch_lines(batch: Batch) -> list[str]:
    """Return one line for each leaf of a batch, with the shape that this process gives."""
    return [
        f"{jax.tree_util.keystr(path) or 'batch'} {_leaf(a)}"
        for path, a in jax.tree_util.tree_leaves_with_path(batch)
    ]


def trace_lines(closed: jex.ClosedJaxpr) -> list[str]:
    """Return the lines of a traced function, sorted, each with its count."""
    counts = Counter(_equations(closed.jaxpr, closed.consts))
    return [f"{count} x {line}" for line, count in sorted(counts.items())]


def _equations(jaxpr: jex.Jaxpr, consts: Sequence[Any]) -> Iterator[str]:
    for const in consts:
        yield f"constant {_constant(const)}"
    yield f"results {', '.join(map(_operand, jaxpr.outvars))}"
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        # A callback's parameters belong to this process: functions, and possibly their addresses.
        params = {} if "callback" in name or "ffi" in name else eqn.params
        plain = {key: _plain(value) for key, value in sorted(params.items()) if value is not None}
        shown = "".join(f" {key}={text}" for key, text in plain.items() if text is not None)
        yield (
            f"{name}({', '.join(map(_operand, eqn.invars))}){shown} -> "
            f"{', '.join(map(_operand, eqn.outvars))}"
        )
        for key in sorted(params):
            for inner in _jaxprs(params[key]):
                is_closed = isinstance(inner, jex.ClosedJaxpr)
                yield from _equations(
                    inner.jaxpr if is_closed else inner, inner.consts if is_closed else ()
                )


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _jaxprs(each)


def _operand(atom: Any) -> str:
    if isinstance(atom, jex.Literal):
        return _constant(atom.val)
    return _leaf(atom.aval)


def _leaf(a: Any) -> str:
    if not hasattr(a, "shape") or not hasattr(a, "dtype"):
        return type(a).__name__
    return f"{a.dtype}[{','.join(map(str, a.shape))}]"


def _constant(value: Any) -> str:
    """Return the text of a constant: its value if it is small, else its shape and a digest."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return _leaf(value)  # spread over processes: none has the full array
    try:
        array = np.asarray(value)
    except TypeError:  # a random key
        return _leaf(value)
    if array.dtype == object:
        return type(value).__name__
    if array.size <= _MOST_SHOWN:
        return f"{array.dtype} {array.tolist()}" if array.ndim else str(array)
    head = array.reshape(-1)[: _MOST_HASHED // array.itemsize]
    return f"{_leaf(array)} {hashlib.sha256(head.tobytes()).hexdigest()[:16]}"


def _plain(value: Any) -> str | None:
    """Return the text of a plain value, or of tuples and dicts of plain values; else None."""
    if isinstance(value, bool | int | float | complex | np.dtype | np.generic):
        return str(value)
    if isinstance(value, str):
        return _ADDRESS.sub("0x", value)
    if isinstance(value, tuple | list):
        inner = ["None" if each is None else _plain(each) for each in value]
        return None if None in inner else f"({', '.join(map(str, inner))})"
    if isinstance(value, Mapping):
        pairs = sorted((str(key), _plain(each)) for key, each in value.items())
        return None if any(each is None for _, each in pairs) else str(pairs)
    return None
