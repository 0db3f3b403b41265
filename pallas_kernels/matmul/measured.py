"""Measurements of the kernel of `matmul`: the table `measured.json`.

The table chooses the kernel's sizes, and decides where `implementation=None` uses the kernel.

A row is one problem on one chip. It holds the sizes of the kernel that were fastest in a sweep, and
the seconds per call of the kernel, of XLA's form, and of JAX's own kernel if that supports the
problem. `benchmarks/kernels.py sweep` writes rows on a machine with a GPU.

    {"chip": "H200", "num_cores": 132, "m": 8192, .., "config": {..}, "seconds": ..,
     "xla_seconds": .., "jax_seconds": .., ..}

A row applies to calls on its chip with the same number of cores, the same N, K, weights, dtypes and
activation, and M from its own up to, and excluding, twice its own: a larger M leaves less of the
last wave of tiles empty. M that is not divisible by 8 is padded and has rows of its own. If several
rows apply, the row of the largest M is used. A call to which no row applies takes the sizes of
`config.choose` if the kernel is named, and XLA's form otherwise. Nothing is inferred from rows that
differ in any other dim.

Only forward is measured, on one device, without writing the products that the derivative needs.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.matmul.config import Config, Problem
from pallas_kernels.matmul.reference import ACTIVATIONS
from pallas_kernels.shared_memory import TILE_ROWS

PATH = pathlib.Path(__file__).with_name("measured.json")
# The kernel is chosen by default if it takes at most this fraction of XLA's time: the margin keeps
# noise from changing programs.
FASTER = 0.98
REACH = 2  # a row applies to M below REACH times its own

DIMS = ("m", "n", "k", "num_weights")
TERMS = ("bias_dtype", "accumulate_dtype")  # null if the term is absent
DTYPES = ("dtype", "out_dtype", *TERMS)
TIMES = ("seconds", "xla_seconds", "jax_seconds")
ABOUT = ("device", "jax", "date")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one problem.

    Attributes:
      chip, num_cores: the chip, as in `dispatch.Target`.
      problem: dims and dtypes on one device.
      activation: a key of `reference.ACTIVATIONS`.
      config: the sizes that were fastest.
      seconds: median seconds per call of the kernel.
      xla_seconds: median seconds per call of XLA's form, in the same run.
      jax_seconds: median seconds per call of JAX's own `hopper_matmul_mgpu` with its fastest sizes,
        in the same run; None if it does not support the problem.
      device, jax, date: the device's full name, JAX's version, and the day.
    """

    chip: str
    num_cores: int
    problem: Problem
    activation: str | None
    config: Config
    seconds: float
    xla_seconds: float
    jax_seconds: float | None
    device: str
    jax: str
    date: str

    def __post_init__(self):
        """Raise ValueError if a field is not valid."""
        dims = {name: getattr(self.problem, name) for name in DIMS} | {"num_cores": self.num_cores}
        are_sizes = all(type(value) is int and value >= 1 for value in dims.values())
        if not are_sizes or self.problem.num_weights > 2:
            raise ValueError(f"{dims}: integers of 1 or more, and one weight or two, are needed")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} is unknown: choose from "
                f"{', '.join(map(repr, ACTIVATIONS))}"
            )
        for name in TIMES:
            value = getattr(self, name)
            if value is None and name == "jax_seconds":
                continue
            if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: seconds above 0 are needed")
        texts = {name: getattr(self, name) for name in ("chip", *ABOUT)}
        bad = [name for name, text in texts.items() if not isinstance(text, str) or not text]
        if bad:
            raise ValueError(f"{', '.join(bad)}: text is needed")
        if self.config.num_cores > self.num_cores:
            raise ValueError(
                f"config has num_cores={self.config.num_cores}, and the chip {self.num_cores}"
            )
        self.problem.check(self.config)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that is unique in a table: chip, number of cores, activation and problem."""
        return self.chip, self.num_cores, self.activation, self.problem

    @property
    def over_xla(self) -> float:
        """Ratio of the kernel's time to the time of XLA's form."""
        return self.seconds / self.xla_seconds

    @property
    def is_faster(self) -> bool:
        """Whether the kernel is faster than XLA's form by enough to be chosen by default."""
        return self.over_xla <= FASTER

    def serves(self, problem: Problem, activation: str | None, target: Target) -> bool:
        """Return whether the row applies to a call."""
        measured = self.problem
        is_same_kernel = (self.chip, self.num_cores, self.activation) == (
            target.chip,
            target.num_cores,
            activation,
        )
        return (
            is_same_kernel
            and dataclasses.replace(measured, m=problem.m) == problem
            and measured.m <= problem.m < REACH * measured.m
            and (measured.m % TILE_ROWS == 0) == (problem.m % TILE_ROWS == 0)
        )


