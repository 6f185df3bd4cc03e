"EHR-Safe: the normaliser, odd cohorts, constraints, and a small bench on simulated stays."
import json

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from databloom.cohorts import Cohort, Schema
from databloom.ehr_safe import EhrSafe, EhrSettings, Monotone, Ordered, Range, StochasticNormalizer, project_order
from databloom.fidelity import compare
from databloom.icu_simulator import simulate_icu

quick = dict(epochs=2, gan_steps=10, calibration=100, hidden=16, latent=4, progress=False)


@pytest.mark.parametrize("seed", range(6))
def test_normaliser_is_exact_uniform_and_monotone(seed):
    rng = np.random.default_rng(seed)
    values = np.round(rng.lognormal(size=2000), int(rng.integers(0, 3)))
    values[rng.random(2000) < 0.3] = np.median(values)
    gone = rng.random(2000) < 0.1
    values[gone] = np.nan
    made = StochasticNormalizer().fit(values)
    u = made.transform(values, seed)
    seen = ~gone
    assert (np.isnan(u) == gone).all() and (made.inverse(u)[seen] == values[seen]).all()
    assert np.abs(np.sort(u[seen]) - np.linspace(0, 1, seen.sum())).max() < 0.05
    order = np.argsort(u[seen])
    assert (np.diff(values[seen][order]) >= 0).all()
    assert (made.transform(values, seed)[seen] == u[seen]).all()


def test_unseen_values_go_to_the_nearest_cell():
    made = StochasticNormalizer().fit([1.0, 2.0, 4.0])
    assert made.inverse(made.transform([0.0, 1.4, 2.9, 3.1, 99.0], 0)).tolist() == [1, 1, 2, 4, 4]
    u = made.transform(np.linspace(0, 5, 50), 0)
    assert (np.diff((u * 3).astype(int)) >= 0).all()


@pytest.mark.parametrize("count", [2, 5, 20])
def test_protection_stores_no_rare_value(count):
    rng = np.random.default_rng(count)
    values = np.concatenate([rng.lognormal(0, 2, 500), np.full(100, 3.0), [1e6, -50.0]])
    made = StochasticNormalizer(min_count=count).fit(values)
    stored = np.concatenate([made.low, made.high])
    distinct, counts = np.unique(values, return_counts=True)
    assert not np.isin(stored, distinct[counts < count]).any()
    shares = np.diff(np.append(0, made.upper)) * len(values)
    assert shares.min() >= count - 1e-6 and abs(made.upper[-1] - 1) < 1e-12
    assert made.inverse(np.linspace(0, 1, 5000)).max() < 1e6
    assert (np.diff(made.inverse(np.linspace(0, 1, 5000))) >= 0).all()
    assert (made.low[1:] >= made.high[:-1] - 1e-9).all()


