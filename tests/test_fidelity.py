"Measures of fidelity against plain definitions, their error rates, and the faults of other tools."
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from databloom import fidelity as fi
from databloom.cohorts import Cohort, Column, Schema
from databloom.core import data_folder

SCHEMA = Schema(
    "id", "hour",
    [Column("age", "integer"), Column("sex", "categorical"), Column("seen", "datetime"), Column("death", "binary")],
    [Column("HR", "numeric"), Column("lactate", "numeric"), Column("drug", "categorical"), Column("vent", "binary")], outcome="death")


def ward(n, seed, shift=0.0):
    r = np.random.default_rng(seed)
    severity = r.normal(size=n)
    lengths = r.integers(1, 10, n)
    who, hour = np.repeat(np.arange(n), lengths), np.concatenate([np.arange(k) for k in lengths])
    age = pd.array(np.round(60 + 10 * r.normal(size=n)).astype(int), dtype="Int64")
    age[r.random(n) < 0.1] = pd.NA
    static = pd.DataFrame({"id": np.arange(n), "age": age, "sex": pd.Categorical(np.where(r.random(n) < 0.5, "f", "m")),
                           "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(r.integers(0, 10**6, n), unit="s"), "death": (r.random(n) < 1 / (1 + np.exp(1.5 - 2 * severity))).astype(int)})
    own = r.normal(size=n)
    temporal = pd.DataFrame({"id": who, "hour": hour, "HR": 80 + shift + 10 * severity[who] + 5 * r.normal(size=len(who)),
                             "lactate": np.where(r.random(len(who)) < 0.6, np.nan, np.exp(0.3 * severity[who] + 0.3 * own[who] + 0.1 * r.normal(size=len(who)))),
                             "drug": np.where(r.random(len(who)) < 0.2, None, np.where(severity[who] > 0, "a", "b")), "vent": (severity[who] > 1).astype(int)})
    return Cohort(SCHEMA, static, temporal)


def plain(real, synthetic):
    "The definitions of ehr_bench.md, with pandas and scipy, one at a time."
    out, schema = {}, real.schema
    numeric = [c.name for c in schema.temporal if c.kind in ("numeric", "integer")]
    for table in ("static", "temporal"):
        for c in getattr(schema, table):
            if c.kind in ("numeric", "integer", "datetime"):
                a, b = (x.numbers(c.name) for x in (real, synthetic))
                out["ks", c.name] = stats.ks_2samp(a[~np.isnan(a)], b[~np.isnan(b)]).statistic
            else:
                a, b = (pd.Series(x.labels(c.name)).dropna().value_counts(normalize=True) for x in (real, synthetic))
                out["tv", c.name] = a.sub(b, fill_value=0).abs().sum() / 2
    frames = [pd.DataFrame({n: x.numbers(n) for n in numeric}) for x in (real, synthetic)]
    for n in numeric:
        out["missing", n] = abs(frames[0][n].isna().mean() - frames[1][n].isna().mean())
    r = [f.corr(min_periods=30).to_numpy()[np.triu_indices(len(numeric), 1)] for f in frames]
    out["correlation", "temporal pairs"] = np.nanmean(np.abs(r[0] - r[1]))
    lags = [[f[n].corr(f.groupby(x.patient)[n].shift(), min_periods=30) for n in numeric] for f, x in zip(frames, (real, synthetic))]
    for n, a, b in zip(numeric, *lags):
        out["lag-1", n] = abs(a - b)
    out["length", "rows per patient"] = stats.ks_2samp(real.lengths, synthetic.lengths).statistic
    return out


def check_plain(real, synthetic):
    found = {(m["group"], m["feature"]): m["value"] for m in fi.compare(real, synthetic, permutations=19, envelope=20).measures}
    for key, value in plain(real, synthetic).items():
        assert found[key] == pytest.approx(value, abs=1e-9 if key[0] in ("ks", "tv", "length") else 2e-5), key


def test_measures_are_the_definitions():
    check_plain(ward(300, 0), ward(200, 1, shift=3))


@pytest.mark.skipif(data_folder("icu") is None, reason="needs DATABLOOM_DATA")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bench_rows_are_the_definitions(seed):
    from databloom.ehr_bench import physionet2012_bench
    bench = physionet2012_bench(seed)
    check_plain(bench.training, bench.second)
    rows = fi.compare(bench.training, bench.second, permutations=199)
    assert rows.rejected == [] and len([m for m in rows.measures if m["group"] == "ks"]) == 12 and len([m for m in rows.measures if m["group"] == "tv"]) == 4
    shift = fi.compare(bench.training, bench.test, permutations=199)
    assert shift.group("missing")["mean"] > 5 * rows.group("missing")["typical"] and shift.rejected


def test_family_wise_error_over_200_random_halves():
    cohort, r = ward(120, 7), np.random.default_rng(0)
    hits = []
    for h in range(200):
        ids = r.permutation(cohort.ids)
        hits.append(bool(fi.compare(cohort.select(ids[:60]), cohort.select(ids[60:]), permutations=99, envelope=20, random_state=h).rejected))
    assert np.mean(hits) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_unequal_sizes_keep_the_level_and_small_changes_are_found():
    cohort, r = ward(200, 8), np.random.default_rng(1)
    hits = []
    for h in range(40):
        ids = r.permutation(cohort.ids)
        hits.append(bool(fi.compare(cohort.select(ids[:40]), cohort.select(ids[40:]), permutations=99, envelope=20, random_state=h).rejected))
    assert np.mean(hits) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 40)
    assert ("ks", "HR") in fi.compare(ward(300, 9), ward(300, 10, shift=8)).rejected


def test_row_level_p_values_reject_true_nulls():
    cohort, r = ward(200, 3), np.random.default_rng(0)
    x, hits = cohort.numbers("HR"), 0
    for _ in range(60):
        left = (r.permutation(200) % 2 == 0)[cohort.patient]
        hits += stats.ks_2samp(x[left], x[~left]).pvalue <= 0.05
    assert hits / 60 > 0.2


def test_envelope_holds_95_percent_of_real_samples():
    inside = []
    for s in range(40):
        found = fi.compare(ward(120, 100 + s), ward(200, 500 + s), permutations=19, envelope=40, random_state=s)
        inside += [m["inside"] for m in found.measures if m["group"] in ("ks", "missing")]
    assert np.mean(inside) >= 0.90


def test_envelope_shrinks_with_the_size_of_the_judged_set():
    real = ward(400, 0)
    large, small = (fi.compare(real, ward(n, 1), permutations=19).group("ks")["high"] for n in (2000, 100))
    assert large < 0.75 * small


def test_missingness_is_not_invisible():
    real = ward(200, 0)
    r = np.random.default_rng(0)
    full = real.temporal.assign(HR=real.temporal.HR.where(r.random(len(real.temporal)) < 0.1))
    found = fi.compare(real, Cohort(SCHEMA, real.static, full), permutations=99)
    assert ("missing", "HR") in found.rejected


@pytest.mark.parametrize("value", [np.nan, 5.0])
def test_all_missing_and_constant_columns(value):
    real = ward(150, 0)
    flat = Cohort(SCHEMA, real.static, real.temporal.assign(lactate=value))
    for pair in ((real, flat), (flat, real), (flat, flat)):
        found = fi.compare(*pair, permutations=99)
        lines = {(m["group"], m["feature"]): m for m in found.measures}
        assert all(0 < m["p_value"] <= 1 for m in found.measures)
        if pair[0] is not pair[1]:
            assert ("missing", "lactate") in found.rejected
        elif math.isnan(value):
            assert math.isnan(lines["ks", "lactate"]["value"]) and found.rejected == []
        else:
            assert lines["ks", "lactate"]["value"] == 0
    if not math.isnan(value):     # a collapse to one value loses the relation with HR and with the past
        assert fi.compare(real, flat, permutations=99).group("lag-1")["max"] > 0.5


def test_tiny_sets_give_answers_without_claims():
    found = fi.compare(ward(3, 0), ward(2, 1), permutations=19)
    assert found.rejected == [] and "nan" in str(found) or found.rejected == []


def test_nullable_integers_and_width_of_floats_change_nothing():
    real = ward(120, 0)
    assert real.static.age.dtype == "Int64" and real.static.age.isna().any()
    other = Cohort(SCHEMA, real.static.assign(age=real.static.age.astype("float64")), real.temporal.astype({"HR": "float32"}))
    found = fi.compare(real, other, permutations=19)
    assert all(m["value"] < 1e-5 for m in found.measures)


def test_rare_and_unknown_categories():
    real = ward(120, 0)
    odd = real.static.copy()
    odd["sex"] = odd.sex.astype(object)
    odd.loc[:59, "sex"] = "x"
    found = fi.compare(real, Cohort(SCHEMA, odd, real.temporal), permutations=99)
    assert ("tv", "sex") in found.rejected
    assert fi.features(Cohort(SCHEMA, odd, real.temporal), like=real).names == fi.features(real).names


def test_static_only_and_single_visits():
    real, other = ward(80, 0), ward(80, 1)
    schema = Schema("id", static=SCHEMA.static, outcome="death")
    assert fi.compare(Cohort(schema, real.static), Cohort(schema, other.static), permutations=99).rejected == []
    single = [Cohort(SCHEMA, c.static, c.temporal[c.temporal.hour == 0]) for c in (real, other)]
    assert fi.compare(*single, permutations=99).rejected == []
    assert fi.features(single[0]).matrix.shape[0] == 80


def test_huge_integers_and_large_offsets_keep_their_differences():
    assert fi.ks(10**15 + np.arange(100.0), 10**15 + np.arange(100.0) + 50) == pytest.approx(0.5)
    assert fi.ks([0.2 - 0.1], [0.3 - 0.2]) == 0
    assert fi.ks([1.0, 2.0], [3.0]) == 1


def test_shuffle_keeps_marginals_and_loses_structure():
    real = ward(250, 0)
    found = fi.compare(real, fi.shuffled(real), permutations=99)
    assert all(found.group(g)["max"] < 1e-9 for g in ("ks", "tv", "missing", "length"))
    assert found.group("lag-1")["kept"] < 0.1 and found.group("association")["kept"] < 0.3
    assert "lag-1" in {g for g, _ in found.rejected}


def test_westfall_young_is_single_step_for_one_hypothesis_and_monotone():
    r = np.random.default_rng(0)
    z = r.normal(size=(1, 200))
    p = fi.westfall_young(z[:, 0], z[:, 1:])
    assert p[0] == (1 + np.sum(z[0, 1:] >= z[0, 0])) / 200
    z = r.normal(size=(20, 100)); z[:4, 0] += 4
    p = fi.westfall_young(z[:, 0], z[:, 1:])
    assert (p[:4] < 0.1).any() and (p >= 1 / 100).all()


def test_reruns_are_equal_and_seeds_differ():
    real, other = ward(80, 0), ward(80, 1)
    first, again, third = (fi.compare(real, other, permutations=49, random_state=s) for s in (1, 1, 2))
    assert first.to_json() == again.to_json() != third.to_json()


def test_utility_on_copies_shuffles_and_single_outcomes():
    real, test = ward(300, 0), ward(300, 1)
    copy = fi.utility(real, real, test, names=("GBDT", "LR", "GRU"), draws=200)
    assert all(m["gap"] == 0 for m in copy.models)
    none = Cohort(SCHEMA, real.static.assign(death=0), real.temporal)
    assert all(m["synthetic"] == 0.5 for m in fi.utility(real, none, test, names=("LR",), draws=50).models)
    assert fi.utility(none, real, test, names=("LR",)).models == ()
    assert fi.utility(real, fi.shuffled(real), test, names=("LR", "GRU"), draws=200).best_gap["low"] > 0


def test_paired_interval_is_shorter_than_unpaired():
    real, test = ward(300, 0), ward(400, 1)
    found = fi.utility(real, ward(300, 2), test, names=("LR",), draws=400)
    line = found.models[0]
    truth = fi.outcome(test).astype(bool)
    se = math.sqrt(line["real"] * (1 - line["real"]) / min(truth.sum(), (~truth).sum()))
    assert line["high"] - line["low"] < 2 * 1.96 * math.sqrt(2) * se


def test_temporal_outcome_counts_when_it_ever_happened():
    real = ward(60, 0)
    schema = Schema("id", "hour", SCHEMA.static, SCHEMA.temporal, outcome="vent")
    y = fi.outcome(Cohort(schema, real.static, real.temporal))
    assert np.array_equal(y, real.temporal.groupby("id").vent.max().reindex(real.ids).to_numpy())
    assert not any("vent" in n for n in fi.features(Cohort(schema, real.static, real.temporal)).names)


def test_subgroups_list_small_groups_without_judging_them():
    real, other = ward(120, 0), ward(120, 1)
    table = fi.by_subgroup(real, other, permutations=49, least=40)
    judged = table[["real", "synthetic"]].min(axis=1) >= 40
    assert table.p_value.notna().equals(judged) and {"sex", "death"} == set(table.column)


def test_bad_input_is_named():
    real = ward(30, 0)
    with pytest.raises(ValueError, match="synthetic"):
        fi.compare(real, real.static)
    with pytest.raises(ValueError, match="part"):
        fi.embed(real, real, "both")
    with pytest.raises(ValueError, match="names"):
        fi.utility(real, real, real, names=("SVM",))


def test_embeddings_have_a_point_a_patient():
    real, other = ward(40, 0), ward(30, 1)
    for part in ("static", "temporal"):
        where, mask = fi.embed(real, other, part)
        assert where.shape == (70, 2) and mask.sum() == 40 and np.isfinite(where).all()


def test_dates_as_time_do_not_depend_on_their_unit():
    r = np.random.default_rng(0)
    frame = pd.DataFrame({"id": np.repeat(np.arange(40), 3), "x": r.normal(size=120), "time": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.sort(r.integers(0, 10**5, (40, 3)), axis=1).ravel(), unit="s")})
    schema = Schema("id", "time", [], [Column("x", "numeric")])
    static = pd.DataFrame({"id": np.arange(40)})
    pair = [Cohort(schema, static, frame.astype({"time": f"datetime64[{unit}]"})) for unit in ("ns", "s")]
    found = fi.compare(*pair, permutations=19)
    assert found.group("gap")["max"] == 0
    from databloom.ehr_report import records
    assert np.array_equal(records(pair[0])[0], records(pair[1])[0])
