"""Floating-point operations of factorisations, solves and Fourier transforms.

The leading terms of the textbook (Golub & Van Loan, *Matrix Computations*); where
an algorithm iterates, the textbook's usual number of iterations.  Accelerators
may run other algorithms, with several times the work.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import numpy as jnp

# ---------------------------------------------------------------- implementation


def _matrices(eqn: Any) -> tuple[int, int, int]:
    """(how many matrices times real operations for one, rows, columns) of the first operand."""
    aval = eqn.invars[0].aval
    *batch, m, n = aval.shape
    return math.prod(batch) * (4 if _is_complex(aval) else 1), m, n


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, np.complexfloating)


def _square(terms: Callable[[Any, int], float]) -> Callable[[Any], int]:
    """A rule for square matrices: terms(eqn, n) operations for each."""

    def rule(eqn: Any) -> int:
        count, _, n = _matrices(eqn)
        return count * round(terms(eqn, n))

    return rule


def _qr_terms(m: int, n: int) -> float:
    k, most = min(m, n), max(m, n)
    return 2 * k * k * most - 2 * k**3 / 3


def _qr(eqn: Any) -> int:
    # `qr` makes both factors; the two steps that it is made of may stand alone.
    count, m, n = _matrices(eqn)
    return count * round(_qr_terms(m, n) * (2 if eqn.primitive.name == "qr" else 1))


def _householder_product(eqn: Any) -> int:
    count, m, n = _matrices(eqn)
    k = eqn.invars[1].aval.shape[-1]
    return count * round(4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 / 3)


def _ormqr(eqn: Any) -> int:
    count, m, k = _matrices(eqn)
    *_, rows, columns = eqn.invars[2].aval.shape
    other = columns if rows == m else rows
    return count * (4 * m * other * k - 2 * other * k * k)


def _lu(eqn: Any) -> int:
    count, m, n = _matrices(eqn)
    k, most = min(m, n), max(m, n)
    return count * round(most * k * k - k**3 / 3)


def _svd(eqn: Any) -> int:
    count, m, n = _matrices(eqn)
    k, most = min(m, n), max(m, n)
    vectors = eqn.params.get("compute_uv", True)
    terms = 4 * most**2 * k + 8 * most * k**2 + 9 * k**3 if vectors else 4 * most * k**2
    return count * round(terms - (0 if vectors else 4 * k**3 / 3))


def _triangular_solve(eqn: Any) -> int:
    count, n, _ = _matrices(eqn)
    rhs = eqn.invars[1].aval
    return count * n * n * (rhs.shape[-1] if eqn.params["left_side"] else rhs.shape[-2])


def _symmetric_product(eqn: Any) -> int:
    count, m, n = _matrices(eqn)
    return count * m * m * n  # one half of the product


def _tridiagonal_solve(eqn: Any) -> int:
    rhs = eqn.invars[-1].aval
    return 8 * rhs.size * (4 if _is_complex(rhs) else 1)


def _fft(eqn: Any) -> int:
    # The type of transform is an enumeration or a string, by release.
    lengths = eqn.params["fft_lengths"]
    points = math.prod(lengths)
    real = "R" in str(eqn.params["fft_type"]).rpartition(".")[2].upper()
    most = max(eqn.invars[0].aval.size, eqn.outvars[0].aval.size)
    batch = most // points if points else 0
    return round(batch * 5 * points * math.log2(max(points, 1)) / (2 if real else 1))


def _schur(eqn: Any, n: int) -> float:
    return (25 if eqn.params.get("compute_schur_vectors", True) else 10) * n**3


def _eig(eqn: Any, n: int) -> float:
    params = eqn.params
    left, right = (params.get(f"compute_{side}_eigenvectors", True) for side in ("left", "right"))
    return (25 if left or right else 10) * n**3


FACTORISATIONS: dict[str, Callable[[Any], int]] = {
    "cholesky": _square(lambda eqn, n: n**3 / 3),
    "cholesky_update": _square(lambda eqn, n: 4 * n**2),
    "eig": _square(_eig),
    "eigh": _square(lambda eqn, n: 9 * n**3),
    "fft": _fft,
    "geqp3": _qr,
    "geqrf": _qr,
    "hessenberg": _square(lambda eqn, n: 10 * n**3 / 3),
    "householder_product": _householder_product,
    "lu": _lu,
    "ormqr": _ormqr,
    "qr": _qr,
    "schur": _square(_schur),
    "svd": _svd,
    "symmetric_product": _symmetric_product,
    "triangular_solve": _triangular_solve,
    "tridiagonal": _square(lambda eqn, n: 4 * n**3 / 3),
    "tridiagonal_solve": _tridiagonal_solve,
}
