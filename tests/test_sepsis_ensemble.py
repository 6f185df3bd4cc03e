"""Edge cases of the sepsis ensembles that do not teach: odd pools, odd stays, odd files; and one round trip of real data."""

import math
import warnings

import joblib
import numpy as np
import pytest

from databloom.cohorts import Cohort, Schema
from databloom.core import data_folder
from databloom.icu_simulator import simulate_icu
from databloom.sepsis_ensemble import (
    Reservoir, auroc, baselines, best_subset, carry_forward, clean, derived_severity, error_covariance, evaluate, fit_logistic, fit_preprocessor, fold_rotation, grow,
    growing_rules, hourly_utility, joins, load_ensemble, online_predictions, online_trust, optimal_weights, save_ensemble, simplex_weights, summaries, train_ensemble,
    train_lstms, train_readouts, train_regressors, utility_score, window_rows,
)

pd = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def stays():
    cohort = simulate_icu(120, random_state=5, outcome="SepsisLabel", sepsis_rate=0.3)
    return fit_preprocessor(cohort, public=True)(cohort)


def little(rows, kinds=None, time_unit="hour", outcome=None):
    "A cohort from a dict of columns."
    table = pd.DataFrame(rows)
    columns = [(n, (kinds or {}).get(n, "numeric")) for n in table if n not in ("id", "t")]
    return Cohort(Schema("id", "t", (), columns, outcome, time_unit), None, table)


def test_two_identical_patients():
    C = np.array([[1.0, 1.0, 0.2], [1.0, 1.0, 0.2], [0.2, 0.2, 1.0]])
    for rule in growing_rules:
        assert grow(C, rule=rule).errors[-1] == pytest.approx(0.6)
    assert optimal_weights(C) @ C @ optimal_weights(C) == pytest.approx(0.6)
    assert simplex_weights(C) @ C @ simplex_weights(C) == pytest.approx(0.6, abs=1e-9)


def test_order_of_the_pool_does_not_matter():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(7, 9)) + 0.5
    C, p = root @ root.T / 9, rng.permutation(7)
    for rule in growing_rules:
        assert set(p[list(grow(C[np.ix_(p, p)], rule=rule).members)]) == set(grow(C, rule=rule).members)


def test_pool_of_one_and_empty_pool():
    one = np.array([[0.3]])
    assert grow(one).members == (0,) and grow(one).errors == (0.3,)
    assert optimal_weights(one) == [1.0] and simplex_weights(one) == [1.0] and best_subset(one).members == (0,)
    for function in (grow, optimal_weights, simplex_weights, best_subset):
        with pytest.raises(ValueError, match="at least one"):
            function(np.zeros((0, 0)))


def test_no_septic_model():
    C = np.diag([1.0, 0.5, 2.0])
    assert grow(C, septic=np.zeros(3, bool)).members == grow(C).members


def test_a_nan_prediction_leaves_one_model_out():
    rng = np.random.default_rng(0)
    predictions = rng.normal(size=(50, 4))
    predictions[3, 2] = np.nan
    C = error_covariance(predictions, np.zeros(50))
    assert np.isnan(C[2]).all() and np.isfinite(np.delete(np.delete(C, 2, 0), 2, 1)).all()
    for rule in growing_rules:
        made = grow(C, rule=rule)
        assert 2 not in made.members and "not finite" in made.reasons[2]
    with pytest.raises(ValueError, match="finite"):
        optimal_weights(C)
    with pytest.raises(ValueError, match="finite"):
        grow(np.full((2, 2), np.nan))


def test_first_fit_equals_the_inequality_one_step():
    rng = np.random.default_rng(3)
    for _ in range(100):
        root = rng.normal(size=(6, 8)) + rng.normal()
        C = root @ root.T / 8
        members = list(rng.choice(6, 3, replace=False))
        for new in set(range(6)) - set(members):
            mse = lambda m: C[np.ix_(m, m)].mean()
            assert joins(C, members, new) == (mse(members + [new]) < mse(members))


def test_simplex_bounds_hold_always():
    rng = np.random.default_rng(4)
    for n in (2, 5, 30):
        for rank in (1, n, 3 * n):
            root = rng.normal(size=(n, rank)) + rng.normal()
            C = root @ root.T / rank
            w, u = simplex_weights(C, max_steps=4000), np.full(n, 1 / n)
            assert w.min() >= 0 and w.sum() == pytest.approx(1, abs=1e-12)
            assert w @ C @ w <= min(np.diag(C).min(), u @ C @ u) + 1e-9
            capped = simplex_weights(C, cap=max(1 / n, 0.2), max_steps=4000)
            assert capped @ C @ capped <= u @ C @ u + 1e-9 and capped.max() <= max(1 / n, 0.2) + 1e-12


