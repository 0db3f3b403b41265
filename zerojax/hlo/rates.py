"""Rates that a simulation assumes of a machine: of the device, of its link to the host, of the host
and of its disk.

The figures of `RATES` are assumed. Each is a vendor's figure times a share that such work commonly
reaches, or a guess; the attribute says which, and what one H200 with PCIe 5 measured where it was
measured. Seconds that follow from them are predicted. `dataclasses.replace` puts measured rates in
their place:

    rates = dataclasses.replace(hlo.RATES["h200"], link=48e9)
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from zerojax.chips import CHIPS, Chip

_MOST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a machine does in a second; the defaults are for one H200 on PCIe 5 and are assumed, not
    measured.

    The vendor's figures are in `zerojax.chips`.

    Attributes:
      products: FLOPs a second of products in 16 bits; about 0.7 of the vendor's figure, assumed.
        Measured: 725e12.
      products_float32: FLOPs a second of products whose left side is float32; about 0.9 of the
        vendor's, assumed.
      attention: FLOPs a second of cuDNN's attention forward; assumed.
      attention_backward: the same backward; assumed.
      memory: bytes a second from and to device memory; about 0.83 of the vendor's, assumed.
        Measured: 4.08e12.
      link: bytes a second each way by a copy engine; about 0.87 of what PCIe's lanes can carry,
        assumed. Measured: 52.6e9 to the device, 53.0e9 to the host.
      graph_link: the same by a copy that is a node of a CUDA graph; assumed to be as on a stream.
        Measured: 54e9.
      kernel_link: bytes a second each way of a kernel that reads or writes host memory; assumed.
      launch_seconds: the least that a kernel or a copy takes; assumed.
      issue_seconds: what the host's thread takes to enqueue one operation; assumed.
      sync_seconds: from the end of the device's work until the host's thread that waits for it goes
        on; assumed.
      callback_seconds: Python's time in one callback; assumed.
      leaf_seconds: more of it for each array of 64 KiB or more; assumed.
      disk_read: bytes a second read from the disk; a vendor's figure for PCIe 4 x4.
      disk_write: bytes a second written to it; the same.
      host_kernel: bytes a second from and to host memory that the kernel of the host's update
        moves; assumed. Measured on 16 cores: 139e9 in float32, 122e9 with gradients and parameters
        in bfloat16.
      host_copy: bytes a second that one thread copies within host memory; assumed. Measured: 9.6e9.

    Raises:
      ValueError: a rate is not above 0, or a duration is below 0.
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_duration = field.name.endswith("_seconds")
            is_number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and abs(value) <= _MOST
            )
            if not is_number or not (value >= 0 if is_duration else value > 0):
                kind = (
                    "a duration, at least 0 seconds" if is_duration else "a rate, above 0 a second"
                )
                raise ValueError(f"{field.name} = {value!r}: it is {kind}, and finite")


def rates_with(
    *, products: float, products_float32: float, memory: float, link: float, **others: float
) -> Rates:
    """Return the rates of a machine of which a few figures are known.

    Attention is in proportion to products, and the link of kernels and of graphs to the link, as
    for an H200. The rest is the H200's, unless `others` replaces it.

    Args:
      products: as in `Rates`.
      products_float32: as in `Rates`.
      memory: as in `Rates`.
      link: as in `Rates`.
      **others: fields of `Rates` by name, such as `disk_read`.
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
        **others,
    )


def rates_of_chip(chip: Chip) -> Rates:
    """Return what is assumed of one chip: of each of its vendor's figures the share that `Rates`
    assumes of an H200's.

    What a data sheet does not have (launches, callbacks, the host and its disk) is as for an H200.
    """
    base, of = Rates(), CHIPS["h200"]
    return rates_with(
        products=base.products * (chip.half_peak / of.half_peak),
        products_float32=base.products_float32 * (chip.peak["fp32"] / of.peak["fp32"]),
        memory=base.memory * (chip.memory_rate / of.memory_rate),
        link=base.link * (chip.link_rate / of.link_rate),
    )


RATES: Mapping[str, Rates] = MappingProxyType(
    {name: rates_of_chip(chip) for name, chip in CHIPS.items()}
)
"""Rates by name of the chip in `zerojax.chips`; assumed, see `Rates`."""


def rates_of(rates: Rates | str) -> Rates:
    """Return rates, or those of a name.

    Raises:
      ValueError: no rates have that name.
    """
    if isinstance(rates, Rates):
        return rates
    if not isinstance(rates, str) or rates not in RATES:
        told = repr(rates) if isinstance(rates, str) else f"of type {type(rates).__name__}"
        raise ValueError(
            f"rates {told} are unknown: choose from {', '.join(RATES)}, or give an hlo.Rates; those of another machine are "
            'zerojax.machine("lab.toml").rates()'
        )
    return RATES[rates]
