"""An independent second opinion on DP-SGD: delta by quadrature along a vertical line of the complex plane.

With M(z) = E_P exp(z L), delta(eps) = (1 / 2 pi i) * integral of M(z)^T exp(-z eps) / (z (z + 1)) over Re z = lam, any lam > 0.
The trapezoid rule with step h sums delta(eps + 2 pi k / h) exp(2 pi k lam / h) over all integers k instead: the terms with k != 0
are positive, those below are geometric as delta <= 1, those above are bounded by Chernoff's bound. Nothing here is shared with the package.
"""

import math

import numpy as np


class Contour:
    "One direction of the composed Poisson-subsampled Gaussian."

    def __init__(self, noise, q, steps, swapped, nodes=1200):
        self.steps, self.swapped = steps, swapped
        x = np.linspace(-14 * noise, 14 * noise + 1, nodes)
        self.noise, self.q, self.nodes = noise, q, nodes
        self._place(x)

    def _place(self, x):
        s, q = self.noise, self.q
        # log of the loss of "remove", L = log(1 - q + q exp((2 x - 1) / 2 s^2))
        exponent = (2 * x - 1) / (2 * s**2)
        self.loss = np.where(exponent < 30, np.log1p(q * np.expm1(np.minimum(exponent, 30.0))), exponent + math.log(q) + np.log1p((1 / q - 1) * np.exp(-np.maximum(exponent, 30.0))))
        self.log_base = -0.5 * (x / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])

    def recentre(self, tilt):
        "Put the nodes of the quadrature where the tilted mass is."
        power = -tilt if self.swapped else tilt + 1
        self._place(np.linspace(-16 * self.noise + min(0.0, power), 16 * self.noise + max(1.0, power), 4000))
        height = self.log_base + power * self.loss
        x = np.linspace(-16 * self.noise + min(0.0, power), 16 * self.noise + max(1.0, power), 4000)
        inside = np.flatnonzero(height > height.max() - 90)
        self._place(np.linspace(x[max(inside[0] - 1, 0)], x[min(inside[-1] + 1, len(x) - 1)], self.nodes))

    def log_moment(self, tilts):
        "T K(tilt) at real tilts."
        power = -np.atleast_1d(tilts) if self.swapped else np.atleast_1d(tilts) + 1
        exponent = self.log_base + power[:, None] * self.loss
        high = exponent.max(1)
        return self.steps * (high + np.log(np.exp(exponent - high[:, None]).sum(1)))

    def ratio(self, tilt, frequencies):
        "(M(tilt + i w) / M(tilt))^T at each frequency w."
        power = -tilt if self.swapped else tilt + 1
        exponent = self.log_base + power * self.loss
        weight = np.exp(exponent - exponent.max())
        weight /= weight.sum()
        sign = -1.0 if self.swapped else 1.0
        mean = float(weight @ self.loss)
        values = np.exp(1j * sign * frequencies[:, None] * (self.loss - mean)) @ weight
        with np.errstate(divide="ignore", under="ignore"):
            return np.exp(self.steps * np.log(np.where(values == 0, 1e-300, values))), sign * mean * self.steps


def _tilt(contour, delta):
    "The saddle, by estimate: bisection on the saddle-point value of log delta."
    low, high = math.log(1e-2), math.log(1e5)
    for _ in range(40):
        tilt = math.exp(0.5 * (low + high))
        contour.recentre(tilt)
        step = 1e-4 * tilt
        k = contour.log_moment(np.array([tilt - step, tilt, tilt + step]))
        mean, variance = (k[2] - k[0]) / (2 * step), max((k[2] - 2 * k[1] + k[0]) / step**2, 0.0)
        eps = mean - 1 / tilt - 1 / (tilt + 1)
        value = k[1] - tilt * eps - math.log(tilt) - math.log1p(tilt)
        value -= 0.5 * math.log(2 * math.pi * (variance + 1 / tilt**2 + 1 / (tilt + 1) ** 2))
        low, high = (math.log(tilt), high) if value > math.log(delta) else (low, math.log(tilt))
    return math.exp(low)


