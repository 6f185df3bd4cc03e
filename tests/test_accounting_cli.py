"The accountant's commands as a user types them: JSON, exit codes, one line for what is wrong."

import json
import math
import subprocess
import sys

import pytest

from conftest import ROOT
from databloom import cli

RUN = "--noise-multiplier 1 --sampling-probability 0.01 --steps 1000"


@pytest.fixture
def databloom(capsys):
    "Run the program in this process: exit code, output, error output."

    def run(*words):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(part) for word in words for part in (word.split() if isinstance(word, str) else [word])])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


def answer(databloom, *words):
    code, out, err = databloom(*words, "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def test_epsilon_and_delta_are_inverse(databloom):
    epsilon = answer(databloom, "epsilon", RUN, "--delta 1e-6 --tolerance 1e-5")
    delta = answer(databloom, "delta", RUN, "--epsilon", epsilon["upper"])
    assert delta["lower"] <= 1e-6 and delta["upper"] <= 1.002e-6 and delta["lower"] <= delta["upper"]
    assert delta["epsilon"] == epsilon["upper"] and delta["steps"] == 1000 and len(delta["assumptions"]) == 3


def test_noise(databloom):
    found = answer(databloom, "noise --epsilon 1 --delta 1e-6 --sampling-probability 0.01 --steps 1000")
    assert abs(found["noise_multiplier"] - 1.56268) < 1e-4 and found["epsilon"] <= 1
    back = answer(databloom, "epsilon --sampling-probability 0.01 --steps 1000 --delta 1e-6 --tolerance 1e-5 --noise-multiplier", found["noise_multiplier"])
    assert back["lower"] <= 1 and back["upper"] > 0.999


def test_curve(databloom, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "curve.png"
    found = answer(databloom, "curve", RUN, "--delta 1e-5 --points 5 --plot", target)
    assert found["steps"][0] == 1 and found["steps"][-1] == 1000 and len(found["steps"]) == len(found["lower"]) == len(found["upper"]) == 5
    assert all(low <= high for low, high in zip(found["lower"], found["upper"])) and found["upper"] == sorted(found["upper"])
    assert target.read_bytes()[:4] == b"\x89PNG"
    several = answer(databloom, "curve --noise-multiplier 1 --sampling-probability 0.01 --delta 1e-5 --steps 10,100 --steps 1000")
    assert several["steps"] == [10, 100, 1000] and several["upper"][-1] == pytest.approx(found["upper"][-1], rel=1e-3)
    code, out, err = databloom("curve --noise-multiplier 1 --steps 3,4 --delta 1e-5")
    assert "assumes" in out and out.startswith("epsilon of Gaussian(1)")
    code, out, err = databloom("curve --noise-multiplier 1 --steps 3,4 --delta 1e-5 --quiet")
    assert code == 0 and out.count("\n") == 2 and "between" in out


def test_schedules(databloom, tmp_path):
    phases = [{"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": 400}, {"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": 600}]
    for name, text in (("a.json", json.dumps(phases)), ("b.json", json.dumps({"phases": phases})), ("c.yaml", json.dumps(phases))):
        (tmp_path / name).write_text(text)
        if name.endswith("yaml"):
            pytest.importorskip("yaml")
        split = answer(databloom, "epsilon --delta 1e-6 --schedule", tmp_path / name)
        whole = answer(databloom, "epsilon", RUN, "--delta 1e-6")
        assert split["upper"] == pytest.approx(whole["upper"], rel=1e-9) and split["steps"] == 1000
    replaced = answer(databloom, "epsilon --delta 1e-6 --adjacency replace_one --schedule", tmp_path / "a.json")
    assert replaced["lower"] > whole["upper"] and replaced["adjacency"] == "replace_one"
    delta = answer(databloom, "delta --epsilon 1 --schedule", tmp_path / "a.json")
    assert 0 < delta["lower"] <= delta["upper"] < 1


def test_certificates(databloom, tmp_path):
    claim = tmp_path / "claim.json"
    code, out, err = databloom("epsilon", RUN, "--delta 1e-6 --certificate", claim)
    assert (code, err) == (0, "")
    code, out, err = databloom("verify", claim)
    assert (code, err) == (0, "") and out.startswith("confirmed")
    content = json.loads(claim.read_text())
    claim.write_text(json.dumps({**content, "lower": 0.1, "upper": 0.5 * content["upper"]}))
    code, out, err = databloom("verify", claim, "--json")
    assert (code, err) == (1, "") and json.loads(out)["confirmed"] is False
    for bad in ("", "{}", "[1]", "{", json.dumps({**content, "releases": [{"mechanism": "x", "steps": 1}]})):
        claim.write_text(bad)
        code, out, err = databloom("verify", claim)
        assert (code, out, err.count("\n")) == (2, "", 1), err
    code, out, err = databloom("verify", tmp_path / "none.json")
    assert (code, out, err.count("\n")) == (2, "", 1)


WRONG = [
    "epsilon --steps 10 --delta 1e-5", "epsilon --noise-multiplier 1 --delta 1e-5", "epsilon --noise-multiplier 1 --steps 10", "epsilon --noise-multiplier 1 --steps 10 --delta nan",
    "epsilon --noise-multiplier 1 --steps 10 --delta 1e-5 --adjacency shuffled", "epsilon --noise-multiplier 1 --steps 10 --delta 1e-5 --sampling shuffled",
    "epsilon --noise-multiplier 1 --steps 10 --delta 1e-5 --group-size 0", "epsilon --noise-multiplier 1 --steps 10 --delta 1e-5 --method x",
    "epsilon --noise-multiplier 1 --steps 10 --delta 1e-5 --plot x.gif", "epsilon --delta 1e-5 --schedule none.json", "epsilon --delta 1e-5 --schedule none.txt",
    "epsilon --noise-multiplier 1 --steps 1 --delta 1e-5 --schedule none.json", "delta --noise-multiplier 1 --steps 10 --epsilon -1", "delta --noise-multiplier 1 --steps 10 --epsilon inf",
    "delta --noise-multiplier 1 --steps 10", "noise --epsilon 0 --delta 1e-6", "noise --epsilon 1 --delta 0", "noise --epsilon 1 --delta 1e-6 --steps 0.5", "noise --epsilon 1 --delta 1e-6 --accuracy 0",
    "noise --epsilon 1 --delta 1e-6 --sampling-probability 2", "curve --noise-multiplier 1 --steps 0 --delta 1e-5", "curve --noise-multiplier 1 --steps ten --delta 1e-5",
    "curve --noise-multiplier 1 --steps nan --delta 1e-5", "curve --noise-multiplier 1 --steps 10 --delta 1e-5 --points 1", "curve --noise-multiplier 1 --steps 1,,2 --delta 1e-5", "verify", "delta --no-such-flag",
]


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line_and_two(databloom, words):
    code, out, err = databloom(words)
    assert (code, out) == (2, "") and err.startswith("databloom: ") and err.count("\n") == 1, (out, err)


def test_the_core_is_enough():
    "No command but a plot needs more than the core requires."
    calls = ["epsilon " + RUN + " --delta 1e-6", "delta " + RUN + " --epsilon 1", "noise --epsilon 1 --delta 1e-6 --json", "curve " + RUN + " --delta 1e-6 --points 2"]
    script = f"""
import sys
from databloom.cli import main
for words in {calls!r}:
    try:
        main(words.split())
    except SystemExit as stop:
        assert not stop.code, stop.code
print([name for name in ("torch", "pandas", "matplotlib", "opacus", "dp_accounting", "yaml") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


def test_numbers_and_text_agree(databloom):
    found = answer(databloom, "delta", RUN, "--epsilon 1")
    code, out, err = databloom("delta", RUN, "--epsilon 1")
    assert f"{found['lower']:.9g}" in out and f"{found['upper']:.9g}" in out and math.isfinite(found["upper"])
