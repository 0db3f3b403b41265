"""Registers of Hopper's kernels, read from global memory and written to it, each element by the thread that a layout names.

Such layouts, of wgmma's sums or of their rows, have no vectorised copies, and by default JAX refuses any other.
"""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# jax 0.10 asks for an index beside the reference, of which () is everything. 0.11 deprecates it and 0.12 takes none.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_EVERYTHING = ((),) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()


def load(ref: Any, layout: Any) -> jax.Array:
    """Return what a view of memory holds, such as `ref.at[rows]`, in a layout."""
    return plgpu.load(ref, *_EVERYTHING, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Write a value of any layout to a view of memory."""
    unvectorised: Any = getattr(plgpu, "store", None)  # as of jax 0.12, whose assignment is vectorised or an error
    if unvectorised is None:
        ref[...] = value
    else:
        unvectorised(ref, value, optimized=False)
