"""How long an adapter keeps its slot: busy periods of the queue M/M/infinity."""

from __future__ import annotations

import numpy as np

NUM_NODES = 40
LARGEST_RATE = 40.0  # busy periods of exp(40) / 40 mean services: above this rate an adapter is always active

# Legendre nodes in v = u^(1/3), u in (0, 1): dense near 0, where a long wait makes the integrand steep.
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(NUM_NODES)
_V = (_ABSCISSAE + 1) / 2
_U = _V**3
_DU = 1.5 * _V**2 * _WEIGHTS


class BusyPeriods:
    """Mean busy periods of adapters with given rates, each service exponential with mean 1.

    With j requests in service, the mean time until there are j - 1 is, by first-step recursion,
    sum_{m >= 0} lambda^m (j-1)! / (j+m)! = int_0^1 (1-u)^(j-1) exp(lambda u) du.  From K on it is
    int_0^1 exp(lambda u) (1 - (1-u)^K) / u du until none is left.  A first request that waited W brings
    K = 1 + Poisson(lambda W), so that E (1-u)^K = (1-u) exp(-lambda u W).

    rates: [G] requests per mean service time; taken as 40 where larger.
    """

    def __init__(self, rates: np.ndarray) -> None:
        self._rate_u = np.outer(np.minimum(rates, LARGEST_RATE), _U)
        self._density = np.exp(self._rate_u) * (_DU / _U)
        self.without_wait: np.ndarray = self._density @ _U
        """(exp(lambda) - 1) / lambda, [G]."""

    def after_queue(self, length: int, speeds: np.ndarray) -> np.ndarray:
        """Mean busy periods if the first request waited for `length` slots, which free at rates `speeds`.

        That wait is Erlang: E exp(-s W) = (1 + s / speed)^-length.  speeds: [G].  Returns [G].
        """
        still_one = (1 - _U) * np.exp(-length * np.log1p(self._rate_u / speeds[:, None]))
        return np.einsum("gu,gu->g", self._density, 1 - still_one)
