"""The rates that a simulation assumes for a machine: device, host link, host and disk.

The figures in `RATES` are assumed. Each is a vendor's figure times the share that such work
commonly reaches, or a guess. The docstring of `Rates` says which, and gives the rate measured on
one H200 with PCIe 5 if there is one. Times computed from these rates are predicted. To use measured
rates instead, call `dataclasses.replace`:

    rates = dataclasses.replace(hlo.RATES["h200"], link=48e9)
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from zerojax.chips import CHIPS, Chip

_MOST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of a machine; the defaults are for one H200 on PCIe 5.

    The defaults are assumed, not measured. The vendor's figures are in `zerojax.chips`.

    Attributes:
      products: FLOPs per second of 16-bit products; about 0.7 of the vendor's figure, assumed.
        Measured: 725e12.
      products_float32: FLOPs per second of products whose left side is float32; about 0.9 of the
        vendor's figure, assumed.
      attention: FLOPs per second of cuDNN's attention forward; assumed.
      attention_backward: FLOPs per second of cuDNN's attention backward; assumed.
      memory: bytes per second read from and written to device memory; about 0.83 of the vendor's
        figure, assumed. Measured: 4.08e12.
      link: bytes per second in each direction of a copy engine; about 0.87 of what PCIe's lanes can
        carry, assumed. Measured: 52.6e9 to the device, 53.0e9 to the host.
      graph_link: bytes per second in each direction of a copy that is a node of a CUDA graph;
        assumed to equal `link`. Measured: 54e9.
      kernel_link: bytes per second in each direction of a kernel that reads or writes host memory;
        assumed.
      launch_seconds: least duration of a kernel or a copy; assumed.
      issue_seconds: seconds that the host thread takes to enqueue one operation; assumed.
      sync_seconds: seconds from the end of the device's work until a waiting host thread continues;
        assumed.
      callback_seconds: seconds of Python in one callback; assumed.
      leaf_seconds: further seconds of Python for each array of 64 KiB or more in a callback;
        assumed.
      disk_read: bytes per second read from the disk; a vendor's figure for PCIe 4 x4.
      disk_write: bytes per second written to the disk; a vendor's figure for PCIe 4 x4.
      host_kernel: bytes per second that the host update's kernel reads from and writes to host
        memory; assumed. Measured on 16 cores: 139e9 in float32, 122e9 with gradients and parameters
        in bfloat16.
      host_copy: bytes per second that one thread copies within host memory; assumed. Measured:
        9.6e9.

    Raises:
      ValueError: a rate is not above 0, a duration is below 0, or a value is not finite.
    """

    products: float = 700e12
    products_float32: float = 60e12
    attention: float = 550e12
    attention_backward: float = 450e12
    memory: float = 4.0e12
    link: float = 55e9
    graph_link: float = 55e9
    kernel_link: float = 45e9
    launch_seconds: float = 3e-6
    issue_seconds: float = 2e-6
    sync_seconds: float = 15e-6
    callback_seconds: float = 150e-6
    leaf_seconds: float = 15e-6
    disk_read: float = 7e9
    disk_write: float = 5e9
    host_kernel: float = 150e9
    host_copy: float = 10e9

    def __post_init__(self) -> None:
        """Check that every rate is above 0 and every duration at least 0."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_duration = field.name.endswith("_seconds")
            is_number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and abs(value) <= _MOST
            )
            if not is_number or not (value >= 0 if is_duration else value > 0):
                if is_duration:
                    kind = "a duration, at least 0 seconds"
                else:
                    kind = "a rate, above 0 a second"
                raise ValueError(f"{field.name} = {value!r}: it must be {kind}, and finite")


def rates_with(
    *, products: float, products_float32: float, memory: float, link: float, **other_rates: float
) -> Rates:
    """Return the rates of a machine for which only a few figures are known.

    Attention's rates are scaled from an H200's by `products`, and the links of kernels and of
    graphs by `link`. All other rates are the H200's, unless `other_rates` replaces them.

    Args:
      products: FLOPs per second of 16-bit products.
      products_float32: FLOPs per second of products whose left side is float32.
      memory: bytes per second read from and written to device memory.
      link: bytes per second in each direction of a copy engine.
      **other_rates: further fields of `Rates` by name, such as `disk_read`.
    """
    base = Rates()
    return dataclasses.replace(
        base,
        products=products,
        products_float32=products_float32,
        attention=base.attention * (products / base.products),
        attention_backward=base.attention_backward * (products / base.products),
        memory=memory,
        link=link,
        graph_link=base.graph_link * (link / base.link),
        kernel_link=base.kernel_link * (link / base.link),
        **other_rates,
    )


def rates_of_chip(chip: Chip) -> Rates:
    """Return the assumed rates of a chip.

    Each rate is the same share of the vendor's figure that `Rates` assumes for an H200. Rates that
    a data sheet does not have (launches, callbacks, the host and its disk) equal an H200's.
    """
    base = Rates()
    h200 = CHIPS["h200"]
    return rates_with(
        products=base.products * (chip.half_peak / h200.half_peak),
        products_float32=base.products_float32 * (chip.peak["fp32"] / h200.peak["fp32"]),
        memory=base.memory * (chip.memory_rate / h200.memory_rate),
        link=base.link * (chip.link_rate / h200.link_rate),
    )


RATES: Mapping[str, Rates] = MappingProxyType(
    {name: rates_of_chip(chip) for name, chip in CHIPS.items()}
)
"""Assumed rates by the chip's name in `zerojax.chips`; see `Rates`."""


def find_rates(rates: Rates | str) -> Rates:
    """Return `rates` itself, or the rates with that name.

    Raises:
      ValueError: no rates have that name.
    """
    if isinstance(rates, Rates):
        return rates
    if not isinstance(rates, str) or rates not in RATES:
        shown = repr(rates) if isinstance(rates, str) else f"of type {type(rates).__name__}"
        raise ValueError(
            f"rates {shown} are unknown: choose from {', '.join(RATES)}, or give an hlo.Rates; for "
            'another machine use zerojax.machine("lab.toml").rates()'
        )
    return RATES[rates]