def find(
    rows: Iterable[Row], problem: Problem, activation: str | None, target: Target
) -> Row | None:
    """Return the row that applies to a call, or None."""
    serving = [row for row in rows if row.serves(problem, activation, target)]
    return max(serving, key=lambda row: row.problem.m, default=None)


@functools.cache
def table() -> tuple[Row, ...]:
    """Return the rows of `measured.json`, which is read once.

    Raises:
      ValueError: the file is malformed; the message names the row and the fault.
    """
    return parse(PATH.read_text(), str(PATH))


def parse(text: str, name: str) -> tuple[Row, ...]:
    """Return the rows of a table.

    Args:
      text: the table in JSON.
      name: name of the table, for messages.

    Raises:
      ValueError: the table is malformed; the message has `name`, the row and the fault.
    """
    try:
        data = json.loads(text)
    except ValueError as e:
        raise ValueError(f"{name}: no JSON: {e}") from e
    if not isinstance(data, dict) or set(data) != {"rows"} or not isinstance(data["rows"], list):
        raise ValueError(f'{name}: {{"rows": [..]}} is needed')
    rows: dict[Any, Row] = {}
    for number, fields in enumerate(data["rows"]):
        try:
            row = _row(fields)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{name}: row {number}: {e}") from e
        if row.key in rows:
            raise ValueError(f"{name}: row {number}: an earlier row has the same chip and problem")
        rows[row.key] = row
    return tuple(rows.values())


def _row(fields: Any) -> Row:
    if not isinstance(fields, Mapping):
        raise ValueError(f"an object is needed, not {type(fields).__name__}")
    row_fields = ("chip", "num_cores", "activation", *TIMES, *ABOUT)
    needed = {*row_fields, *DIMS, *DTYPES, "config"}
    if set(fields) != needed:
        raise ValueError(
            f"without {sorted(needed - set(fields))}, and with the unknown "
            f"{sorted(set(fields) - needed)}"
        )
    sizes = fields["config"]
    if not isinstance(sizes, Mapping) or any(type(size) is not int for size in sizes.values()):
        raise ValueError(f"config={sizes!r}: an object of integers is needed")
    missing = sorted({field.name for field in dataclasses.fields(Config)} - set(sizes))
    if missing:
        raise ValueError(f"config is without {missing}")
    bad = []
    for name in DTYPES:
        is_absent_term = name in TERMS and fields[name] is None
        if not isinstance(fields[name], str) and not is_absent_term:
            bad.append(name)
    if bad:
        raise ValueError(f"{', '.join(bad)}: names of dtypes are needed")
    dtypes: dict[str, Any] = {name: fields[name] and jnp.dtype(fields[name]) for name in DTYPES}
    problem = Problem(**{name: fields[name] for name in DIMS}, **dtypes)
    values = {name: fields[name] for name in row_fields}
    return Row(problem=problem, config=Config(**sizes), **values)


def dump(rows: Iterable[Row]) -> str:
    """Return a table's text, one line per row, ordered by chip and problem."""

    def position(row: Row) -> tuple[Any, ...]:
        problem = row.problem
        return (row.chip, row.num_cores, problem.n, problem.k, problem.m, str(row.key))

    lines = []
    for row in sorted(rows, key=position):
        fields: dict[str, Any] = {"chip": row.chip, "num_cores": row.num_cores}
        fields |= {name: getattr(row.problem, name) for name in DIMS}
        for name in DTYPES:
            dtype = getattr(row.problem, name)
            fields[name] = dtype and str(dtype)
        fields |= {"activation": row.activation, "config": dataclasses.asdict(row.config)}
        fields |= {name: getattr(row, name) for name in (*TIMES, *ABOUT)}
        lines.append("\n    " + json.dumps(fields))
    return '{\n  "rows": [' + ",".join(lines) + ("\n  " if lines else "") + "]\n}\n"


def merged(rows: Iterable[Row], new: Iterable[Row]) -> tuple[Row, ...]:
    """Return a table in which each new row replaces the row of the same chip and problem."""
    by_key = {row.key: row for row in rows}
    by_key |= {row.key: row for row in new}
    return tuple(by_key.values())
