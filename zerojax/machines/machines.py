"""Memory sizes and rates of a machine: the figures that a plan uses, each with its source.

    machine = zj.machine("h200", nodes=2)                     # by name
    machine = zj.machine("lab.toml")                          # from a file
    machine = dataclasses.replace(machine, host_bytes=2e12)   # a figure that no data sheet has

`machine.save` and `zerojax probe --out` write such files. An unknown figure is None: no data sheet
lists the host memory of a GPU's buyer. `Machine.need` returns a figure, or raises an error that
names the missing figure and how to provide it, so a plan never uses a number without a source.

Vendors publish peaks that no program reaches. `peak_flops` is the vendor's number, the reference
for utilization (MFU, HFU); `flops` and the other rates are what programs attain, which predictions
use. For a named machine, most rates are assumed: the vendor's figure times the fraction that
`zerojax.hlo.RATES` assumes for an H200. `machine.source` documents each figure.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from zerojax.hlo import Rates, rates_with
from zerojax.machines.machine_files import to_text
from zerojax.precision import PRECISIONS
from zerojax.user_values import as_int_or_float, as_integer, as_number

T = TypeVar("T")
GIVEN = "given"
COUNTS = ("nodes", "devices_per_node")
_MOST = 1e24
_LEAST_RATE = 1e-6
"""Bounds on figures: beyond them, the seconds and bytes derived from them would not be finite."""
_MOST_COUNT = 10**6
_DECIMAL = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BYTES = ("device_bytes", "host_bytes", "pinned_bytes", "disk_bytes", "disk_tbw_bytes")
BY_DTYPE = ("peak_flops", "flops")
_RATES = (
    "memory_rate",
    "link_up",
    "link_down",
    "link_both",
    "network_in_node",
    "network_between_nodes",
    "disk_read",
    "disk_write",
    "disk_both",
    "host_kernel",
)
FIGURES = (*_BYTES, *(f"{name}.{dtype}" for name in BY_DTYPE for dtype in PRECISIONS), *_RATES)
"""Names of all figures, as used in `Machine.need`, `Machine.source` and machine files."""
UNMEASURED = frozenset(
    {"network_between_nodes", "disk_tbw_bytes", *(f"peak_flops.{dtype}" for dtype in PRECISIONS)}
)
"""Figures that `zerojax probe` does not measure, because it runs on a single node."""
UNITS: Mapping[str, str] = MappingProxyType(
    {name: "B a device" if name == "device_bytes" else "B a node" for name in _BYTES}
    | {f"{name}.{dtype}": "FLOP/s a device" for name in BY_DTYPE for dtype in PRECISIONS}
    | {
        name: "B/s a node" if name.startswith(("disk", "host")) else "B/s a device"
        for name in _RATES
    }
)


class MissingFigureError(ValueError):
    """A machine lacks figures that a plan needs.

    Attributes:
      figures: names of the missing figures, such as "host_bytes".
    """

    def __init__(self, message: str, figures: Sequence[str] = ()) -> None:
        """Create the error.

        Args:
          message: message of the error.
          figures: names of the missing figures.
        """
        super().__init__(message)
        self.figures = tuple(figures)


class _Entries(Mapping[str, T]):
    """Immutable mapping, so that a machine can be hashed, copied and pickled."""

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


class _Sources(_Entries[str]):
    """Sources, with the figures that they describe.

    A figure that replaces one of these has a different source.
    """

    def __init__(self, texts: Mapping[str, str], figures: Mapping[str, float]) -> None:
        super().__init__(texts)
        self.figures = dict(figures)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory sizes and rates of one node or of several equal nodes.

    Rates are measured with all devices of a node active: if devices share a switch or a disk, the
    rate is lower than for one device alone.

    Attributes:
      name: name of the machine.
      nodes: number of hosts, each with the same devices.
      devices_per_node: number of devices per host.
      device_bytes: bytes of memory per device. A data sheet's GB counts as 1e9, although the device
        has a few per cent more.
      host_bytes: bytes of host memory per node.
      pinned_bytes: bytes of host memory that all processes of a node together can pin (on a GPU,
        XLA's pools, one per process).
      disk_bytes: bytes of swap disk per node; 0 if there is no disk.
      disk_tbw_bytes: bytes per node that may be written to the disks over their lifetime: the
        vendor's TBW rating.
      peak_flops: vendor's FLOP/s of dense products per device, by precision ("fp32", "bf16",
        "fp16"); fp32 is without TF32.
      flops: FLOP/s that products attain per device, by precision. A measured fp32 value may exceed
        the peak: JAX's default precision uses TF32 on GPUs that have it.
      memory_rate: bytes per second to and from device memory, per device.
      link_up: bytes per second from host memory to the device, per device.
      link_down: bytes per second from the device to host memory, per device.
      link_both: bytes per second per device with both directions busy, summed over the two.
      network_in_node: bytes per second that each device sends, while receiving at the same rate, in
        a ring over the devices of a node: in an all_gather of B bytes over N devices, each sends
        B (N-1)/N. NCCL calls this bus bandwidth.
      network_between_nodes: bytes per second that each device sends, while receiving at the same
        rate, in a ring over devices of several nodes.
      disk_read: bytes per second read from a node's disks.
      disk_write: bytes per second written to a node's disks.
      disk_both: bytes per second per node with reads and writes both active, summed over the two.
      host_kernel: bytes per second that the host update moves to and from host memory, per node.
      source: source of each figure, by figure name ("link_up", "flops.bf16"). A figure without a
        source is marked "given", and so is a figure that `dataclasses.replace` changed.

    Raises:
      ValueError: a figure is not a number above 0, a count is below 1, or a name in `flops`,
        `peak_flops` or `source` is unknown.
    """

    name: str
    nodes: int = 1
    devices_per_node: int = 1
    device_bytes: int | float | None = None
    host_bytes: int | float | None = None
    pinned_bytes: int | float | None = None
    disk_bytes: int | float | None = None
    disk_tbw_bytes: int | float | None = None
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_rate: float | None = None
    link_up: float | None = None
    link_down: float | None = None
    link_both: float | None = None
    network_in_node: float | None = None
    network_between_nodes: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_both: float | None = None
    host_kernel: float | None = None
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all entries and convert them to immutable mappings of Python numbers."""
        for name in ("name", *COUNTS):
            if wrong := find_wrong_entry(name, getattr(self, name)):
                raise ValueError(wrong)
        for name in (*BY_DTYPE, "source"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(
                    f"machine {self.name}: {name} is not a mapping, such as {{'bf16': 7e14}}"
                )
        figures = self.figures
        for name, value in figures.items():
            if wrong := find_wrong_entry(name, value):
                raise ValueError(f"machine {self.name}: {wrong}")
        # Convert NumPy numbers to Python numbers, which files can hold.
        for name in COUNTS:
            object.__setattr__(self, name, as_integer(getattr(self, name)))
        for name in (n for n in _BYTES if n in figures):
            object.__setattr__(self, name, int(figures[name]))
        for name in (n for n in _RATES if n in figures):
            object.__setattr__(self, name, as_int_or_float(figures[name]))
        for name in BY_DTYPE:
            by_dtype = getattr(self, name)
            entries = {d: as_int_or_float(v) for d, v in by_dtype.items() if v is not None}
            object.__setattr__(self, name, _Entries(entries))
        object.__setattr__(self, "source", self._sources())

    def _sources(self) -> _Sources:
        """Return the source of each figure; a figure that was replaced is marked as given."""
        source = self.source
        figures = self.figures
        for name, text in source.items():
            if wrong := find_wrong_entry(f"source.{name}", text):
                raise ValueError(f"machine {self.name}: {wrong}")
        old_figures = source.figures if isinstance(source, _Sources) else figures
        texts = dict.fromkeys(figures, GIVEN)
        for name, value in figures.items():
            if name in source and old_figures.get(name) == value:
                texts[name] = source[name]
        return _Sources(texts, figures)

    @property
    def devices(self) -> int:
        """Number of devices on all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def figures(self) -> dict[str, float]:
        """Known figures by name, in the order of `FIGURES`.

        Figures with a precision are named such as "flops.bf16".
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in (*_BYTES, *_RATES)}
        for name in BY_DTYPE:
            for dtype, value in getattr(self, name).items():
                values[f"{name}.{dtype}"] = value
        # Unknown names come last; they are refused when the machine is created.
        in_order = {name: values.pop(name, None) for name in FIGURES}
        in_order |= values
        return {name: value for name, value in in_order.items() if value is not None}

    def need(self, name: str) -> float:
        """Return one figure, in the units of `Machine`.

        Args:
          name: name of a figure, such as "link_up" or "flops.bf16".

        Raises:
          MissingFigureError: the figure is unknown; the message says how to provide it.
          ValueError: no figure has that name.
        """
        return self.needs(name)[0]

    def needs(self, *names: str) -> tuple[float, ...]:
        """Return several figures, in the units of `Machine`.

        Args:
          *names: names of figures, such as "link_up".

        Raises:
          MissingFigureError: figures are unknown; the message lists all of them.
          ValueError: no figure has such a name.
        """
        for name in names:
            if name not in FIGURES:
                raise ValueError(f"unknown machine figure {name!r}{nearest(name, FIGURES)}")
        figures = self.figures
        if missing := [name for name in names if name not in figures]:
            raise MissingFigureError(_missing_message(self.name, missing), missing)
        return tuple(figures[name] for name in names)

    def rates(self) -> Rates:
        """Return the rates of one device for `zerojax.hlo.simulate`.

        The rates of products, memory, link, disk and host kernel are the machine's. Rates of
        attention, and of kernels that read host memory, are scaled from products and link with the
        ratios that `zerojax.hlo.RATES` has for an H200. Everything else (launches, callbacks, and
        an unknown disk or host kernel) keeps the value assumed there.

        Raises:
          ValueError: the rate of 16-bit products, float32 products, memory or the link is unknown.
        """
        figures = self.figures
        if "flops.bf16" not in figures and "flops.fp16" in figures:
            half = "flops.fp16"
        else:
            half = "flops.bf16"
        products, single, memory, up, down = self.needs(
            half, "flops.fp32", "memory_rate", "link_up", "link_down"
        )
        link = min(up, down)  # Rates has one link rate for both directions
        optional = ("disk_read", "disk_write", "host_kernel")
        known = {name: figures[name] for name in optional if name in figures}
        return rates_with(
            products=products, products_float32=single, memory=memory, link=link, **known
        )

    def to_toml(self) -> str:
        """Return the machine as the text of a file that `zj.machine` reads."""
        counts = {name: getattr(self, name) for name in ("name", *COUNTS)}
        sources = {f"source.{name}": text for name, text in self.source.items() if text != GIVEN}
        return to_text(counts | self.figures | sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text of `to_toml` to a file, replacing an existing file.

        Args:
          path: path of the file.

        Raises:
          OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_toml())

    def __str__(self) -> str:
        """Return the figures as text, one per line with unit and source."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        devices = f"{self.devices_per_node} device{'s' * (self.devices_per_node > 1)}"
        rows = [f"{self.name}: {nodes} of {devices}"]
        for name, value in self.figures.items():
            rows.append(f"  {name:<22}{f'{value:.4g}':>10} {UNITS[name]:<16}{self.source[name]}")
        missing = [name for name in FIGURES if name not in self.figures and "." not in name]
        if missing:
            rows.append(f"  not given: {', '.join(missing)}")
        return "\n".join(rows)


