"""The host update of one leaf: its kernel, and where the kernel's arrays are stored.

Each array of a leaf is stored in host memory (None) or in the records of a kind on disk
(`OnRecord`), independently of the leaf's other arrays. Its role determines how an update uses the
records:

    stashed gradient                 read
    weight, states                   update      read, changed in the buffer, written
    parameters cast from the weight  write       filled, regardless of their contents
"""

import dataclasses
import functools
from typing import NamedTuple

from host_offload.engine import Mode
from host_offload.host_update.kernel import Kernel


class OnRecord(NamedTuple):
    """A leaf's place on disk.

    Attributes:
      kind: kind of the records.
      leaf: index among the leaves of a record.
    """

    kind: str
    leaf: int


Rest = OnRecord | None
"""Where an array is stored: in records on disk, or in host memory (None)."""


@dataclasses.dataclass(frozen=True, eq=False)
class LeafKernel:
    """How one leaf is updated.

    Attributes:
      kernel: kernel from (gradient, weight, states, scalars) to (weight, states, and the cast
        weight if `casts`).
      scalars: slice of this leaf in the vector of all leaves' scalars.
      arrays: where the kernel's arrays are stored: the weight (unless on the device), the states,
        and the parameters cast from the weight (unless on the device).
      num_states: number of arrays of optimizer state.
      stacked: whether the arrays are stacks of all layers.
      weight_on_device: whether the float32 weight lives on the device. It is then an operand of the
        callback, and the new weight a result.
      casts: whether the kernel also returns the weight in the compute dtype.
      params_on_device: whether the parameters are a result of the callback; if not, they are
        written to host memory.
      pending: whether a step updates with the gradient of the previous step, which is one more
        array in host memory. With a delayed update, the new parameters do not overwrite the old
        ones, and the weight is updated in place only if `casts`.
      grad: records in which the gradient is stashed; None if it is not stashed on disk.
    """

    kernel: Kernel
    scalars: slice
    arrays: tuple[Rest, ...]
    num_states: int
    stacked: bool
    weight_on_device: bool
    casts: bool
    params_on_device: bool
    pending: bool = False
    grad: Rest = None

    @functools.cached_property
    def records(self) -> dict[str, Mode]:
        """How an update uses its records, by kind."""
        modes: dict[str, Mode] = {} if self.grad is None else {self.grad.kind: "read"}
        stores_cast = self.casts and not self.params_on_device
        last = len(self.arrays) - 1
        for n, place in enumerate(self.arrays):
            if place is not None:
                modes[place.kind] = "write" if stores_cast and n == last else "update"
        return modes


@dataclasses.dataclass
class Traffic:
    """Bytes that crossed the link since the last reset, summed over devices and steps.

    Attributes:
      to_host: bytes copied from devices to the host.
      to_device: bytes copied from the host to devices.
    """

    to_host: int = 0
    to_device: int = 0