def test_bins_clip_constant_and_empty():
    values = np.arange(1000.0)
    assert len(StochasticNormalizer(bins=20).fit(values).upper) <= 20
    clipped = StochasticNormalizer(clip=0.05).fit(values)
    assert clipped.low.min() >= 49 and clipped.high.max() <= 950
    assert StochasticNormalizer(min_count=5).fit(np.full(7, 2.0)).inverse([0, 0.5, 1]).tolist() == [2, 2, 2]
    assert np.isnan(StochasticNormalizer().fit([np.nan]).transform([np.nan], 0)).all()
    for bad in (dict(min_count=0), dict(bins=0), dict(clip=0.5), dict(clip=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            StochasticNormalizer(**bad)


def test_projection_is_least_squares():
    rng = np.random.default_rng(0)
    from sklearn.isotonic import IsotonicRegression
    for line in rng.normal(size=(40, 6)):
        assert np.allclose(project_order(line[None])[0], IsotonicRegression().fit_transform(np.arange(6), line))


def odd_cohort(kind, n=60):
    rng = np.random.default_rng(0)
    length = rng.integers(0 if kind == "some without rows" else 1, 6, n)
    who = np.repeat(np.arange(n), length)
    time = np.concatenate([np.sort(rng.choice(50, k, replace=False)) for k in length] or [[]])
    static = pd.DataFrame({"id": [f"p{i:03d}" for i in range(n)], "age": pd.array(rng.integers(20, 90, n), dtype="Int64"), "sex": pd.Categorical(rng.choice(["F", "M"], n)),
                           "smoker": pd.array(rng.choice([True, False, None], n), dtype="boolean"), "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 400, n), "D"),
                           "died": rng.integers(0, 2, n)})
    rows = pd.DataFrame({"id": static["id"].to_numpy()[who], "hour": time.astype("int64"), "x": rng.normal(size=len(who)), "k": pd.array(rng.integers(0, 9, len(who)), dtype="Int64"),
                         "empty": np.full(len(who), np.nan), "same": np.full(len(who), 3.0)})
    rows.loc[rng.random(len(rows)) < 0.5, "x"] = np.nan
    rows.loc[rng.random(len(rows)) < 0.3, "k"] = pd.NA
    schema = dict(id="id", time="hour", static={"age": "integer", "sex": "categorical", "smoker": "binary", "seen": "datetime", "died": "binary"},
                  temporal={"x": "numeric", "k": "integer", "empty": "numeric", "same": "numeric"}, outcome="died")
    if kind == "dates as time":
        rows["hour"] = pd.Timestamp("2021-05-01", tz="UTC") + pd.to_timedelta(rows["hour"], "h")
    if kind == "no outcome":
        schema["outcome"] = None
    if kind == "statics only":
        return Cohort(Schema(id="id", static=schema["static"], outcome="died"), static)
    if kind == "rows only":
        return Cohort(Schema(id="id", time="hour", temporal=schema["temporal"]), None, rows)
    return Cohort(Schema(**schema), static, rows)


@pytest.mark.parametrize("kind", ["plain", "dates as time", "no outcome", "statics only", "rows only", "some without rows"])
def test_odd_cohorts_keep_schema_dtypes_and_order(kind, tmp_path):
    cohort = odd_cohort(kind)
    model = EhrSafe(**quick).fit(cohort)
    made = model.sample(37, random_state=0)
    assert len(made) == 37 and made.schema == cohort.schema
    assert (made.static.dtypes == cohort.static.dtypes).all() and (made.temporal.dtypes == cohort.temporal.dtypes).all()
    if len(made.temporal):
        assert made.temporal["empty"].isna().all() and (made.temporal["same"] == 3).all()
        steps = made.temporal.groupby("id")["hour"].diff().dropna()
        assert (steps > pd.Timedelta(0) if kind == "dates as time" else steps > 0).all()
    loaded = EhrSafe.load(model.save(tmp_path / "m"), progress=False)
    assert loaded.sample(37, random_state=0).equals(made)
    about = json.loads((tmp_path / "m" / "model.json").read_text())
    assert "No record of a patient" in about["stores of the real data"]


def test_outcome_that_varies_in_time_keeps_its_rate():
    stays = simulate_icu(150, random_state=1, hours=8, max_hours=80, outcome="SepsisLabel", sepsis_rate=0.3)
    model = EhrSafe(**quick).fit(stays)
    ever = lambda c: c.temporal.groupby("id")["SepsisLabel"].max().mean()
    assert abs(ever(model.sample(200, random_state=0)) - ever(stays)) <= 1 / 200 + 1e-9
    assert ever(model.sample(30, {"SepsisLabel": 1}, random_state=0)) == 1 and ever(model.sample(30, {"outcome": 0}, random_state=0)) == 0


def test_constraints_hold_whatever_was_learned():
    stays = simulate_icu(80, random_state=2, hours=8, max_hours=80)
    rules = (Ordered("DBP", "MAP", "SBP"), Range("HR", 60, 90), Range("MAP", 65, 90), Monotone("Severity"))
    made = EhrSafe(constraints=rules, **quick).fit(stays).sample(100, random_state=0)
    low, middle, high = (made.numbers(n) for n in ("DBP", "MAP", "SBP"))
    assert not ((low > middle) | (middle > high) | (low > high)).any()
    assert made.temporal["HR"].dropna().between(60, 90).all() and made.temporal["MAP"].dropna().between(65, 90).all()
    assert (made.temporal.groupby("id")["Severity"].diff().dropna() >= 0).all()
    for bad in (Range("HR", 90, 60), Monotone("age"), Ordered("HR", "age"), Range("sex", 0, 1), "HR"):
        with pytest.raises(ValueError):
            EhrSafe(constraints=[bad], **quick).fit(stays)


def test_rare_and_extreme_values_are_protected(tmp_path):
    stays = simulate_icu(80, random_state=3, hours=8, max_hours=80)
    lactate = stays.temporal["Lactate"].dropna()
    plain, guarded = (EhrSafe(**{**quick, **choices}).fit(stays) for choices in (dict(min_count=1), dict(clip=0.05, cells=10)))
    stored = lambda model: next(c.map for c in model.columns[3] if c.name == "Lactate")
    assert set(np.round(stored(plain).low, 6)) == set(np.round(lactate, 6))
    assert len(stored(guarded).low) <= 12
    low, high = np.quantile(lactate, [0.05, 0.95])
    made = guarded.sample(200, random_state=0).temporal["Lactate"].dropna()
    assert made.between(low - 0.1, high + 0.1).all() and lactate.max() > high + 0.1
    assert "every distinct real value" in json.loads((plain.save(tmp_path / "p") / "model.json").read_text())["stores of the real data"]
    for bad in (dict(clip=0.5), dict(cells=1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            EhrSafe(**bad)


def test_dates_are_conditions_too():
    cohort = odd_cohort("plain")
    model = EhrSafe(**quick).fit(cohort)
    made = model.sample(25, {"seen": ("2020-03-01", "2020-04-01"), "smoker": True}, random_state=0)
    assert made.static["seen"].between("2020-03-01", "2020-04-01").all() and (made.static["smoker"] == True).all()  # noqa: E712
    with pytest.raises(ValueError, match="seen"):
        model.sample(5, {"seen": "the other day"})


def test_a_broken_model_is_named(tmp_path):
    model = EhrSafe(**quick).fit(odd_cohort("plain"))
    folder = model.save(tmp_path / "m")
    weights = (folder / "model.safetensors").read_bytes()
    for broken in (b"", weights[: len(weights) // 2]):
        (folder / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors"):
            EhrSafe.load(folder)
    (folder / "model.json").write_text("{")
    with pytest.raises(ValueError, match="model.json"):
        EhrSafe.load(folder)


def test_passes_follow_the_number_of_rows():
    from databloom.ehr_safe import _passes
    assert [_passes(EhrSettings(), rows) for rows in (0, 20_000, 120_000, 10**8)] == [40, 40, 10, 3]
    assert _passes(EhrSettings(epochs=7), 10**8) == 7


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="epochs"):
        EhrSettings(epochs=0)
    with pytest.raises(ValueError, match="normalize"):
        EhrSafe(normalize="rank")
    with pytest.raises(ValueError, match="cohort"):
        EhrSafe().fit(3)
    with pytest.raises(ValueError, match="20 patients"):
        EhrSafe().fit(simulate_icu(10, 0))
    with pytest.raises(ValueError, match="folder"):
        EhrSafe.load("/nowhere")


def test_small_bench_on_simulated_stays():
    real, second = simulate_icu(600, random_state=5, hours=8, max_hours=72).split((0.5, 0.5), random_state=0)
    made = EhrSafe(epochs=12, gan_steps=50, calibration=500, hidden=64, random_state=0, progress=False).fit(real).sample(600, random_state=0)
    found = compare(real, made, permutations=19, envelope=20, random_state=0)
    assert found.group("ks")["mean"] < 0.06, found.group("ks")
    assert found.group("missing")["mean"] < 0.02 and found.group("length")["mean"] < 0.08
    assert found.group("correlation")["mean"] < 0.15 and found.group("lag-1")["mean"] < 0.12
    assert abs(made.numbers("died").mean() - real.numbers("died").mean()) <= 2e-3
