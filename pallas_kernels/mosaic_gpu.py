"""`jax.experimental.pallas.mosaic_gpu`, imported when a kernel first uses it.

It takes more than half a second to import, which programs for CPUs never need.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas.mosaic_gpu import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:

    def __getattr__(name: str) -> Any:
        from jax.experimental.pallas import mosaic_gpu

        return getattr(mosaic_gpu, name)
