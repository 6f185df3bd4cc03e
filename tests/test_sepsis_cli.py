"""databloom sepsis: exit codes, JSON, the ledger that refuses, files of every layout."""

import json

import pytest

from databloom.cli import main
from databloom.cohorts import load_cohort
from databloom.icu_simulator import simulate_icu


def run(capsys, *words):
    "Exit code, standard output, standard error."
    with pytest.raises(SystemExit) as stop:
        main(["sepsis", *map(str, words)])
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("sepsis")
    simulate_icu(90, random_state=1, outcome="SepsisLabel", sepsis_rate=0.4).save(work / "cohort")
    rows = load_cohort(work / "cohort").temporal.drop(columns=["airway", "SepsisLabel", "Severity"])
    rows[rows["id"] <= 2].groupby("id").head(5).to_csv(work / "rows.csv", index=False)
    return work


def test_train_evaluate_predict_audit(folder, capsys):
    code, out, _ = run(capsys, "train", folder / "cohort", "--out", folder / "model", "--units", 8, "--budget", 1, "--json")
    assert code == 0 and json.loads(out)["models"] == json.loads(out)["members"] > 50
    assert {"model.safetensors", "model.json", "ledger.json", "report.html", "report.json"} <= {p.name for p in (folder / "model").iterdir()}
    code, _, err = run(capsys, "train", folder / "cohort", "--out", folder / "model")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "ledger" in err
    code, out, _ = run(capsys, "evaluate", folder / "model", folder / "cohort", "--draws", 5, "--json", "--out", folder / "r.html")
    found = json.loads(out)
    assert code == 0 and {"MSE", "AUROC", "AUPRC", "utility", "AUROC 4 h"} <= set(found["values"]["ensemble"]) and "calibration" in found
    assert json.loads((folder / "r.json").read_text())["patients"] == 90
    code, out, _ = run(capsys, "predict", folder / "model", folder / "rows.csv", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(answers) == 10 and all(0 <= a["value"] <= 4 and 0 <= a["probability"] <= 1 for a in answers)
    code, out, _ = run(capsys, "predict", folder / "model", folder / "rows.csv", "--private", "--epsilon", 0.05, "--json")
    spent = [json.loads(line)["epsilon_lifetime"] for line in out.splitlines()]
    assert code == 0 and spent == sorted(spent) and 0 < spent[-1] <= 0.5 + 1e-6
    code, out, err = run(capsys, "predict", folder / "model", folder / "rows.csv", "--private", "--epsilon", 0.3)
    assert code == 2 and "budget" in err and len(err.strip().splitlines()) == 1
    code, out, _ = run(capsys, "audit", folder / "model", folder / "cohort", folder / "cohort", "--json", "--out", folder / "a.html")
    found = json.loads(out)
    assert code == 0 and {"calibrated", "likelihood ratio"} <= set(found["attacks"]) and found["one_run"]["lower"] <= found["one_run"]["epsilon"]
    assert "Audit in one run" in (folder / "a.html").read_text()


def test_alarms_of_a_stay_are_charged_once(folder, capsys):
    run(capsys, "train", folder / "cohort", "--out", folder / "quiet", "--units", 4, "--budget", 2.5, "--quiet")
    code, out, _ = run(capsys, "predict", folder / "quiet", folder / "rows.csv", "--private", "--answers", "alarms", "--epsilon", 1)
    lines = out.splitlines()
    assert code == 0 and lines[0] == "id,ICULOS,alarm,epsilon_stay,epsilon_lifetime" and len(lines) == 11
    assert [e["stay"] for e in json.loads((folder / "quiet" / "ledger.json").read_text())["entries"]] == ["1", "2"]
    code, out, _ = run(capsys, "predict", folder / "quiet", folder / "rows.csv", "--answers", "alarms", "--json")
    assert code == 0 and all(set(json.loads(line)) == {"id", "ICULOS", "alarm", "epsilon_stay", "epsilon_lifetime"} for line in out.splitlines())
    assert run(capsys, "predict", folder / "quiet", folder / "rows.csv", "--answers", "curves")[0] == 2


def test_what_cannot_be_private_is_refused(folder, capsys):
    for k, options in enumerate((["--members", "first-fit"], ["--fit-preprocessing"])):
        assert run(capsys, "train", folder / "cohort", "--out", folder / f"odd{k}", "--units", 4, "--quiet", *options) == (0, "", "")
        assert run(capsys, "predict", folder / f"odd{k}", folder / "rows.csv", "--quiet")[0] == 0
        code, _, err = run(capsys, "predict", folder / f"odd{k}", folder / "rows.csv", "--private")
        assert code == 2 and ("pool must be" in err or "preprocessing must be" in err)


@pytest.mark.parametrize("words", [
    ["train", "nowhere", "--out", "x"], ["evaluate", "nowhere", "nowhere"], ["predict", "nowhere"], ["audit", "nowhere", "a", "b"], ["nonsense"],
])
def test_bad_input_is_one_line(words, capsys):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("options", [["--budget", "0"], ["--budget", "nan"], ["--delta", "2"], ["--target", "age"], ["--members", "none"], ["--dev", "1"], ["--ridge", "0"]])
def test_bad_options(folder, options, capsys):
    code, _, err = run(capsys, "train", folder / "cohort", "--out", folder / "never", *options)
    assert code == 2 and len(err.strip().splitlines()) == 1 and not (folder / "never" / "model.json").exists()


def test_bad_rows(folder, capsys, tmp_path):
    run(capsys, "train", folder / "cohort", "--out", tmp_path / "m", "--units", 4, "--quiet")
    for name, text in (("a", "stay,HR\n1,80\n"), ("b", "id,ICULOS,HR\n1,1,fast\n"), ("c", "id,ICULOS,HR\n1,2,80\n1,1,80\n")):
        (tmp_path / name).write_text(text)
        code, _, err = run(capsys, "predict", tmp_path / "m", tmp_path / name)
        assert code == 2 and len(err.strip().splitlines()) == 1
