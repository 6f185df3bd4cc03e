"""Family-wise error of chapter 03: kept on adversarial inputs, some of which other packages fail."""

import itertools
import math

import numpy as np
import pytest

from databloom import ltt_calibration as ltt

DRAWS = 20_000


def limit(level, draws=DRAWS):
    return level + 3 * math.sqrt(level * (1 - level) / draws)


def graph_any(p_values, delta, graph):
    return np.array([ltt.graphical(p, delta, *graph).any() for p in p_values])


def test_uniform_p_values_and_many_starts():
    "50 justified doubts: research code that does not count its last start errs with .19 at .1."
    p = np.random.default_rng(0).random((DRAWS, 50))
    uncounted = (p[:, 0] <= 0.1) | (p[:, 49] <= 0.1)  # one start counted, two walked from
    assert uncounted.mean() > 0.18
    for starts in (1, 2, 5, 10, 50, [0, 49], [49], [3, 17, 49]):
        assert ltt.fixed_sequence(p, 0.1, starts=starts).any(axis=1).mean() <= limit(0.1)
    for procedure in (ltt.bonferroni, ltt.holm):
        assert procedure(p, 0.1).any(axis=1).mean() <= limit(0.1)
    for graph in (ltt.chain_graph(12), ltt.chain_graph(12, 12), ltt.grid_graph(3, 4)):
        assert graph_any(p[:, :12], 0.1, graph).mean() <= limit(0.1)


@pytest.mark.parametrize("method", ["binomial", "hoeffding_bentkus", "wsr"])
def test_two_boundary_nulls_in_a_fixed_order(method):
    coins = (np.random.default_rng(1).random((154, 2 * DRAWS)) < 0.2).astype(float)
    p = ltt.p_value_methods[method].p(coins, 0.2, 0.1).reshape(DRAWS, 2)
    assert ltt.fixed_sequence(p, 0.1).any(axis=1).mean() <= limit(0.1)


def test_mapie_errs_twice_as_often_on_the_same_input():
    from mapie.risk_control._base_controller import ltt_procedure

    risks = (np.random.default_rng(1).random((4000, 154, 2)) < 0.2).mean(axis=1)
    size, level = np.full((1, 2), 154), np.array([[0.2]])
    wrong = [len(ltt_procedure(r[None], level, 0.1, size, True, "fixed_sequence")[0][0]) > 0 for r in risks]
    assert np.mean(wrong) > 0.15
    ours = ltt.fixed_sequence(ltt.binomial_p_value(mean=risks, n=154, alpha=0.2), 0.1).any(axis=1)
    assert ours.mean() <= limit(0.1, 4000)


