"Statistics of attack scores, and attacks on tables, against independent answers and known faults of other tools."
import math

import numpy as np
import pytest
from scipy import stats

from databloom import privacy_attacks as pa


def binomial_slack(p, n, errors=3):
    return errors * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("n", [1, 2, 10, 333])
def test_clopper_pearson_is_scipys(n):
    for k in {0, 1, n // 3, n - 1, n} - {-1}:
        ours, theirs = pa.clopper_pearson(k, n, 0.9), stats.binomtest(k, n).proportion_ci(0.9, method="exact")
        assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_auc_error_equals_a_bootstrap_by_patient():
    r = np.random.default_rng(0)
    person = r.normal(size=80)
    ids, inside = np.repeat(np.arange(80), 3), np.tile([True, False, True], 80)
    scores = person[ids] + 0.3 * inside + 0.5 * r.normal(size=240)
    found = pa.membership(scores[inside], scores[~inside], member_ids=ids[inside], nonmember_ids=ids[~inside])
    draws = []
    for _ in range(600):
        rows = (r.integers(80, size=80)[:, None] * 3 + np.arange(3)).ravel()
        a, b = scores[rows][inside[rows]], scores[rows][~inside[rows]]
        draws.append(stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)))
    width = 2 * stats.t.ppf(0.975, 79) * np.std(draws)
    assert found.auc_high - found.auc_low == pytest.approx(width, rel=0.12)
    assert found.patients == 80 and math.isnan(found.tail_p_value)


@pytest.mark.parametrize("n", [25, 200])
def test_membership_intervals_cover_the_null(n):
    r = np.random.default_rng(n)
    found = [pa.membership(np.round(r.standard_t(2, n), 1), np.round(r.standard_t(2, n), 1), fpr=0.05, random_state=s) for s in range(200)]
    assert np.mean([f.auc_low <= 0.5 <= f.auc_high for f in found]) >= 0.93
    assert np.mean([f.advantage_low <= 0 <= f.advantage_high for f in found]) >= 0.93
    assert np.mean([f.tpr_low <= 0.05 <= f.tpr_high for f in found]) >= 0.93
    assert np.mean([f.epsilon_low > 0 for f in found]) <= 0.05 + binomial_slack(0.05, 200)


def test_membership_intervals_cover_half_when_a_third_real_sample_is_released():
    r = np.random.default_rng(5)
    people = r.normal(size=(450, 6)) * np.linspace(1, 0.3, 6)
    covered, flagged = [], []
    for s in range(200):
        parts = np.split(r.permutation(people), 3)
        found = pa.membership_attacks(*pa.scaled(*parts), trials=0, random_state=s)
        covered += [f.auc_low <= 0.5 <= f.auc_high for f in found.results.values()]
        flagged.append(found.flagged)
    assert np.mean(covered) >= 0.93
    assert np.mean(flagged) <= 0.05 + binomial_slack(0.05, 200)


def test_degenerate_scores_give_answers_without_false_certainty():
    same = pa.membership(np.ones(50), np.ones(50))
    assert same.auc == 0.5 and same.auc_low < 0.5 < same.auc_high and same.p_value == 1 and same.epsilon_low == 0
    copy = pa.membership(np.ones(500), np.zeros(500))
    assert copy.auc == 1 and copy.auc_low > 0.98 and copy.tpr == 1 and copy.epsilon_low > 3
    for bad in ([], [np.nan], ["a"], [np.inf]):
        with pytest.raises(ValueError, match="members"):
            pa.membership(bad, [0.0])


def test_tail_sees_a_leak_that_the_auc_does_not():
    r = np.random.default_rng(1)
    members, others = r.normal(size=2000), r.normal(size=2000)
    members[:40] = 50.0
    found = pa.membership(members, others)
    assert found.auc < 0.53 and found.tail_p_value < 1e-6 and found.tpr_low > 0.012