@pytest.mark.parametrize("cap", [0, -1, math.inf, math.nan, 0.1, 2])
def test_bad_caps(cap):
    with pytest.raises(ValueError, match="cap"):
        simplex_weights(np.eye(4), cap=cap)


def test_one_time_step():
    cohort = little({"id": [1, 2], "t": [3.0, 5.0], "HR": [80.0, np.nan], "SepsisLabel": [0, 1]}, {"SepsisLabel": "binary"})
    stays = fit_preprocessor(cohort, public=True)(cohort)
    assert len(stays.x) == 2 and np.isfinite(stays.x).all() and list(stays.y) == [0, 2]
    pool = train_readouts(stays, reservoir=Reservoir(stays.x.shape[1], units=4))
    assert np.isfinite(pool.predict(stays)).all()
    assert np.isfinite(train_lstms(stays, hidden=2, epochs=2).predict(stays)).all()
    assert utility_score(stays, [0, 1]) == pytest.approx(1.0)


def test_all_missing_column_and_gap():
    cohort = little({"id": [1] * 3, "t": [0.0, 1.0, 6.0], "HR": [np.nan] * 3, "WBC": [np.nan, 20.0, np.nan], "SepsisLabel": [0, 0, 1]}, {"SepsisLabel": "binary"})
    for public in (True, False):
        stays = fit_preprocessor(cohort, public=public)(cohort)
        assert len(stays.x) == 7 and np.isfinite(stays.x).all()  # the gap is filled by carrying forward
        assert list(stays.label) == [0] * 6 + [1]


def test_event_is_never_back_dated():
    cohort = little({"id": [1] * 4, "t": [0.0, 0.5, 0.75, 1.5], "HR": [80.0] * 4, "SepsisLabel": [0, 0, 1, 1]}, {"SepsisLabel": "binary"})
    stays = fit_preprocessor(cohort, public=True, step=0.5)(cohort)
    assert stays.hour[np.argmax(stays.label)] >= 0.75


def test_expert_severity_is_kept(stays):
    assert stays.severity == "expert" and (stays.known == 8).all()
    cohort = simulate_icu(5, random_state=5, outcome="SepsisLabel", sepsis_rate=1.0)
    schema = Schema("id", "ICULOS", cohort.schema.static, [c for c in cohort.schema.temporal if c.name != "Severity"], "SepsisLabel", "hour")
    derived = fit_preprocessor(cohort, public=True)(Cohort(schema, cohort.static, cohort.temporal.drop(columns="Severity")))
    assert derived.severity == "derived" and derived.known.max() <= 8 and ((derived.y >= 2) == (derived.label == 1)).all()


def test_sepsisexp_columns():
    cohort = little({"id": [1] * 3 + [2] * 2, "t": [0, 0.5, 1.0, 0, 0.5], "severity": [0, 2, 4, 0, 1], "lactate": [1.0, np.nan, 3, 2, 2], "sepsis": [0, 1, 1, 0, 0]},
                    {"severity": "integer", "sepsis": "binary"}, outcome="severity")
    stays = fit_preprocessor(cohort, step=0.5)(cohort)
    assert stays.names[0] == "lactate" and "sepsis" not in stays.names and list(stays.label) == [0, 1, 1, 0, 0] and list(stays.y) == [0, 2, 4, 0, 1]


def test_nothing_crosses_patients():
    carried, source = carry_forward(np.array([[1.0], [np.nan], [np.nan], [2.0]]), np.array([0, 2, 4]))
    assert np.isnan(carried[2, 0]) and source[2, 0] == -1 and carried[1, 0] == 1


def test_dirty_values():
    assert np.isnan(clean("HR", [math.inf, -5, 9999])).all()
    assert clean("unknown name", [5.0])[0] == 5
    nothing = lambda name: np.full(2, np.nan)
    assert list(derived_severity(nothing, np.array([0, 1]))[0]) == [0, 2]


