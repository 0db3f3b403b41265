"""The host update of one leaf: its kernel, where the arrays of the kernel are stored, and what
crosses the link.

Each array of a leaf is stored in host memory (None) or in the records of a kind on disk
(`OnRecord`), independently of the others. This determines how an update uses each kind of record:

    stashed gradient              read
    weight, states                update      read, changed in the buffer, written
    parameters that are cast to   write       filled, whatever their contents
"""

import dataclasses
import functools
from typing import NamedTuple

from host_offload.engine import Mode
from host_offload.host_update.kernel import Kernel


class OnRecord(NamedTuple):
    """Where a leaf is stored on disk.

    Attributes:
      kind: of the records.
      leaf: its index among the leaves of a record.
    """

    kind: str
    leaf: int


Rest = OnRecord | None
"""Where an array is stored: in a record, or in host memory (None)."""


@dataclasses.dataclass(frozen=True, eq=False)
class LeafKernel:
    """How one leaf is updated.

    Attributes:
      kernel: from (gradient, weight, states, scalars) to (weight, states, and the cast weight if
        `casts`).
      scalars: the slice of this leaf in the vector of all scalars.
      arrays: where the arrays of the kernel are stored: the weight (unless on the device), the
        states, and the parameters that it casts to (unless on the device).
      num_states: leaves of optimizer state.
      stacked: whether its arrays are stacks of all layers.
      weight_on_device: the float32 weight is no host array: it is an operand, and the new one a
        result.
      casts: the kernel returns a compute-dtype weight besides.
      params_on_device: the parameters are a result of the callback; else they are written to the
        host.
      delayed: the new parameters are stored beside the old ones. The weight is then in host memory,
        and updated in place only if the kernel casts.
      grad: the records in which the gradient is stashed, if it is stashed on disk.
    """

    kernel: Kernel
    scalars: slice
    arrays: tuple[Rest, ...]
    num_states: int
    stacked: bool
    weight_on_device: bool
    casts: bool
    params_on_device: bool
    delayed: bool = False
    grad: Rest = None

    @functools.cached_property
    def records(self) -> dict[str, Mode]:
        """How an update uses the records of each kind that it needs."""
        modes: dict[str, Mode] = {} if self.grad is None else {self.grad.kind: "read"}
        for n, rest in enumerate(self.arrays):
            if rest is not None:
                is_cast = self.casts and not self.params_on_device and n == len(self.arrays) - 1
                modes[rest.kind] = "write" if is_cast else "update"
        return modes


@dataclasses.dataclass
class Traffic:
    """Bytes that crossed the link, summed over devices and steps since the counts were last reset."""

    to_host: int = 0
    to_device: int = 0
