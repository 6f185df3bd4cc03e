"The tour: it repeats, it goes on when a stop fails, and its page needs nothing from elsewhere."
import json
import re

import pytest
from typer.testing import CliRunner

from databloom import tour as tours
from databloom.tour import app, take_tour

LIGHT = ["accounting", "sepsis"]


@pytest.fixture(scope="module")
def light():
    "The two stops that take seconds."
    return take_tour(LIGHT, quick=True, random_state=3)


def test_the_same_seed_gives_the_same_numbers_and_pictures(light):
    again = take_tour("sepsis,accounting", quick=True, random_state=3)
    assert [stop.name for stop in again.stops] == LIGHT  # the order of the tour, however they were named
    told = [{key: value for key, value in tour.to_dict().items() if key != "times"} for tour in (light, again)]
    assert json.dumps(told[0]) == json.dumps(told[1])
    for stop in LIGHT:
        assert light[stop].pictures == again[stop].pictures and light[stop].pictures
    assert take_tour("sepsis", quick=True, random_state=4)["sepsis"].numbers["threshold"] != light["sepsis"].numbers["threshold"]


def test_the_page_says_what_the_json_says_and_loads_nothing(light, tmp_path):
    page = light.to_html(tmp_path / "t.html")
    assert (tmp_path / "t.html").read_text(encoding="utf-8") == page
    told = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert told["failed"] == [] and told["seed"] == 3
    assert f"{told['stops']['accounting']['numbers']['run']['upper']:.6g}" in page
    assert not re.findall(r"(?:src|href)=.(?!data:|#)", page) and "<script" not in page and "@import" not in page
    with pytest.raises(ValueError, match="path must be"):
        light.to_html(tmp_path / "t.pdf")


def test_a_stop_that_fails_holds_up_no_other(monkeypatch, tmp_path):
    def broken(say, data, quick, seed):
        say(0.5, "half way")
        raise RuntimeError("the <disk> is\nfull")

    for name in ("calm", "ehr"):
        monkeypatch.setitem(tours._works, name, broken)
    seen = []
    found = take_tour(["calm", "accounting", "ehr"], quick=True, progress=lambda *said: seen.append(said))
    assert found.failed == ("calm", "ehr") and found["accounting"].error is None
    assert found["ehr"].error == "RuntimeError: the <disk> is full"
    assert "the &lt;disk&gt; is full" in found.to_html() and "<disk>" not in found.to_html()
    assert ("calm", 1.0, "failed") in seen and ("accounting", 1.0, "done") in seen
    result = CliRunner().invoke(app, ["--only", "calm", "--only", "accounting", "--quick", "--quiet", "--out", str(tmp_path / "deep" / "folder")])
    assert result.exit_code == 1 and "the <disk> is full" in result.output
    assert json.loads((tmp_path / "deep" / "folder" / "tour.json").read_text())["failed"] == ["calm"]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    def lacking(say, data, quick, seed):
        import no_such_package  # noqa: F401

    monkeypatch.setitem(tours._works, "calm", lacking)
    assert "pip install 'databloom[calm]'" in take_tour("calm")["calm"].error


@pytest.mark.parametrize("words", [{"only": "poetry"}, {"only": ["calm", ""]}, {"data": "no/such/folder"}, {"random_state": -1}, {"random_state": 0.5}])
def test_bad_input_is_refused_before_any_work(words):
    with pytest.raises(ValueError, match="must be"):
        take_tour(**words)


def test_ctrl_c_stops_the_whole_tour(monkeypatch):
    def interrupted(say, data, quick, seed):
        raise KeyboardInterrupt

    monkeypatch.setitem(tours._works, "accounting", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_tour("accounting")