def test_utility_edges(stays):
    well = stays.take(~stays.septic)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert math.isnan(utility_score(well, np.zeros(len(well.x)))) and len(caught) == 1
    ill = stays.take(stays.septic)
    assert utility_score(ill, np.ones(len(ill.x))) <= 1
    with pytest.raises(ValueError, match="alarms"):
        utility_score(stays, np.full(len(stays.x), 0.5))
    yes, no, best = hourly_utility(ill)
    assert (yes <= 1 + 1e-12).all() and (no >= -2).all() and best.any()


def test_windows(stays):
    counts, inside = window_rows(stays, -4.25, -3.75)
    assert (inside & ~stays.septic[stays.patient]).sum() == 0
    for p in np.flatnonzero(stays.septic)[:10]:
        rows = np.arange(stays.starts[p], stays.starts[p + 1])
        onset = stays.hour[rows][np.argmax(stays.label[rows])]
        assert list(stays.hour[rows][inside[rows]]) == [h for h in stays.hour[rows] if h == onset - 4]


def test_evaluate_pairs_and_refuses(stays):
    score = np.random.default_rng(0).random(len(stays.x))
    same = evaluate(stays, {"a": {"score": score}, "b": {"score": score}}, draws=20, only=("AUROC", "AUROC 4 h"))
    assert same.differences["b"]["AUROC"] == (0.0, 0.0, 0.0)
    assert set(evaluate(stays, baselines(stays), draws=2).values) == {"clock (from hour 48)", "SIRS >= 2", "qSOFA >= 2"}
    for bad in ({}, {"a": {}}, {"a": {"scores": score}}, {"a": {"score": score[:-1]}}, {"a": {"score": np.full(len(score), np.nan)}}):
        with pytest.raises(ValueError):
            evaluate(stays, bad, draws=2)


def test_online_weights_and_delay(stays):
    predictions = np.column_stack([stays.y, stays.y + 3.0])
    near = online_predictions(predictions, stays, delay=1)
    far = online_predictions(predictions, stays, delay=24)
    assert np.mean((near - stays.y) ** 2) < np.mean((far - stays.y) ** 2) < 1.5**2 + 1e-9
    assert (online_trust(predictions[:5], stays.y[:5], delay=50) == 1).all()
    with pytest.raises(ValueError, match="delay"):
        online_trust(predictions[:5], stays.y[:5], delay=0)


def test_a_member_depends_on_its_patient_only(stays):
    train = stays.take(np.arange(30))
    changed = stays.take(np.r_[np.arange(29), 40])
    R = Reservoir(stays.x.shape[1], units=8)
    a, b = (train_readouts(s, reservoir=R).readouts for s in (train, changed))
    np.testing.assert_allclose(a[:29], b[:29], atol=1e-5)
    assert np.abs(a[29] - b[29]).max() > 1e-3


def test_seeded(stays):
    a, b = (train_lstms(stays.take(np.arange(6)), hidden=4, epochs=3, random_state=7).predict(stays.take([50])) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    one, two = fold_rotation(stays, random_state=1), fold_rotation(stays, random_state=1)
    assert all((x["test"] == y["test"]).all() for x, y in zip(one, two))


class Mean:
    "The simplest regressor."

    def fit(self, x, y):
        self.value = float(np.mean(y))

    def predict(self, x):
        return np.full(len(x), self.value)


def test_any_regressor_and_any_backend(stays):
    few = stays.take(np.arange(4))
    here = train_regressors(few, Mean).predict(few)
    with joblib.parallel_config(backend="threading", n_jobs=2):
        np.testing.assert_array_equal(train_regressors(few, Mean).predict(few), here)


def test_dask_backend(stays):
    distributed = pytest.importorskip("distributed")
    few = stays.take(np.arange(4))
    with distributed.Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None):
        with joblib.parallel_config(backend="dask"):
            there = train_regressors(few, Mean).predict(few)
    np.testing.assert_array_equal(there, train_regressors(few, Mean).predict(few))


def test_files(stays, tmp_path):
    cohort = simulate_icu(30, random_state=1, outcome="SepsisLabel", sepsis_rate=0.5)
    prep = fit_preprocessor(cohort)
    made = train_ensemble(prep, prep(cohort), prep(cohort), units=4, target="utility")
    save_ensemble(made, tmp_path / "m")
    again = load_ensemble(tmp_path / "m")
    np.testing.assert_array_equal(again.predict(prep(cohort)), made.predict(prep(cohort)))
    np.testing.assert_array_equal(again.prep(cohort).x, prep(cohort).x)
    (tmp_path / "m" / "model.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold an ensemble"):
        load_ensemble(tmp_path / "m")