def test_one_run_p_value_equals_a_plain_loop():
    def plain(m, r, v, eps, delta):
        q = 1 / (1 + math.exp(-eps))
        reach, best, total = stats.binom.sf(v - 1, r, q), 0.0, 0.0
        for i in range(1, v + 1):
            total += stats.binom.pmf(v - i, r, q)
            best = max(best, total / i)
        return min(1.0, reach + 2 * m * delta * best)
    for m, r, v, eps, delta in [(100, 50, 40, 0.5, 0), (1000, 200, 150, 0.7, 1e-5), (10, 10, 10, 3, 1e-3), (100, 20, 0, 1, 1e-4)]:
        assert pa.one_run_p_value(v, r, m, eps, delta) == pytest.approx(plain(m, r, v, eps, delta), rel=1e-9)


def test_epsilon_bounds_hold_for_randomised_response():
    r = np.random.default_rng(2)
    above = []
    for s in range(100):
        truth = r.random(2000) < 0.5
        answer = np.where(r.random(2000) < 1 / (1 + math.exp(-1)), truth, ~truth) + 0.0
        above.append((pa.one_run_audit(answer[truth], answer[~truth], random_state=s) > 1, pa.empirical_epsilon(answer[truth], answer[~truth], random_state=s) > 1))
    assert (np.mean(above, axis=0) <= 0.05 + binomial_slack(0.05, 100)).all()


def test_holm_by_hand():
    assert pa.holm_adjusted([0.005, 0.011, 0.02, 0.04]) == pytest.approx([0.02, 0.033, 0.04, 0.04])
    assert np.isnan(pa.holm_adjusted([math.nan, 0.5])).tolist() == [True, False]


def test_nearest_is_exact_and_sees_copies_at_distance_zero():
    r = np.random.default_rng(3)
    base, queries = 100 + r.normal(size=(1300, 9)), 100 + r.normal(size=(700, 9))
    distance, index = pa.nearest(queries, base, 4)
    brute = np.linalg.norm(queries[:, None].astype(np.float32) - base[None].astype(np.float32), axis=2)
    np.testing.assert_allclose(distance, np.sort(brute, axis=1)[:, :4], atol=1e-3)
    assert (pa.nearest(base, base, 1)[0] == 0).all()
    assert pa.nearest(queries, base[:2], 5)[0].shape == (700, 2)


def test_constant_all_missing_and_nan_columns_do_not_break_distances():
    r = np.random.default_rng(4)
    make = lambda n: np.column_stack([r.normal(size=n), np.full(n, 7.0), np.full(n, np.nan), np.where(r.random(n) < 0.5, np.nan, 1.0)])
    tables = pa.scaled(make(60), make(60), make(60))
    assert all(np.isfinite(t).all() for t in tables)
    for found in pa.closeness(*tables):
        assert 0 <= found.p_value <= 1
    assert not pa.membership_attacks(*tables, trials=2).flagged


def test_closeness_keeps_its_level_where_a_share_without_interval_would_alarm():
    r = np.random.default_rng(6)
    alarms, covered = [], []
    for s in range(200):
        train, holdout, fresh = r.normal(size=(3, 100, 4))
        found = pa.closeness(train, holdout, fresh, permutations=199, random_state=s)
        alarms.append(min(f.p_value for f in found[:1]) <= 0.05)
        covered.append(found[0].low <= 0.5 <= found[0].high)
    assert np.mean(alarms) <= 0.05 + binomial_slack(0.05, 200)
    assert np.mean(covered) >= 0.9
    train, holdout, fresh = r.normal(size=(3, 100, 4))
    assert pa.closeness(train, holdout, np.vstack([train[:50], fresh[:50]]))[0].p_value < 0.01