def epsilon(noise, q, steps, delta, swapped, stretch=1.0, refine=1.0, nodes=1200):
    "Lower and upper end for epsilon of one direction, with the alias bound, the cut tail and round-off charged."
    saddle = _tilt(Contour(noise, q, steps, swapped, nodes), delta)
    for part in (1.0, 0.7, 0.5, 0.35, 0.25):  # a heavy tail asks for a line to the left of the saddle
        line = _Line(Contour(noise, q, steps, swapped, nodes), part * stretch * saddle, delta)
        for halvings in range(5):
            line.sum_up(2 * math.pi * line.tilt / (30.0 - math.log(delta)) / refine / 2**halvings)
            upper = _root(lambda e: line.total(e) + line.error(e), delta)
            if line.alias(upper) <= 1e-10 * delta:
                return line.below(upper), upper
    raise ArithmeticError("the alias bound does not close: not a smooth case")


class _Line:
    "The trapezoid rule on the line Re z = tilt."

    def __init__(self, contour, tilt, delta):
        self.contour, self.tilt, self.delta = contour, tilt, delta
        contour.recentre(tilt)
        self.log_moment = float(contour.log_moment(tilt)[0])
        self.chernoff = tilt * (1 + np.exp(np.linspace(-5.0, 2.0, 60)))
        c = contour
        self.above = np.array([_moment(c.noise, c.q, c.steps, c.swapped, t, c.nodes) for t in self.chernoff])

    def sum_up(self, step, block=256, most=6000):
        values = np.zeros(0)
        while len(values) == 0 or abs(values[-1]) > 1e-17:
            if len(values) > most:
                raise ArithmeticError("the integrand does not decay: not a smooth case")
            more, self.mean = self.contour.ratio(self.tilt, step * np.arange(len(values), len(values) + block))
            values = np.concatenate([values, more])
        self.step, self.frequencies = step, step * np.arange(len(values))
        z = self.tilt + 1j * self.frequencies
        self.terms = values / (z * (z + 1)) * (step / math.pi)
        self.terms[0] *= 0.5

    def total(self, eps):
        waves = np.exp(1j * self.frequencies * (self.mean - eps))
        return float((self.terms * waves).real.sum()) * math.exp(min(700.0, self.log_moment - self.tilt * eps))

    def error(self, eps):
        "What was cut, and round-off of moments, powers and sums."
        relative = abs(self.terms[-1]) * len(self.terms) + 2e-15 * (self.contour.steps + 100) * float(np.abs(self.terms).sum())
        return relative * math.exp(min(700.0, self.log_moment - self.tilt * eps))

    def alias(self, eps):
        "All that the trapezoid rule adds: geometric below, Chernoff's bound above (terms beyond the sixth fall faster than by half)."
        shift = 2 * math.pi / self.step
        amount = math.exp(-self.tilt * shift) / -math.expm1(-self.tilt * shift)
        for k in range(1, 7):
            log_delta = min(0.0, float(np.min(self.above - self.chernoff * (eps + k * shift))))
            amount += (1 if k < 6 else 2) * math.exp(min(700.0, log_delta + k * shift * self.tilt))
        return amount

    def below(self, upper):
        "An epsilon at which delta is surely not yet reached."
        width = 1e-13 * upper
        while True:
            eps = upper - width
            if eps <= 0:
                return 0.0
            if self.total(eps) - self.error(eps) - self.alias(eps) >= self.delta:
                return eps
            width *= 2


def _moment(noise, q, steps, swapped, tilt, nodes):
    contour = Contour(noise, q, steps, swapped, nodes)
    contour.recentre(tilt)
    return float(contour.log_moment(tilt)[0])


def _root(function, target):
    low, high = 0.0, 1.0
    while function(high) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise ArithmeticError("no root")
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) > target else (low, middle)
        if high - low <= 1e-14 * high:
            break
    return 0.5 * (low + high)


def both_directions(noise, q, steps, delta, **settings):
    "Lower and upper end for epsilon, the larger of the two directions."
    ends = [epsilon(noise, q, steps, delta, swapped, **settings) for swapped in (False, True)]
    return max(e[0] for e in ends), max(e[1] for e in ends)
