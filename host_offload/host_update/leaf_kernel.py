"""What the host update of one leaf is: a kernel, where the arrays rest that it works on, and what crosses the link.

An array rests in host memory (None), or in the records of a kind on disk (`OnRecord`), whatever its leaf's others do. From that
follows what an update does to each kind of record:

    gradient that waits           read
    weight, states                update      read, changed in the buffer, written
    parameters that are cast to   write       filled, whatever they held
"""

import dataclasses
import functools
from typing import NamedTuple

from host_offload.engine import Mode
from host_offload.host_update.kernel import Kernel


class OnRecord(NamedTuple):
    """Where a leaf rests on disk.

    Attributes:
      kind: of the records.
      leaf: its place among their leaves.
    """

    kind: str
    leaf: int


Rest = OnRecord | None
"""Where an array rests: in a record, or in host memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class LeafKernel:
    """How one leaf is updated.

    Attributes:
      kernel: from (gradient, weight, states, scalars) to (weight, states, and the cast weight if `casts`).
      scalars: where this leaf's scalars lie in the vector of all.
      arrays: where the arrays rest that the kernel works on: the weight (unless on the device), the states, and the parameters
        that it casts to (unless on the device).
      num_states: leaves of optimizer state.
      stacked: whether its arrays hold all layers.
      weight_on_device: the float32 weight is no host array: it is an operand, and the new one a result.
      casts: the kernel returns a compute-dtype weight besides.
      params_on_device: the parameters are a result of the callback; else they are written to the host.
      delayed: the new parameters are made beside the old ones. The weight is then in host memory, and in place only if the
        kernel casts.
      grad: where the gradient waits, if it does.
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
        """What is done to the records of each kind that an update needs."""
        modes: dict[str, Mode] = {} if self.grad is None else {self.grad.kind: "read"}
        for n, rest in enumerate(self.arrays):
            if rest is not None:
                is_cast = self.casts and not self.params_on_device and n == len(self.arrays) - 1
                modes[rest.kind] = "write" if is_cast else "update"
        return modes


@dataclasses.dataclass
class Traffic:
    """Bytes that crossed the link, summed over devices and steps since they were last taken."""

    to_host: int = 0
    to_device: int = 0
