"""`quantize` and `dequantize` have no derivative, and raise an error that says so.

Rounding is piecewise constant, so its derivative is 0, which is of no use; each use needs its own
substitute. A quantised copy that is sent (ZeRO++, arXiv:2306.10209) or stored (8-bit optimizers,
arXiv:2110.02861) is outside of the differentiated function. Quantisation-aware training passes
cotangents straight through (Bengio et al., arXiv:1308.3432):

    x + stop_gradient(dequantize(quantize(x), x.dtype) - x)

whose derivative is the derivative of x. Differentiating therefore raises, instead of silently
returning a gradient of zeros.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def without_derivative(
    name: str, f: Callable[..., Any], there_and_back: str = "dequantize(quantize(x), x.dtype)"
) -> Callable[..., Any]:
    """Return a function of arrays like f that raises ValueError if its derivative is taken."""

    @jax.custom_vjp
    @functools.wraps(f)
    def op(*arrays: Any) -> Any:
        return f(*arrays)

    def backward(*_: Any) -> Any:
        raise ValueError(
            f"{name} has no derivative: stop it with jax.lax.stop_gradient, or pass the gradient "
            f"straight through with x + jax.lax.stop_gradient({there_and_back} - x)"
        )

    op.defvjp(lambda *arrays: (f(*arrays), None), backward)
    return op