def test_auroc_against_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        label, score = rng.integers(0, 2, 30), rng.integers(0, 5, 30)
        if 0 < label.sum() < 30:
            a, b = score[label == 1][:, None], score[label == 0][None, :]
            assert auroc(label, score) == pytest.approx(np.mean((a > b) + 0.5 * (a == b)), abs=1e-12)


def test_logistic_curve_of_a_skewed_score():
    rng = np.random.default_rng(0)
    score = np.concatenate([np.full(4000, -0.05) + rng.normal(0, 1e-3, 4000), rng.exponential(0.3, 40)])
    label = np.concatenate([np.zeros(4000), np.ones(40)])
    label[rng.permutation(4040)[:20]] = 1
    a, b = fit_logistic(label, score)
    p = 1 / (1 + np.exp(-(a + b * score)))
    assert p.mean() == pytest.approx(label.mean(), abs=1e-4) and b > 0
    a, b = fit_logistic([0, 0, 1, 1], [0.0, 1.0, 2.0, 3.0])  # separable: finite, and steep
    assert math.isfinite(a) and 1 < b < 1e4


def test_lstm_buckets_hold_everyone_once():
    from databloom.sepsis_ensemble import _buckets
    lengths = np.random.default_rng(0).integers(1, 400, 700)
    groups = _buckets(lengths, 12, 160)
    assert sorted(np.concatenate(groups)) == list(range(700)) and max(map(len, groups)) <= 160
    for g in groups:
        windows = -(-lengths[g] // 12)
        assert windows.max() <= 1.3 * windows.min()


def test_table_of_the_trees_looks_backwards_and_knows_what_was_never_measured(stays):
    cohort = simulate_icu(6, random_state=8, outcome="SepsisLabel", sepsis_rate=0.5)
    prep = fit_preprocessor(cohort, public=True)
    whole, table = prep(cohort), summaries(prep(cohort))
    for t in (1, 5, 13, 30):
        part = prep(Cohort(cohort.schema, cohort.static, cohort.temporal.groupby("id").head(t)))
        short = summaries(part)
        for p in range(6):
            a, b = short[part.starts[p]: part.starts[p + 1]], table[whole.starts[p]: whole.starts[p] + t]
            np.testing.assert_allclose(a, b[: len(a)], atol=2e-4)
    name = next(n for n in whole.names if n.startswith("fresh_"))
    never = whole.x[:, whole.names.index(name)] == 0
    np.testing.assert_array_equal(np.isnan(table[:, whole.names.index(name[6:])]), never)
    without = fit_preprocessor(cohort, public=True, freshness=False)(cohort)
    assert np.isfinite(summaries(without)).all()


@pytest.mark.skipif(data_folder("icu") is None, reason="DATABLOOM_DATA does not name a folder with icu/")
def test_official_utility_on_real_stays():
    "Utility of real stays by the definition, hour by hour."
    frame = pd.read_parquet(data_folder("icu") / "p2019_setB.parquet", columns=["id", "ICULOS", "HR", "SepsisLabel"])
    wanted = np.r_[frame["id"].unique()[:150], frame.loc[frame.SepsisLabel == 1, "id"].unique()[:60]]
    frame = frame[frame["id"].isin(wanted)].rename(columns={"ICULOS": "t"})
    cohort = little(frame, {"SepsisLabel": "binary"})
    stays = fit_preprocessor(cohort, public=True)(cohort)
    alarms, total = np.random.default_rng(0).random(len(stays.x)) < 0.4, np.zeros(3)
    for a, b in zip(stays.starts[:-1], stays.starts[1:]):
        label = stays.label[a:b]
        ts = int(np.argmax(label)) + 6 if label.any() else None
        for t in range(b - a):
            if ts is None:
                total[0] -= 0.05 * alarms[a + t]
                continue
            if t > ts + 3:
                continue
            yes = max((t - ts + 12) / 6, -0.05) if t <= ts - 6 else (ts + 3 - t) / 9
            no = 0 if t <= ts - 6 else -2 * (t - ts + 6) / 9
            total += [yes if alarms[a + t] else no, no, yes if t >= ts - 12 else no]
    assert utility_score(stays, alarms) == pytest.approx((total[0] - total[1]) / (total[2] - total[1]), abs=1e-12)
