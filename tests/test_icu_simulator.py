"The simulator: seeded bit for bit, plausible, informative where it claims to be, quick."
import hashlib
import time

import numpy as np
import pandas as pd
import pytest

from databloom.cohorts import Cohort
from databloom.icu_simulator import icu_schema, labs, simulate_icu, vitals


@pytest.fixture(scope="module")
def icu():
    return simulate_icu(3000, random_state=0)


def digest(cohort):
    text = "".join(frame.astype("str").to_csv() for frame in cohort.to_frames())
    return hashlib.sha256(text.encode()).hexdigest()


def test_same_seed_same_bytes():
    assert digest(simulate_icu(40, 3)) == digest(simulate_icu(40, 3)) == digest(simulate_icu(40, np.random.default_rng(3)))
    assert digest(simulate_icu(40, 3)) != digest(simulate_icu(40, 4))
    assert digest(simulate_icu(5)) != digest(simulate_icu(5))


def test_a_thousand_stays_take_a_few_seconds():
    start = time.perf_counter()
    simulate_icu(1000, random_state=1)
    assert time.perf_counter() - start < 5


def test_schema_and_kinds(icu, tmp_path):
    assert icu.schema == icu_schema and {"age", "sex", "religion", "marital_status", "icu_type", "weight", "died"} == set(icu.schema.names("static"))
    assert {"HR", "O2Sat", "Temp", "SBP", "MAP", "DBP", "Resp", "Lactate", "Creatinine", "WBC", "BUN", "Glucose", "Platelets", "Bilirubin_total",
            "SepsisLabel", "Severity"} <= set(icu.schema.names("temporal"))
    for format in ("parquet", "csv"):
        small = icu.select(icu.ids[:20])
        assert Cohort.load(small.save(tmp_path, format)).equals(small)


def test_physiology(icu):
    rows = icu.temporal
    pressures = rows[["DBP", "MAP", "SBP"]].dropna()
    assert ((pressures.DBP < pressures.MAP) & (pressures.MAP < pressures.SBP)).all()
    assert rows.O2Sat.max() <= 100 and rows.Temp.between(33, 41.5)[rows.Temp.notna()].all()
    assert (rows[list(labs)].min() > 0).all()
    assert rows.Creatinine.corr(rows.BUN) > 0.3 and rows.HR.corr(rows.Resp) > 0.2
    same = rows.id.diff() == 0
    for name in vitals:
        pair = pd.DataFrame({"a": rows[name], "b": rows[name].shift()})[same].dropna()
        assert 0.6 < pair.a.corr(pair.b) < 0.99, name
    assert icu.static.groupby("sex", observed=True).weight.mean().diff().iloc[1] > 5


def test_lengths_vary_and_hours_run(icu):
    assert icu.lengths.min() >= 8 and icu.lengths.max() <= 120 and 30 < np.median(icu.lengths) < 50
    assert (icu.temporal.groupby("id").ICULOS.agg(lambda t: (np.diff(t) == 1).all() and t.iloc[0] == 1)).all()


def test_sepsis_label_and_severity(icu):
    rows = icu.temporal
    per = rows.groupby("id").SepsisLabel
    assert 0.06 < per.max().mean() < 0.13
    assert (rows.SepsisLabel.diff()[rows.id.diff() == 0] >= 0).all()          # a label never switches off
    assert set(rows.Severity) == {0, 1, 2, 3, 4}
    assert ((rows.Severity >= 2) == (rows.SepsisLabel == 1)).all()
    seen = rows[(rows.SepsisLabel == 1) & (rows.MAP < 65) & (rows.Lactate > 2)]
    assert len(seen) > 5 and (seen.Severity == 4).all()
    assert simulate_icu(200, 0, sepsis_rate=1.0).temporal.groupby("id").SepsisLabel.max().all()


def test_missingness_is_informative(icu):
    rows = icu.temporal
    looked = rows.groupby("SepsisLabel")[["Lactate", "Creatinine", "Temp"]].agg(lambda x: x.notna().mean())
    assert looked.Lactate[1] > 1.5 * looked.Lactate[0] and looked.Creatinine[1] > looked.Creatinine[0]
    missing = rows[list(vitals) + list(labs)].isna().mean()
    assert missing.HR < 0.12 and missing.Bilirubin_total > 0.9 and missing[list(labs)].min() > 0.7
    assert (rows.BUN.isna() == rows.Creatinine.isna()).all()                   # a panel comes together


def test_death_can_be_foreseen_but_not_known(icu):
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score
    table = icu.temporal.groupby("id")[list(vitals) + list(labs)].agg(["mean", "last", "count"])
    died = icu.numbers("died")
    assert 0.07 < died.mean() < 0.17
    model = HistGradientBoostingClassifier(max_iter=60, random_state=0).fit(table[:2000], died[:2000])
    assert 0.7 < roc_auc_score(died[2000:], model.predict_proba(table[2000:])[:, 1]) < 0.97


def test_marital_status_follows_age_and_rare_categories_exist(icu):
    status = icu.static
    assert (status.marital_status[status.age < 35] == "Single").mean() > 2 * (status.marital_status[status.age > 65] == "Single").mean()
    assert 0 < (status.religion == "Buddhist").mean() < 0.03
    assert 0.05 < status.religion.isna().mean() < 0.2 and 0.04 < status.weight.isna().mean() < 0.13


@pytest.mark.parametrize("hours", [2, 4, 24])
def test_coarser_rows(hours):
    fine, coarse = simulate_icu(60, 5), simulate_icu(60, 5, hours=hours)
    pd.testing.assert_frame_equal(fine.static, coarse.static)
    block = (fine.temporal.ICULOS - 1) // hours
    groups = fine.temporal.groupby(["id", block])
    np.testing.assert_allclose(coarse.numbers("HR"), groups.HR.mean().round(2).to_numpy())
    assert coarse.temporal.SepsisLabel.tolist() == groups.SepsisLabel.max().tolist()
    assert coarse.temporal.ICULOS.tolist() == groups.ICULOS.max().tolist()
    assert coarse.labels("airway").tolist() == [None if not isinstance(v, str) else v for v in groups.airway.last().astype(object)]


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 1.5}, {"hours": 0}, {"hours": 25}, {"sepsis_rate": 1.1}, {"max_hours": 10}, {"outcome": "HR"}, {"random_state": -1}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        simulate_icu(**{"n": 5, **bad})


def test_one_stay_and_block_edges():
    assert len(simulate_icu(1, 0)) == 1
    many = simulate_icu(2001, 0)
    assert many.ids.tolist() == list(range(1, 2002))
