"""How many bytes of pinned host memory a mode of the Llama keeps, in closed form: before a device
is touched.

XLA reads the limit of its pool of pinned memory when it starts, and a program can only be built
after that. So a worker's pool is sized from this; `program.memory` of the built program must agree,
which a test holds.
"""

from gpu_checks.mixes import LlamaSizes

STATES = 12
"""Bytes a parameter of a float32 master and of Adam's two moments."""
BYTES = {
    "resident": 0,
    "opt_state on the host": STATES,
    "opt_state on the host, clip_norm": STATES,
    "params, grads, opt_state on the host": STATES + 2,
    "opt_state on the host, update_on host": STATES,
    "the same, delayed_update": STATES + 4,
    "all on nvme": 0,
}
"""By mode, bytes a parameter in XLA's pool. With a delayed update there are two sets of gradients
in bfloat16: one is applied while the other is made."""


def num_params(sizes: LlamaSizes) -> int:
    """Return the parameters of a Llama."""
    layer = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.ff + 2 * sizes.hidden
    return sizes.layers * layer + 2 * sizes.vocab * sizes.hidden + sizes.hidden


def pinned_bytes(mode: str, sizes: LlamaSizes) -> int:
    """Return the bytes that a mode keeps in XLA's pool of pinned host memory."""
    return BYTES[mode] * num_params(sizes)
