"""Pearson's chi-square with a power calculation: how many draws, and how often it lies."""

from __future__ import annotations

import numpy as np
from scipy import optimize, stats
from torch import Tensor

# Odds of a false alarm of one test with fresh seeds. The seeds are fixed, so a test that has passed
# once passes always; the odds are those of choosing seeds that fail.
FALSE_ALARM = 1e-6
POWER = 0.999  # of catching the negative control


def draws_needed(law_X: Tensor, wrong_law_X: Tensor) -> int:
    """Draws from `wrong_law_X` with which a test against `law_X` fails with probability POWER.

    Never fewer than make every expected count 5, which the test's distribution rests on.
    """
    possible = law_X > 0
    effect = float(((wrong_law_X - law_X)[possible] ** 2 / law_X[possible]).sum())
    freedom = int(possible.sum()) - 1
    critical = stats.chi2.isf(FALSE_ALARM, freedom)

    def shortfall(noncentrality: float) -> float:
        return stats.ncx2.sf(critical, freedom, noncentrality) - POWER

    draws = optimize.brentq(shortfall, 1e-3, 1e5) / effect
    return int(np.ceil(max(draws, 5 / float(law_X[possible].min()))))


def p_value(codes_B: Tensor, law_X: Tensor) -> float:
    """Probability of counts at least this far from `law_X` if they were drawn from it.

    Zero if anything impossible was drawn. Every expected count must be at least 5.
    """
    counts = codes_B.bincount(minlength=len(law_X)).double()
    possible = law_X > 0
    if counts[~possible].any():
        return 0.0
    expected = law_X[possible] * len(codes_B)
    assert expected.min() >= 5, f"an expected count is {expected.min():.2f}: draw more"
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))