def _missing_message(machine_name: str, missing: Sequence[str]) -> str:
    """Return the message for missing figures: their units, and how to provide them."""
    listed = ", ".join(f"{name} ({UNITS[name]})" for name in missing)
    top, _, dtype = missing[0].partition(".")
    example = f"{top}={{**machine.{top}, {dtype!r}: ...}}" if dtype else f"{top}=..."
    message = (
        f"machine {machine_name} has no figure for {listed}: set it with "
        f"dataclasses.replace(machine, {example}), or with a line `{missing[0]} = ...` in "
        "a TOML file"
    )
    if any(name not in UNMEASURED for name in missing):
        message += ", or measure this machine: zerojax probe --swap-dir DIR --out FILE"
    return message


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text in decimal units, such as "1.5 GB"."""
    for unit, name in _DECIMAL:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the likely intended name, or all names."""
    close = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose from {', '.join(names)}"


def find_wrong_entry(name: str, value: Any) -> str | None:
    """Return what is wrong with one entry of a machine, or None if it is valid."""
    if name in ("name", "base"):
        return None if _is_text(value) else f"{name} = {value!r}: a name is needed"
    if name.startswith("source."):
        figure = name.removeprefix("source.")
        if figure not in FIGURES:
            return f"source of {figure!r}, which is not a machine figure{nearest(figure, FIGURES)}"
        return None if _is_text(value) else f"{name} = {value!r}: text is needed"
    if name in COUNTS:
        count = as_integer(value)
        if count is not None and 1 <= count <= _MOST_COUNT:
            return None
        return f"{name} = {_shown(value)}: must be an integer from 1 to {_MOST_COUNT:,}"
    if name not in FIGURES:
        return _unknown_figure(name, value)
    return _find_wrong_figure(name, value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _unknown_figure(name: str, value: object) -> str:
    """Return why an entry is refused whose name is not a figure's."""
    top, _, dtype = name.partition(".")
    if top not in BY_DTYPE:
        names = ("name", "base", *COUNTS, *FIGURES)
        return f"{name!r} is not a machine figure{nearest(name, names)}"
    reason = f"{dtype!r} is not a precision" if dtype else "this figure is set per precision"
    choices = ", ".join(f"{top}.{d}" for d in PRECISIONS)
    return f"{name} = {value!r}: {reason}; choose from {choices}"


def _find_wrong_figure(name: str, value: Any) -> str | None:
    """Return what is wrong with the value of a figure, or None if it is valid."""
    number = as_number(value)
    is_number = number is not None and abs(number) <= _MOST
    if name in _BYTES:
        least = 0 if name == "disk_bytes" else 1
        if is_number and value >= least and value == int(value):
            return None
        return f"{name} = {_shown(value)}: must be whole bytes from {least} to {_MOST:g}"
    if is_number and value >= _LEAST_RATE:
        return None
    unit = "FLOP" if "." in name else "bytes"
    return f"{name} = {_shown(value)}: must be {unit} per second, from {_LEAST_RATE:g} to {_MOST:g}"


def _shown(value: object) -> str:
    """Return a value as text for an error message, with very long numbers and texts shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}.."
