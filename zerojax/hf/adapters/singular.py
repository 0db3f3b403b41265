"""PiSSA's start (arXiv:2404.02948): adapters from the largest singular values of a matrix.

    W^T = V S U^T [in, out]        A = V_r sqrt(S_r / s)        B = sqrt(S_r / s) U_r^T
    W - s (A B)^T                  what is left of W [out, in], and stays frozen

The singular vectors are eigenvectors of the smaller of W W^T and W^T W, in float64. So A and B,
rounded to float32 once, are the same numbers wherever they are computed again: an export needs
them, and finds them in the original folder.
"""

import numpy as np
import scipy.linalg

_MORE = 8
"""Additional vectors of an iteration, which make it converge faster."""


def find_factors(
    weight: np.ndarray, rank: int, scale: float, init: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return A[in, r] and B[r, out] in float32.

    Args:
      weight: W[out, in].
      rank: number of singular values, r.
      scale: factor s of the adapter's output.
      init: "pissa", or "pissa_niter_N" for N subspace iterations.
    """
    wide = weight.astype(np.float64)
    turned = wide.shape[0] < wide.shape[1]
    # m [n, k] with k <= n; its right singular vectors are eigenvectors of m^T m [k, k].
    m = wide.T if turned else wide
    if init == "pissa":
        k = m.shape[1]
        _, right = scipy.linalg.eigh(m.T @ m, subset_by_index=[k - rank, k - 1])
        right = right[:, ::-1]
    else:
        right = _iterate(m, rank, int(init.rpartition("_")[2]))
    left = m @ right
    values = np.maximum(np.linalg.norm(left, axis=0), np.finfo(np.float64).tiny)
    left = left / values
    v, u = (left, right) if turned else (right, left)
    root = np.sqrt(values / scale)
    return (v * root).astype(np.float32), (u * root).T.astype(np.float32)


def _iterate(m: np.ndarray, rank: int, count: int) -> np.ndarray:
    """Return approximate right singular vectors [k, r] of m[n, k], from a fixed start."""
    width = min(rank + _MORE, m.shape[1])
    start = np.random.default_rng(0).standard_normal((m.shape[1], width))
    basis, _ = np.linalg.qr(m @ start)
    for _ in range(count):
        basis, _ = np.linalg.qr(m @ (m.T @ basis))
    _, _, right = np.linalg.svd(basis.T @ m, full_matrices=False)
    return right[:rank].T


def product(a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Return s (A B)^T in float64, for A[in, r] and B[r, out], or some of their rows and columns.

    The result depends on no order of float32 sums.
    """
    return scale * (b.astype(np.float64).T @ a.astype(np.float64).T)
