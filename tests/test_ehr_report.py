"The judge: right verdicts on the controls, honest ones on sets too small, and a report that stands alone."
import json
import math

import numpy as np
import pytest

from databloom import ehr_report as er
from databloom.cohorts import Cohort, Schema
from databloom.core import data_folder
from databloom.fidelity import shuffled
from databloom.icu_simulator import simulate_icu

FAST = dict(models=("LR",), permutations=99, subgroups=False, figures=False)


@pytest.fixture(scope="module")
def stays():
    parts = simulate_icu(900, random_state=0, hours=8, max_hours=72).split((1 / 3, 1 / 3, 1 / 3), random_state=1)
    return parts


def test_second_real_sample_passes(stays):
    found = er.judge(*stays, **FAST)
    assert found.verdict == "pass" and found["membership"].verdict == "pass" and found.membership.power >= 0.8


def test_copy_fails_on_privacy(stays):
    real, _, holdout = stays
    found = er.judge(real, real, holdout, **FAST)
    assert found.verdict == "fail" and found["membership"].verdict == "fail" and found["copies"].verdict == "fail" and found["columns"].verdict == "pass"
    assert found.copies.rate == 1 and found.one_run_epsilon > 3


def test_shuffle_fails_on_structure(stays):
    real, _, holdout = stays
    found = er.judge(real, shuffled(real), holdout, **FAST)
    assert found.verdict == "fail" and found["structure"].verdict == "fail" and found["columns"].verdict == "pass"


def test_planted_copies_fail(stays):
    real, second, holdout = stays
    import pandas as pd
    taken = real.ids[:20]
    copies = real.select(taken)
    keep = second.select(second.ids[20:])
    mixed = Cohort(real.schema, pd.concat([keep.static, copies.static]), pd.concat([keep.temporal, copies.temporal]))
    found = er.judge(real, mixed, holdout, **FAST)
    assert found.verdict == "fail" and found["copies"].verdict == "fail" and found["membership"].verdict == "fail"


def test_too_few_patients_are_never_an_all_clear():
    parts = simulate_icu(30, random_state=0, hours=12).split((1 / 3, 1 / 3, 1 / 3), random_state=1)
    found = er.judge(*parts, **FAST)
    assert found.verdict == "not enough power" and found["membership"].verdict == "not enough power"


def test_reruns_are_bit_equal(stays):
    few = [s.select(s.ids[:100]) for s in stays]
    first, again = (er.judge(*few, **FAST, random_state=5).to_dict() for _ in range(2))
    first.pop("seconds"), again.pop("seconds")
    assert json.dumps(first) == json.dumps(again)


def test_html_stands_alone_with_json_beside_it(stays, tmp_path):
    real, second, holdout = (s.select(s.ids[:80]) for s in stays)
    found = er.judge(real, second, holdout, models=(), permutations=49)
    page = found.to_html(tmp_path / "r.html")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["verdict"] == found.verdict and len(data["answers"]) == len(found.answers) and "figures" not in data
    assert page.count("data:image/png;base64,") == 5 and "http" not in page and (tmp_path / "r.html").read_text() == page
    assert found["utility"].verdict == "not asked"
    text = found.to_markdown(tmp_path / "r.md")
    assert text.startswith("# Synthetic patients") and all(a.name in text for a in found.answers)
    with pytest.raises(ValueError, match="path"):
        found.to_html(tmp_path / "r.json")


def test_records_ignore_ids_dtypes_and_absolute_dates(stays):
    real = stays[0]
    other = Cohort(real.schema, real.static.assign(**{real.schema.id: real.static[real.schema.id] + 10**6}),
                   real.temporal.assign(**{real.schema.id: real.temporal[real.schema.id] + 10**6, real.schema.time: real.temporal[real.schema.time] + 100}))
    assert np.array_equal(er.records(real)[0], er.records(other)[0])
    name = next(c.name for c in real.schema.temporal if c.kind == "numeric")
    changed = real.temporal.copy()
    row = int(np.flatnonzero(changed[name].notna())[0])
    changed.loc[row, name] += 1
    assert (er.records(real)[0] != er.records(Cohort(real.schema, real.static, changed))[0]).sum() == 1


def test_holdout_must_be_other_patients(stays):
    real, second, _ = stays
    with pytest.raises(ValueError, match="holdout"):
        er.judge(real, second, real, **FAST)


@pytest.mark.parametrize("bad, name", [(dict(level=0), "level"), (dict(planted=0), "planted"), (dict(attributes=["no"]), "attributes"), (dict(tolerance={"ks": 2}), "tolerance")])
def test_bad_arguments_are_named(stays, bad, name):
    with pytest.raises(ValueError, match=name):
        er.judge(*stays, **{**FAST, **bad})


def test_static_tables_without_outcome(stays):
    flat = []
    for s in stays:
        keep = [c for c in s.schema.static if c.kind != "datetime"]
        flat.append(Cohort(Schema(s.schema.id, static=keep), s.static[[s.schema.id] + [c.name for c in keep]]))
    found = er.judge(*flat, **FAST)
    assert found.verdict in ("pass", "not enough power") and found["utility"].verdict == "not asked"
    assert er.judge(flat[0], flat[0], flat[2], **FAST).verdict == "fail"


def test_command_line(stays, tmp_path, capsys):
    from databloom.cli import main
    for name, part in zip(("real", "synthetic", "holdout"), stays):
        part.select(part.ids[:60]).save(tmp_path / name)
    where = [str(w) for name in ("real", "synthetic", "holdout") for w in (f"--{name}", tmp_path / name)]
    with pytest.raises(SystemExit) as stop:
        main(["ehr", "report", *where, "--out", str(tmp_path / "out.html"), "--json", "--seed", "3", "--quiet"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == "" and json.loads(out)["verdict"]
    assert json.loads(out) == json.loads((tmp_path / "out.json").read_text()) and (tmp_path / "out.md").exists()
    with pytest.raises(SystemExit) as stop:
        main(["ehr", "report", *where[:4]])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(data_folder("icu") is None, reason="needs DATABLOOM_DATA")
def test_controls_of_the_bench_get_the_right_verdicts():
    from databloom.ehr_bench import physionet2012_bench
    bench = physionet2012_bench(0)
    sets = {"pass": bench.second, "fail": bench.training, "shifted": bench.test}
    for verdict, other in sets.items():
        assert er.judge(bench.training, other, bench.holdout, **{**FAST, "permutations": 199}).verdict == verdict
    assert er.judge(bench.training, shuffled(bench.training, 0), bench.holdout, **{**FAST, "permutations": 199})["structure"].verdict == "fail"
