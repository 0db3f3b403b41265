"""Copies between registers and global memory in Hopper's kernels, for layouts of wgmma's sums.

A layout names the thread that reads or writes each element. The layouts of wgmma's sums and of
their rows have no vectorised copies, and by default JAX refuses unvectorised ones.
"""

import functools
import inspect
from typing import Any

import jax

from pallas_kernels import mosaic_gpu as plgpu


@functools.cache
def _everything() -> tuple[Any, ...]:
    """Return the index argument for `plgpu.load` that selects everything, if it needs one."""
    # jax 0.10 requires an index in addition to the reference, and () selects everything. 0.11
    # deprecates it and 0.12 takes none.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    is_required = index is not None and index.default is inspect.Parameter.empty
    return ((),) if is_required else ()


def row_layout() -> Any:
    """Return the layout of one number per row of a tile of wgmma's sums."""
    return plgpu.Layout.WGMMA.reduce(1)


def load(ref: Any, layout: Any) -> jax.Array:
    """Return the contents of a view of memory, such as `ref.at[rows]`, in a layout."""
    return plgpu.load(ref, *_everything(), layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Write a value of any layout to a view of memory."""
    # Added in jax 0.12, where an assignment is vectorised or an error.
    unvectorised: Any = getattr(plgpu, "store", None)
    if unvectorised is None:
        ref[...] = value
    else:
        unvectorised(ref, value, optimized=False)