@pytest.mark.parametrize("seed", range(3))
def test_random_correlated_losses(seed):
    "Ten settings share their noise; some are good, some exactly at the level, some worse, in no order."
    rng, n, k = np.random.default_rng([seed, 7]), 100, 10
    truth = rng.permutation([0.005, 0.01, 0.02, 0.05, 0.1, 0.1, 0.1, 0.1, 0.12, 0.15])
    bad, share, p = truth >= 0.1, np.float32(rng.random()), {"hoeffding_bentkus": [], "wsr": [], "binomial": []}
    for _ in range(5):
        common = rng.standard_normal((n, DRAWS // 5, 1), dtype=np.float32)
        own = rng.standard_normal((n, DRAWS // 5, k), dtype=np.float32)
        noise = np.sqrt(share) * common + np.sqrt(1 - share) * own
        table = (noise < ltt.ndtri(truth)).astype(float).reshape(n, -1)
        for method in p:
            p[method].append(ltt.p_value_methods[method].p(table, 0.1, 0.05).reshape(-1, k))
    for method, values in p.items():
        values = np.concatenate(values)
        masks = {
            "bonferroni": ltt.bonferroni(values, 0.05), "holm": ltt.holm(values, 0.05),
            "sequence": ltt.fixed_sequence(values, 0.05), "starts": ltt.fixed_sequence(values, 0.05, starts=4),
        }
        if method == "binomial":
            masks["graph"] = np.array([ltt.graphical(row, 0.05, *ltt.chain_graph(k, 3)) for row in values])
        for name, valid in masks.items():
            assert valid[:, bad].any(axis=1).mean() <= limit(0.05), (method, name)
        assert masks["holm"].mean() >= masks["bonferroni"].mean() > 0


def test_split_and_pareto_through_the_entry():
    "The order is learned on a split; every setting is exactly at its level, so any valid setting is an error."
    rng, draws, wrong = np.random.default_rng(2), 1000, 0
    for seed in range(draws):
        table = (rng.random((200, 6)) < 0.2).astype(float)
        result = ltt.learn_then_test(
            table, 0.2, 0.1, method="binomial", test="split_fixed_sequence", costs=rng.random(6), random_state=seed
        )
        wrong += bool(result.valid)
    assert wrong / draws <= limit(0.1, draws)


def test_several_risks_through_their_largest_p_value():
    rng = np.random.default_rng(4)
    good = (rng.random((200, DRAWS)) < 0.01).astype(float)
    at_level = (rng.random((200, DRAWS)) < 0.1).astype(float)
    p = np.maximum(ltt.binomial_p_value(good, 0.1), ltt.binomial_p_value(at_level, 0.1))
    assert (p <= 0.05).mean() <= limit(0.05)


def closed_testing(p, delta):
    "Holm by its definition: a doubt falls when Bonferroni refutes every set of doubts that holds it."
    k = len(p)
    valid = np.ones(k, dtype=bool)
    for size in range(1, k + 1):
        for group in itertools.combinations(range(k), size):
            if p[list(group)].min() > delta / size:
                valid[list(group)] = False
    return valid


def test_holm_is_closed_testing():
    rng = np.random.default_rng(5)
    for _ in range(200):
        p = rng.beta(0.2, 2, 5)
        assert (ltt.holm(p, 0.1) == closed_testing(p, 0.1)).all()


def test_fixed_sequence_asks_for_nothing_beyond_a_failure():
    rng = np.random.default_rng(6)
    for _ in range(200):
        p, starts = rng.beta(0.1, 2, 15), int(rng.integers(1, 6))
        asked = []
        lazy = ltt.fixed_sequence(lambda j: asked.append(j) or p[j], 0.1, starts=starts, k=15)
        eager = ltt.fixed_sequence(p, 0.1, starts=starts)
        assert (lazy == eager).all()
        failures = [j for j in asked if not eager[j]]
        assert len(asked) == len(set(asked)) and len(failures) <= starts


def test_graph_passes_its_level_on():
    weights, transitions = ltt.chain_graph(4, starts=[0, 2])
    assert weights.tolist() == [0.5, 0, 0.5, 0]
    assert ltt.graphical([0.025, 0.025, 0.05, 0.06], 0.05, weights, transitions).tolist() == [True, True, True, False]
    assert ltt.graphical([0.026, 0.001, 0.025, 0.025], 0.05, weights, transitions).tolist() == [False, False, True, True]
    for bad in ([0.6, 0.6], [0.5, -0.1], [0.5]):
        with pytest.raises(ValueError):
            ltt.graphical([0.1, 0.1], 0.05, bad, np.zeros((2, 2)))
    with pytest.raises(ValueError):
        ltt.graphical([0.1, 0.1], 0.05, [0.5, 0.5], np.eye(2))


def test_refusals():
    for procedure in (ltt.bonferroni, ltt.holm, ltt.fixed_sequence):
        for p in ([], [np.nan], [1.2], 0.5):
            with pytest.raises(ValueError, match="p_values"):
                procedure(p, 0.1)
        for delta in (0, 1, np.nan, "0.1"):
            with pytest.raises(ValueError, match="delta"):
                procedure([0.5], delta)
    for starts in (0, 4, [0, 0], [3], [], 1.5):
        with pytest.raises(ValueError, match="starts"):
            ltt.fixed_sequence([0.1, 0.1, 0.1], 0.1, starts=starts)
