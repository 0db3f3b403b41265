"""Compute the pinned host memory of a Llama's mode in closed form, without a device.

XLA reads the limit of its pool of pinned memory when it starts, and a program can only be built
after that. A worker's pool is therefore sized by this closed form. A test checks that it agrees
with `program.memory` of the built program.
"""

from gpu_checks.mixes import LlamaSizes

STATES = 12
"""Bytes per parameter of a float32 master and of Adam's two moments."""
BYTES = {
    "resident": 0,
    "opt_state on the host": STATES,
    "opt_state on the host, clip_norm": STATES,
    "params, grads, opt_state on the host": STATES + 2,
    "opt_state on the host, update_on host": STATES,
    "the same, delayed_update": STATES + 4,
    "all on nvme": 0,
}
"""Bytes per parameter in XLA's pool, by mode.

A delayed update has two sets of bfloat16 gradients: one is applied while the other is computed.
"""


def num_params(sizes: LlamaSizes) -> int:
    """Return the number of a Llama's parameters."""
    layer = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.ff + 2 * sizes.hidden
    return sizes.layers * layer + 2 * sizes.vocab * sizes.hidden + sizes.hidden


def pinned_bytes(mode: str, sizes: LlamaSizes) -> int:
    """Return the bytes that a mode keeps in XLA's pool of pinned host memory."""
    return BYTES[mode] * num_params(sizes)
