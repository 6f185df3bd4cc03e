"""Exact divergences to hold the accountant against: closed forms and enumerations, to 60 digits."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import mpmath as mp


def gaussian_delta(noise, steps, epsilon):
    "delta of the Gaussian mechanism run `steps` times (Balle and Wang 2018)."
    with mp.workdps(60):
        mu, epsilon = mp.sqrt(mp.mpf(steps)) / mp.mpf(noise), mp.mpf(epsilon)
        below = lambda x: mp.erfc(-x / mp.sqrt(2)) / 2
        return below(mu / 2 - epsilon / mu) - mp.exp(epsilon) * below(-mu / 2 - epsilon / mu)


def discrete_law(p, q, n):
    "Pairs (P-mass, Q-mass) of the n-fold product of two laws given as Fractions, grouped by counts of the outputs."
    law = Counter()
    for counts in compositions(n, len(p)):
        ways = math.factorial(n)
        for c in counts:
            ways //= math.factorial(c)
        in_p, in_q = (ways * math.prod(x**c for x, c in zip(one, counts)) for one in (p, q))
        law[in_p, in_q] += 1
    return [(a * k, b * k) for (a, b), k in law.items()]


def compositions(n, k):
    for bars in itertools.combinations(range(n + k - 1), k - 1):
        ends = (-1,) + bars + (n + k - 1,)
        yield tuple(b - a - 1 for a, b in zip(ends, ends[1:]))


def law_delta(law, epsilon, swapped=False):
    "Hockey-stick divergence of an enumerated law at a float epsilon."
    with mp.workdps(60):
        factor, total = mp.exp(mp.mpf(epsilon)), mp.mpf(0)
        for a, b in law:
            a, b = (b, a) if swapped else (a, b)
            total += max(mp.mpf(0), mp.mpf(a.numerator) / a.denominator - factor * mp.mpf(b.numerator) / b.denominator)
        return total


def law_max_loss(law, swapped=False):
    best = mp.mpf("-inf")
    with mp.workdps(60):
        for a, b in law:
            a, b = (b, a) if swapped else (a, b)
            if a > 0:
                ratio = Fraction(a, b) if b else None
                best = max(best, mp.log(mp.mpf(ratio.numerator) / ratio.denominator) if ratio else mp.inf)
    return best


def laplace_delta(scale, epsilon):
    "delta of one release with Laplace noise, any sign of epsilon."
    b, e = mp.mpf(scale), mp.mpf(epsilon)
    if e >= 1 / b:
        return mp.mpf(0)
    if e <= -1 / b:
        return 1 - mp.exp(e)
    return 1 - mp.exp((e - 1 / b) / 2)


def laplace_delta_twice(scale, epsilon):
    "delta of two releases: the first one's loss has atoms at both ends and a density between them."
    with mp.workdps(30):
        b, e = mp.mpf(scale), mp.mpf(epsilon)
        density = lambda loss: mp.exp(-(1 - b * loss) / (2 * b)) / 4
        ends = sorted({-1 / b, 1 / b} | {x for x in (e - 1 / b, e + 1 / b) if -1 / b < x < 1 / b})
        inner = mp.quad(lambda loss: density(loss) * laplace_delta(b, e - loss), ends)
        return laplace_delta(b, e - 1 / b) / 2 + mp.exp(-1 / b) / 2 * laplace_delta(b, e + 1 / b) + inner


def assert_holds(bounds, delta_at, delta):
    "Both ends of an interval against an exact, decreasing delta(epsilon)."
    assert math.isfinite(bounds.upper) and 0 <= bounds.lower <= bounds.upper
    assert delta_at(bounds.upper) <= delta, ("upper bound below the truth", bounds)
    if bounds.lower > 0:
        assert delta_at(bounds.lower) >= delta, ("lower bound above the truth", bounds)
