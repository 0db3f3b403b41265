"""Choose the implementation of an op: the named one, or the first that is supported and pays off.

- `"mosaic"` is a kernel of this package, written in Pallas for one generation of GPUs.
- `"xla"` is the op in jnp at the precision of its inputs, fused as XLA sees fit. It runs
  everywhere.
- `"reference"` is the op in float32, for comparison.

A named implementation either runs or raises. No call falls back silently, because a missing kernel
would only show up in a profile, if at all. `None` means "choose for me"; each choice is logged
once, with its reason.

The choice is made while the program is traced, for the program's target device: the device of the
mesh in its arguments' shardings, else of the mesh in scope (`jax.set_mesh`), else JAX's default
device. A program compiled ahead of time for absent GPUs therefore gets the same kernels as on a
machine that has them.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax._src import config as jax_config  # pyright: ignore[reportPrivateImportUsage]  the interpreter's switch has no public API

logger = logging.getLogger(__name__)

Implementation = Literal["mosaic", "xla", "reference"]
# A mesh of absent devices has device names but no compute capability. These names have capability
# 9.0.
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that a program is traced for.

    Attributes:
      kind: device name as NVIDIA reports it.
      platform: "gpu", "cpu", ..; "interpreter" if kernels are interpreted.
      num_cores: number of streaming multiprocessors, which is the number of blocks that run at a
        time.
      is_hopper: whether the device has the tensor core instructions of compute capability 9.0a.
    """

    kind: str
    platform: str
    num_cores: int
    is_hopper: bool

    @property
    def chip(self) -> str:
        """Device name without its memory size, such as "H200" for "NVIDIA H200 141GB HBM3e".

        For GPUs other than Hopper it is the full `kind`.
        """
        match = HOPPER.search(self.kind)
        return match[0] if match else self.kind

    def without_hopper(self) -> str | None:
        """Return why a kernel with Hopper's instructions cannot run here, or None if it can."""
        if self.is_hopper:
            return None
        return (
            "it needs a Hopper GPU (compute capability 9.0: H100, H200), and the program is for "
            f"{self.platform} {self.kind!r}"
        )


def is_interpreted() -> bool:
    """Return whether kernels are interpreted, as under `force_gpu_interpret_mode`."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def find_target(*arrays: Any) -> Target:
    """Return the device that a program with these arrays as arguments is traced for."""
    if is_interpreted():  # 2 blocks that run one after the other, so that each has several tiles
        return Target("CPU", "interpreter", num_cores=2, is_hopper=True)
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    meshes.append(jax.sharding.get_abstract_mesh())
    for mesh in meshes:
        device = mesh.abstract_device
        if device is not None:
            return Target(
                kind=device.device_kind,
                platform=device.platform,
                num_cores=device.num_cores or 1,
                is_hopper=HOPPER.search(device.device_kind) is not None,
            )
    # The default device may also be the name of a platform.
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return Target(
        kind=device.device_kind,
        platform=device.platform,
        num_cores=getattr(device, "core_count", 1),
        is_hopper=getattr(device, "compute_capability", None) == "9.0",
    )


def resolve(
    op: str,
    implementation: Implementation | None,
    refusals: Mapping[Implementation, str | None],
    passed_over: Mapping[Implementation, str | None],
) -> Implementation:
    """Return the implementation that runs, and log it if it was chosen here.

    Args:
      op: name of the op, for messages.
      implementation: implementation that the caller named, or None.
      refusals: for each implementation, in order of preference, why it cannot serve this call, or
        None.
      passed_over: for each implementation that can serve but is only used if it is named, the
        reason.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: the named implementation cannot serve this call.
    """
    if implementation is not None:
        if implementation not in refusals:
            raise ValueError(
                f"{op}: implementation={implementation!r} is unknown: choose from "
                f"{', '.join(refusals)}, or None"
            )
        reason = refusals[implementation]
        if reason:
            choices = ", ".join(name for name, refusal in refusals.items() if refusal is None)
            raise NotImplementedError(
                f"{op}: implementation={implementation!r} cannot serve: {reason}; choose {choices} "
                "or None"
            )
        return implementation
    reasons = []
    for name, refusal in refusals.items():
        reason = refusal or passed_over.get(name)
        if reason:
            reasons.append(f"not {name}: {reason}")
            continue
        log_choice(op, name, "; ".join(reasons))
        return name
    raise NotImplementedError(f"{op}: no implementation serves: {'; '.join(reasons)}")


# Cached, so that a second call with the same arguments logs nothing.
@functools.cache
def log_choice(op: str, name: str, reasons: str) -> None:
    """Log which implementation of an op runs, and why."""
    logger.info("%s runs as %s%s", op, name, f" ({reasons})" if reasons else "")
