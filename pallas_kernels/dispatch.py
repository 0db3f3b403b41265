"""Which implementation of an op runs: the one that is named, or the first that serves and pays.

- `"mosaic"` is a kernel of this package, written in Pallas for one generation of GPUs.
- `"xla"` is the op in jnp at the precision of its inputs, fused as XLA sees fit. It serves
  everywhere.
- `"reference"` is the op in float32, for comparison.

A named one serves or raises: no call falls back behind its caller's back, for a kernel that does
not run is a surprise in a profile, or none at all. `None` means "choose for me", and each choice is
logged once, with its reason.

The question is asked while a program is traced, of the device that the program is for: that of the
mesh in its arguments' shardings, else of the mesh in scope (`jax.set_mesh`), else JAX's default
device. So a program for GPUs that are not there gets the kernels that it would get beside them.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax._src import config as jax_config  # pyright: ignore[reportPrivateImportUsage]  the interpreter's switch has no public face

logger = logging.getLogger(__name__)

Implementation = Literal["mosaic", "xla", "reference"]
# A mesh of devices that are not there has their names, but no compute capability: these are the
# names of 9.0.
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that a program is traced for.

    Attributes:
      kind: its name, as NVIDIA's.
      platform: "gpu", "cpu", ..; "interpreter" where kernels are interpreted.
      num_cores: its streaming multiprocessors; the blocks that run at a time.
      is_hopper: it has the tensor core instructions of compute capability 9.0a.
    """

    kind: str
    platform: str
    num_cores: int
    is_hopper: bool

    @property
    def chip(self) -> str:
        """The name without its memory, such as "H200" of "NVIDIA H200 141GB HBM3e"; of other than
        Hopper's GPUs the kind.
        """
        match = HOPPER.search(self.kind)
        return match[0] if match else self.kind

    def without_hopper(self) -> str | None:
        """Tell why a kernel of Hopper's instructions does not run here, or None."""
        if self.is_hopper:
            return None
        return f"it needs a Hopper GPU (compute capability 9.0: H100, H200), and the program is for {self.platform} {self.kind!r}"


def is_interpreted() -> bool:
    """Tell whether kernels are interpreted, as in `force_gpu_interpret_mode`."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def target_of(*arrays: Any) -> Target:
    """Return the device that a program of these arrays is for."""
    if is_interpreted():  # 2 blocks, one after the other, so that each has several tiles
        return Target("CPU", "interpreter", num_cores=2, is_hopper=True)
    meshes = [jax.typeof(array).sharding.mesh for array in arrays] + [
        jax.sharding.get_abstract_mesh()
    ]
    for mesh in meshes:
        if (device := mesh.abstract_device) is not None:
            return Target(
                device.device_kind,
                device.platform,
                device.num_cores or 1,
                bool(HOPPER.search(device.device_kind)),
            )
    # The default device may also be the name of a platform.
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    capability = getattr(device, "compute_capability", None)
    return Target(
        device.device_kind, device.platform, getattr(device, "core_count", 1), capability == "9.0"
    )


def resolve(
    op: str,
    implementation: Implementation | None,
    refusals: Mapping[Implementation, str | None],
    passed_over: Mapping[Implementation, str | None],
) -> Implementation:
    """Return the implementation that runs.

    Args:
      op: the name of the op, for messages.
      implementation: the one that the caller names, or None.
      refusals: for each implementation, in order of preference, why it cannot serve this call, or
        None.
      passed_over: why one that can serve is not chosen unless it is named.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the named one cannot serve this call.
    """
    if implementation is not None:
        if implementation not in refusals:
            raise ValueError(
                f"{op}: implementation={implementation!r} is unknown: choose from {', '.join(refusals)}, or None"
            )
        if reason := refusals[implementation]:
            others = ", ".join(name for name, refusal in refusals.items() if refusal is None)
            raise NotImplementedError(
                f"{op}: implementation={implementation!r} cannot serve: {reason}; choose {others} or None"
            )
        return implementation
    reasons = []
    for name, refusal in refusals.items():
        if reason := refusal or passed_over.get(name):
            reasons.append(f"not {name}: {reason}")
            continue
        log_choice(op, name, "; ".join(reasons))
        return name
    raise NotImplementedError(f"{op}: no implementation serves: {'; '.join(reasons)}")


# The cache makes it once: a second call with the same arguments does nothing.
@functools.cache
def log_choice(op: str, name: str, reasons: str) -> None:
    """Log which implementation of an op runs, and why."""
    logger.info("%s runs as %s%s", op, name, f" ({reasons})" if reasons else "")
