"""What a machine has and how fast it is: the figures that a plan takes, each with its source.

    machine = zj.machine("h200", nodes=2)                   # by name
    machine = zj.machine("lab.toml")                        # from a file, as `machine.save` and `zerojax probe --out` write it
    machine = dataclasses.replace(machine, host_bytes=2e12)  # a figure that a name cannot know

A figure is None where nobody gave it: the host memory of a GPU's buyer is in no data sheet.
  `Machine.need` returns a figure or
says which is missing and how to give it, so a plan never rests on a number that nobody named.

Vendors print peaks, and no program reaches them. `peak_flops` is the vendor's, which utilization
(MFU, HFU) is measured against; `flops` and the other rates are what programs attain, which
predictions take. For a named machine most of these are assumed: the vendor's figure times the share
that `zerojax.hlo.RATES` assumes of an H200. `machine.source` tells of each.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from zerojax.given import as_int_or_float, as_integer, as_number
from zerojax.hlo import Rates, rates_with
from zerojax.machines.machine_files import to_text
from zerojax.precision import PRECISIONS

T = TypeVar("T")
GIVEN = "given"
COUNTS = ("nodes", "devices_per_node")
_MOST, _LEAST_RATE = 1e24, 1e-6
"""Figures beyond these are no machine's: seconds and bytes that follow from them would no longer be
finite numbers.
"""
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
"""Names of all figures, as `Machine.need` takes them, a `source` has them and a file writes them.
"""
UNMEASURED = frozenset(
    {"network_between_nodes", "disk_tbw_bytes", *(f"peak_flops.{dtype}" for dtype in PRECISIONS)}
)
"""Figures that `zerojax probe`, which runs on one node, does not measure."""
UNITS: Mapping[str, str] = MappingProxyType(
    {name: "B a device" if name == "device_bytes" else "B a node" for name in _BYTES}
    | {f"{name}.{dtype}": "FLOP/s a device" for name in BY_DTYPE for dtype in PRECISIONS}
    | {
        name: "B/s a node" if name.startswith(("disk", "host")) else "B/s a device"
        for name in _RATES
    }
)


class _Entries(Mapping[str, T]):
    """Entries by name that stay as they are, so that a machine is hashed, copied and pickled."""

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
    """Sources, and the figures that they were said of: what replaces such a figure is from
    elsewhere.
    """

    def __init__(self, texts: Mapping[str, str], figures: Mapping[str, float]) -> None:
        super().__init__(texts)
        self.figures = dict(figures)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What one or several equal nodes have, and how fast they are.

    Rates are those with all devices of a node at work: where they share a switch or a disk, that is
      less than one alone gets.

    Attributes:
      name: of the machine.
      nodes: hosts, each with the same devices.
      devices_per_node: devices of a host.
      device_bytes: bytes of memory of a device. A data sheet's GB counts as 1e9, and the device has
        a few per cent more.
      host_bytes: bytes of memory of a node.
      pinned_bytes: bytes of it that a node's processes can pin in all (on a GPU XLA's pools, one a
        process).
      disk_bytes: bytes of disk for swapping, a node; 0: there is none.
      disk_tbw_bytes: bytes that may be written to these disks in their life, a node: the vendor's
        TBW.
      peak_flops: by precision ("fp32", "bf16", "fp16"), the vendor's FLOP/s of dense products, a
        device; of fp32 without TF32.
      flops: likewise, FLOP/s that products attain. Measured ones of fp32 may be above the peak:
        JAX's default precision takes TF32 on GPUs that have it.
      memory_rate: bytes a second from and to device memory, a device.
      link_up: bytes a second from host memory to a device.
      link_down: bytes a second from a device to host memory.
      link_both: bytes a second, the sum of the two ways, when both are busy; a device.
      network_in_node: bytes a second that each device sends, receiving as many, in a ring over the
        devices of a node: of an all_gather of B bytes over N it sends B (N-1)/N. NCCL calls it bus
        bandwidth.
      network_between_nodes: the same in a ring over devices of several nodes.
      disk_read: bytes a second read from a node's disks.
      disk_write: bytes a second written to them.
      disk_both: bytes a second, reads and writes together, when both are busy; a node.
      host_kernel: bytes a second from and to host memory that the host's update moves; a node.
      source: where each figure is from, by its name ("link_up", "flops.bf16"). A figure given
        without one is "given", and so is one that `dataclasses.replace` puts in the place of
        another.

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
        for name in ("name", *COUNTS):
            if wrong := what_is_wrong(name, getattr(self, name)):
                raise ValueError(wrong)
        if missing := [
            name for name in (*BY_DTYPE, "source") if not isinstance(getattr(self, name), Mapping)
        ]:
            raise ValueError(
                f"machine {self.name}: {missing[0]} is not a mapping, such as {{'bf16': 7e14}}"
            )
        figures = self.figures
        for name, value in figures.items():
            if wrong := what_is_wrong(name, value):
                raise ValueError(f"machine {self.name}: {wrong}")
        # Numbers of numpy become Python's own, which files hold.
        for name in COUNTS:
            object.__setattr__(self, name, as_integer(getattr(self, name)))
        for name in (n for n in _BYTES if n in figures):
            object.__setattr__(self, name, int(figures[name]))
        for name in (n for n in _RATES if n in figures):
            object.__setattr__(self, name, as_int_or_float(figures[name]))
        for name in BY_DTYPE:
            entries = {
                d: as_int_or_float(v) for d, v in getattr(self, name).items() if v is not None
            }
            object.__setattr__(self, name, _Entries(entries))
        object.__setattr__(self, "source", self._sources())

    def _sources(self) -> _Sources:
        said, figures = self.source, self.figures
        for name, text in said.items():
            if wrong := what_is_wrong(f"source.{name}", text):
                raise ValueError(f"machine {self.name}: {wrong}")
        old = said.figures if isinstance(said, _Sources) else figures
        texts = {
            name: said[name] if name in said and old.get(name) == figures[name] else GIVEN
            for name in figures
        }
        return _Sources(texts, figures)

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def figures(self) -> dict[str, float]:
        """The figures that are given, by name, in the order of `FIGURES`; those of a precision as
        "flops.bf16".
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in (*_BYTES, *_RATES)}
        given |= {
            f"{name}.{dtype}": value
            for name in BY_DTYPE
            for dtype, value in getattr(self, name).items()
        }
        known = {name: given.pop(name, None) for name in FIGURES}
        return {name: value for name, value in (known | given).items() if value is not None}

    def need(self, name: str) -> float:
        """Return a figure, such as "link_up" or "flops.bf16".

        Raises:
          ValueError: nobody gave it; the message says how to. Or no figure has that name.
        """
        return self.needs(name)[0]

    def needs(self, *names: str) -> tuple[float, ...]:
        """Return several figures; the error names all that are missing.

        Raises:
          ValueError: as `need`.
        """
        for name in names:
            if name not in FIGURES:
                raise ValueError(f"a machine has no figure {name!r}{nearest(name, FIGURES)}")
        figures = self.figures
        if missing := [name for name in names if name not in figures]:
            which = ", ".join(f"{name} ({UNITS[name]})" for name in missing)
            top, _, dtype = missing[0].partition(".")
            example = f"{top}={{**machine.{top}, {dtype!r}: ...}}" if dtype else f"{top}=..."
            measured = any(name not in UNMEASURED for name in missing)
            raise ValueError(
                f"machine {self.name}: nobody gave {which}; give it by dataclasses.replace(machine, {example}), or as a "
                f"line `{missing[0]} = ...` of a TOML file"
                + (
                    ", or measure this machine: zerojax probe --swap-dir DIR --out FILE"
                    if measured
                    else ""
                )
            )
        return tuple(figures[name] for name in names)

    def rates(self) -> Rates:
        """Return the rates of one device for `zerojax.hlo.simulate`.

        Products, memory, link, disk and host kernel are the machine's. Attention and kernels that
        read host memory are in proportion to products and link as `zerojax.hlo.RATES` has them of
        an H200; what a machine has no figure for (launches, callbacks; a disk or host kernel that
        nobody gave) is as assumed there.

        Raises:
          ValueError: products in 16 bits or float32, memory or the link are not given.
        """
        figures = self.figures
        half = (
            "flops.fp16"
            if "flops.bf16" not in figures and "flops.fp16" in figures
            else "flops.bf16"
        )
        products, single, memory, up, down = self.needs(
            half, "flops.fp32", "memory_rate", "link_up", "link_down"
        )
        link = min(up, down)  # Rates has one for each way
        given = {
            name: figures[name]
            for name in ("disk_read", "disk_write", "host_kernel")
            if name in figures
        }
        return rates_with(
            products=products, products_float32=single, memory=memory, link=link, **given
        )

    def to_toml(self) -> str:
        """Return the machine as the text of a file that `zj.machine` reads."""
        counts = {name: getattr(self, name) for name in ("name", *COUNTS)}
        sources = {f"source.{name}": text for name, text in self.source.items() if text != GIVEN}
        return to_text(counts | self.figures | sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_toml` to a file, in place of what is there.

        Raises:
          OSError: it cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_toml())

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        rows = [
            f"{self.name}: {nodes} of {self.devices_per_node} device{'s' * (self.devices_per_node > 1)}"
        ]
        for name, value in self.figures.items():
            rows.append(f"  {name:<22}{f'{value:.4g}':>10} {UNITS[name]:<16}{self.source[name]}")
        if missing := [name for name in FIGURES if name not in self.figures and "." not in name]:
            rows.append(f"  not given: {', '.join(missing)}")
        return "\n".join(rows)


def size_of(num_bytes: float) -> str:
    """Return bytes in decimal units."""
    for unit, name in _DECIMAL:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def nearest(name: str, names: Any) -> str:
    """Return the end of an error's message: the name that was meant, or all."""
    close = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose from {', '.join(names)}"


def what_is_wrong(name: str, value: Any) -> str | None:
    """Say what is wrong with one entry of a machine, or None."""
    if name in ("name", "base"):
        return None if isinstance(value, str) and value else f"{name} = {value!r}: a name is needed"
    if name.startswith("source."):
        if (figure := name.removeprefix("source.")) not in FIGURES:
            return (
                f"source of {figure!r}, which is no figure of a machine{nearest(figure, FIGURES)}"
            )
        return None if isinstance(value, str) and value else f"{name} = {value!r}: a text is needed"
    number = as_number(value)
    is_number = number is not None and abs(number) <= _MOST
    if name in COUNTS:
        count = as_integer(value)
        fits = count is not None and 1 <= count <= _MOST_COUNT
        return (
            None
            if fits
            else f"{name} = {_shown(value)}: a whole number, at least 1, is needed, at most {_MOST_COUNT:,}"
        )
    if name not in FIGURES:
        top, _, dtype = name.partition(".")
        if top in BY_DTYPE:
            what = f"{dtype!r} is no precision" if dtype else "it is by precision"
            return f"{name} = {value!r}: {what}; {', '.join(f'{top}.{d}' for d in PRECISIONS)} are known"
        return f"{name!r} is no figure of a machine{nearest(name, ('name', 'base', *COUNTS, *FIGURES))}"
    if name in _BYTES:
        least = 0 if name == "disk_bytes" else 1
        fits = is_number and value >= least and value == int(value)
        return (
            None
            if fits
            else f"{name} = {_shown(value)}: whole bytes, at least {least}, are needed, at most {_MOST:g}"
        )
    unit = "FLOP" if "." in name else "bytes"
    fits = is_number and value >= _LEAST_RATE
    return (
        None
        if fits
        else f"{name} = {_shown(value)}: {unit} a second, above 0, are needed, {_LEAST_RATE:g} to {_MOST:g}"
    )


def _shown(value: object) -> str:
    """Return a value as an error shows it: a number of a thousand digits is cut."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}.."
