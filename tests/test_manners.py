"One manner for every command: the same options say the same, bad input is one line, and `--help` waits for nothing heavy."
import json
import subprocess
import sys

import pytest
import typer

from databloom.cli import app, main


def commands():
    "Every command of the program, by the words that call it."
    def walk(command, words):
        if hasattr(command, "list_commands"):
            context = typer.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), [*words, name])
        else:
            yield words, command

    return dict((" ".join(words), command) for words, command in walk(typer.main.get_command(app), []))


COMMANDS = commands()
DRAWS = {"calibrate", "calm calibrate", "calm train", "ehr fit", "ehr report", "ehr sample", "sepsis audit", "sepsis evaluate", "sepsis predict", "sepsis train", "tour"}


def options(name):
    return {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}


def test_the_walk_finds_the_commands():
    assert DRAWS < set(COMMANDS) and {"epsilon", "calm generate", "calm report"} < set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_the_options_that_all_have(name):
    found = options(name)
    for flag in ("--json", "--quiet"):
        assert flag in found and found[flag].is_flag
    assert ("--seed" in found) == (name in DRAWS), "a command draws at random if and only if it takes a seed"
    assert COMMANDS[name].help and all(parameter.help for parameter in COMMANDS[name].params if parameter.name != "help")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_is_written_goes_where_out_or_plot_says(name):
    found = options(name)
    assert not {"--report", "--page", "--figure"} & set(found) and ("--output" not in found or "--out" in found)


def test_a_place_that_cannot_be_written_is_told_before_any_work(capsys, tmp_path):
    (tmp_path / "m").mkdir()
    for words in (["sepsis", "evaluate", tmp_path / "m", tmp_path / "c", "--out", tmp_path / "r.pdf"], ["sepsis", "audit", *[tmp_path / "m"] * 3, "--out", tmp_path / "no" / "r.html"],
                  ["ehr", "report", "--real", "a", "--synthetic", "b", "--holdout", "c", "--out", tmp_path / "r.pdf"]):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == 2 and "must be a file name ending in .html" in capsys.readouterr().err
    for words in (["epsilon", "--noise-multiplier", "1", "--steps", "1", "--delta", "1e-5"], ["calibrate", tmp_path / "none.csv", "--alpha", "0.1"]):
        with pytest.raises(SystemExit) as stop:
            main([*map(str, words), "--plot", "run.docx"])
        assert stop.value.code == 2 and "plot must be a file name ending in .png" in capsys.readouterr().err


def test_help_of_every_command_is_light():
    script = f"""
import contextlib, io, sys
from databloom.cli import main
for words in {[name.split() for name in sorted(COMMANDS)]!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main([*words, "--help"])
        except SystemExit as stop:
            assert not stop.code, words
print([name for name in ("torch", "pandas", "matplotlib", "sklearn", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_unknown_option_is_one_line_and_exit_code_2(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--no-such-option"])
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("databloom: ") and "--no-such-option" in said.err


def test_json_is_json_that_any_reader_takes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", "--noise-multiplier", "1", "--steps", "1", "--delta", "0", "--json"])  # the Gaussian at delta 0: infinite
    assert stop.value.code == 0

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["upper"] == "inf"


def test_quiet_leaves_the_answer_and_nothing_else(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", "--noise-multiplier", "1", "--steps", "10", "--delta", "1e-5", "--quiet"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.count("\n") == 1
