"""`matmul` and its gradients in numpy, in float64: the oracle for every implementation."""

from typing import Any

import numpy as np

# Relative to an array's largest element. Results are rounded once to their dtype; cotangents are
# also rounded to the dtype of x before the products of the backward pass.
TOLERANCE = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def _sigmoid(z):
    return 1 / (1 + np.exp(-z))


def _gelu_parts(z):
    c = np.sqrt(2 / np.pi)
    return np.tanh(c * (z + 0.044715 * z**3)), c * (1 + 3 * 0.044715 * z**2)


ACTIVATIONS = {
    None: (lambda z: z, lambda z: np.ones_like(z)),
    "silu": (lambda z: z * _sigmoid(z), lambda z: _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
    "gelu": (
        lambda z: 0.5 * z * (1 + _gelu_parts(z)[0]),
        lambda z: (
            0.5 * (1 + _gelu_parts(z)[0])
            + 0.5 * z * (1 - _gelu_parts(z)[0] ** 2) * _gelu_parts(z)[1]
        ),
    ),
}


def matmul(activation, dy, x, weights, biases, accumulates) -> tuple[Any, tuple[Any, ...]]:
    """Return y and, for its cotangent dy, the cotangents of (x, weights, biases, accumulates)."""
    f, slope = ACTIVATIONS[activation]
    x, dy, weights, biases, accumulates = _wide((x, dy, weights, biases, accumulates))
    zs = [x @ w for w in weights]
    for terms in (biases, accumulates):
        zs = [z + term for z, term in zip(zs, terms, strict=True)] if terms else zs
    y = f(zs[0]) * (zs[1] if len(zs) == 2 else 1)
    dzs = [dy * slope(zs[0]) * (zs[1] if len(zs) == 2 else 1), dy * f(zs[0])][: len(zs)]
    dx = sum(dz @ np.transpose(w) for dz, w in zip(dzs, weights, strict=True))
    dbiases = [dz.sum(0) for dz in dzs] if biases else []
    return y, (dx, [np.transpose(x) @ dz for dz in dzs], dbiases, dzs if accumulates else [])


def _wide(tree):
    return (
        [_wide(leaf) for leaf in tree]
        if isinstance(tree, tuple | list)
        else np.asarray(tree, np.float64)
    )


def assert_close(actual, expected, tolerance: float) -> None:
    """Compare trees of arrays; errors are relative to each array's largest element."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, tolerance)
        return
    error, largest = np.abs(np.asarray(actual, np.float64) - expected).max(), np.abs(expected).max()
    assert error <= tolerance * largest, (
        f"{actual.dtype}{list(actual.shape)} differs by {error / largest:.2e} of {largest:.3g}"
    )
