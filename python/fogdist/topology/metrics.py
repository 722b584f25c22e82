"""Numbers that say how well a mixing matrix mixes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fogdist.topology.errors import TopologyError
from fogdist.topology.weights import SUM_TOLERANCE, check_matrix


def spectral_gap(W: ArrayLike) -> float:
    """Returns 1 - |lambda_2|, lambda_2 being the eigenvalue of second-largest modulus of a mixing matrix.

    Repeated mixing shrinks the consensus distance by |lambda_2| a step in the long run: a gap of 1 means the
    exact average at once, a gap of 0 that some ranks never agree (the graph is disconnected or periodic).

    Args:
        W: Real matrix of shape (n, n) whose columns or rows (or both) sum to 1; `mixing_matrix` of a
            topology, or a product of the matrices of several steps.

    Returns:
        A float in [0, 1] for nonnegative weights; 1.0 for n = 1. Negative weights that make mixing diverge
        give a negative gap.

    Raises:
        TypeError: `W` does not hold real numbers.
        TopologyError: `W` is not a square matrix of finite numbers whose columns or rows sum to 1.
    """
    matrix = check_matrix(W, averages=False)
    sums = [matrix.sum(axis=axis) for axis in (0, 1)]
    if not any(np.allclose(s, 1.0, rtol=0.0, atol=SUM_TOLERANCE) for s in sums):
        raise TopologyError(f"W must have columns or rows that sum to 1, got column sums {sums[0]}")
    eigenvalues = np.linalg.eigvals(matrix)
    # One eigenvalue is 1 (the vector of the average); the rest is what mixing has to shrink.
    rest = np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1.0)))
    gap = 1.0 - float(np.max(np.abs(rest), initial=0.0))
    # A modulus of exactly 1 comes out of the eigenvalue solver with rounding on either side.
    return 0.0 if abs(gap) < 1e-12 else gap
