"""`quantize` and `dequantize` have no derivative, and say so.

Rounding is flat where it is not a step: its derivative is 0, which is no use, and in its place the
field puts what a use needs. A quantised copy that is sent (ZeRO++, arXiv:2306.10209) or kept (8-bit
optimizers, arXiv:2110.02861) stands outside of what is differentiated; training that is aware of
its quantisation passes cotangents straight through (Bengio et al., arXiv:1308.3432):

    x + stop_gradient(dequantize(quantize(x), x.dtype) - x)

whose derivative is that of x. So to differentiate raises, instead of a gradient of zeros that
nobody notices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def without_derivative(
    name: str, f: Callable[..., Any], there_and_back: str = "dequantize(quantize(x), x.dtype)"
) -> Callable[..., Any]:
    """Return f of arrays, which raises ValueError where its derivative is taken."""

    @jax.custom_vjp
    @functools.wraps(f)
    def op(*arrays: Any) -> Any:
        return f(*arrays)

    def backward(*_: Any) -> Any:
        raise ValueError(
            f"{name} has no derivative: stop it with jax.lax.stop_gradient, or pass the gradient straight through with "
            f"x + jax.lax.stop_gradient({there_and_back} - x)"
        )

    op.defvjp(lambda *arrays: (f(*arrays), None), backward)
    return op