def test_attribute_inference_is_about_real_victims():
    r = np.random.default_rng(7)
    train, holdout, synthetic = r.normal(size=(3, 300, 3))
    real = lambda t: (t[:, 0] > 0) + 0.0
    wrong = (synthetic[:, 1] > 0) + 0.0     # the synthetic data agree with themselves and with no patient
    found = pa.attribute_inference("x", (train, holdout, synthetic), (real(train), real(holdout), wrong))
    assert abs(found.rate - 0.5) < 0.1 and found.p_value > 0.01
    leak = pa.attribute_inference("x", (train, holdout, train), (r.random(300) > 0.5, r.random(300) > 0.5, (secret := r.random(300) > 0.5)))
    assert leak.rate < 0.65
    leak = pa.attribute_inference("x", (train, holdout, train), (secret, r.random(300) > 0.5, secret))
    assert leak.rate == 1 and leak.low > 0.3


def test_no_possible_query_is_no_all_clear():
    coarse = np.tile([[0.0, 1.0], [1.0, 0.0]], (50, 1))
    found = pa.singling_out(coarse, coarse, coarse, categorical=[True, True], columns=2, attempts=50)
    assert found.attempts == 0 and math.isnan(found.rate) and math.isnan(found.p_value) and (found.low, found.high) == (-1, 1)
    assert math.isnan(pa.linkability(coarse[:, :1], coarse[:, :1], coarse[:, :1]).p_value)


def test_singling_out_and_linkability_agree_with_anonymeter():
    pytest.importorskip("anonymeter")
    import pandas as pd
    from anonymeter.evaluators import LinkabilityEvaluator, SinglingOutEvaluator
    r = np.random.default_rng(8)
    names = list("abcdef")
    law = lambda: pd.DataFrame(r.normal(size=(150, 6)) * [1, 1, 2, 2, 3, 3], columns=names)
    train, holdout, fresh = law(), law(), law()
    for synthetic, leaks in ((fresh, False), (train, True)):
        theirs = SinglingOutEvaluator(ori=train, syn=synthetic, control=holdout, n_attacks=40, n_cols=3)
        theirs.evaluate(mode="multivariate")
        ours = pa.singling_out(train, holdout, synthetic, attempts=200)
        results = theirs.results()
        assert abs(ours.rate - results.attack_rate.value) < 0.2 and abs(ours.control_rate - results.control_rate.value) < 0.2
        assert (ours.low > 0) == leaks
        link = LinkabilityEvaluator(ori=train, syn=synthetic, control=holdout, n_attacks=150, aux_cols=(names[:3], names[3:]), n_neighbors=1)
        link.evaluate()
        mine = pa.linkability(*pa.scaled(train, holdout, synthetic))
        assert abs(mine.rate - link.results().attack_rate.value) < 0.1 and (mine.low > 0) == leaks


def test_planted_copies_are_found_and_tiny_sets_admit_it():
    r = np.random.default_rng(9)
    train, holdout, fresh = r.normal(size=(3, 1000, 8))
    planted = np.vstack([fresh[50:], train[:50]])
    assert pa.membership_attacks(train, holdout, planted).flagged
    clean = pa.membership_attacks(train, holdout, fresh)
    assert not clean.flagged and clean.power == 1
    few = pa.membership_attacks(train[:15], holdout[:15], fresh)
    assert few.power < 0.8


def test_shadow_models_find_what_they_should():
    r = np.random.default_rng(10)
    train, control, known = r.normal(size=(3, 300, 5))
    leaky = lambda table: lambda rows, n, s: table[np.random.default_rng(s).choice(rows, n)] + 0.2 * np.random.default_rng(s + 1).normal(size=(n, 5))
    safe = lambda rows, n, s: np.random.default_rng(s).normal(size=(n, 5))
    for make, released, leaks in ((leaky(known), leaky(train)(np.arange(300), 600, 3), True), (safe, safe(None, 600, 4), False)):
        scores = pa.shadow_scores(make, known, np.vstack([train, control]), released, runs=2)
        found = pa.membership(scores[:300], scores[300:])
        assert (found.auc_low > 0.7) if leaks else (found.auc_low < 0.5 < found.auc_high)


def test_results_go_to_json():
    found = pa.membership([1.0, 2.0, 3.0], [0.5, 1.0, 4.0])
    assert '"auc"' in found.to_json() and "AUC" in str(found)
