"Draw nbs/assets/card.png, the picture that a link to the site shows elsewhere: what the book is, and one of its answers."
from pathlib import Path

from databloom.connect_the_dots import epsilon_curve
from databloom.core import book_style, colors
from databloom.mechanisms import Gaussian, PoissonSubsampled

TARGET = Path(__file__).resolve().parent.parent / "nbs" / "assets" / "card.png"
PARTS = ("privacy accounting", "calibrated early exit", "synthetic health records", "sepsis ensembles")


def draw():
    "1200 x 630 points: words on the left, both bounds on epsilon for three sampling probabilities on the right."
    steps = sorted({round(10 ** (k / 4)) for k in range(21)})
    with book_style() as plt:
        figure = plt.figure(figsize=(12, 6.3), dpi=100, layout="none")
        figure.text(0.06, 0.76, "databloom", fontsize=46, weight="bold", color=colors[0])
        figure.text(0.06, 0.60, "Machine learning\nwhose guarantees are computed", fontsize=22, linespacing=1.4, color="#333333")
        for i, part in enumerate(PARTS):
            figure.text(0.06, 0.44 - 0.09 * i, part, fontsize=19, color=colors[1])
        axes = figure.add_axes([0.56, 0.17, 0.39, 0.66])
        for q, style in ((2e-3, "-"), (2e-4, "--"), (2e-5, ":")):
            curve = epsilon_curve(PoissonSubsampled(Gaussian(0.5), q), steps, delta=1e-8)
            assert (curve.upper - curve.lower <= 2e-3 * curve.upper).all()  # closer than the line is thick
            axes.plot(steps, curve.upper, style, lw=4, color=colors[0])
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel("steps of training", fontsize=17)
        axes.set_title("epsilon, from below and above", fontsize=17)
        axes.tick_params(labelsize=14)
        with plt.rc_context({"savefig.bbox": None}):  # the size as stated, not cut to what is drawn
            figure.savefig(TARGET, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    draw()
