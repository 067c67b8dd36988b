"""``saccade verify`` as a user runs it."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner

from saccade import theory, viz
from saccade.cli import verify as command
from saccade.cli.app import app
from saccade.theory.measurement import equal
from saccade.theory.pictures import PICTURES
from saccade.theory.pictures_in_chinese import PICTURES_IN_CHINESE


@pytest.fixture
def verify(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, ["verify", *arguments])


@pytest.fixture
def with_claims(monkeypatch):
    """Let the command know some claims only."""

    def set_claims(*trials):
        known = theory.find("softmax-jacobian")
        claims = tuple(dataclasses.replace(known, name=name, topic="odd", trial=trial) for name, trial in trials)
        monkeypatch.setattr(command, "CLAIMS", claims)

    return set_claims


def one_is_two(draw):
    del draw
    yield equal("one", 1.0, 2.0)


def one_is_one(draw):
    del draw
    yield equal("one", 1.0, 1.0)


def sometimes(draw):
    yield equal("less than one half", float(draw.uniform() < 0.5), 1.0)


def fails(draw):
    del draw
    yield equal("one", 1.0, 1.0)
    raise RuntimeError("no \x1b[31mluck\x1b[0m\nat all")


def measures_nothing(draw):
    del draw
    yield from ()


def test_claims_verdicts_and_measurements_are_printed(verify):
    result = verify("--only", "softmax-jacobian-as-printed")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == ["SOFTMAX", "  ok  softmax-jacobian-as-printed  refuted"]
    assert lines[2].strip() == theory.find("softmax-jacobian-as-printed").statement
    assert "derivative of weight 1 by score 2, two equal scores: seen -0.25, claimed 0.25" in result.stdout
    assert lines[-3] == "1 claim: 1 refuted."
    assert lines[-2] == "5 measurements, 1 seed."
    assert lines[-1] == "Every verdict is confirmed."


def test_a_topic_is_all_of_its_claims(verify):
    result = verify("--only", "masking", "--only", "worked-example")
    assert result.exit_code == 0, result.output
    assert "5 claims: " in result.stdout
    assert result.stdout.index("worked-example") < result.stdout.index("empty-rows-give-nothing")


def test_a_contradiction_ends_with_status_1(verify, with_claims):
    with_claims(("wrong", one_is_two), ("right", one_is_one))
    result = verify()
    assert result.exit_code == 1
    assert "  NO  wrong" in result.stdout
    assert "  ok  right" in result.stdout
    assert "x one: seen 1, expected 2" in result.stdout
    assert result.stdout.splitlines()[-1] == "Contradicted: wrong."


def test_a_check_that_fails_confirms_nothing(verify, with_claims):
    with_claims(("broken", fails))
    result = verify()
    assert result.exit_code == 1
    assert "RuntimeError: no " in result.stdout
    assert "\x1b" not in result.stdout


def needs_a_package(draw):
    del draw
    yield equal("one", 1.0, 1.0)
    raise ImportError("minilm: needs a package;\n\x1b[31mpip install it\x1b[0m")


def test_a_check_that_lacks_a_package_neither_stands_nor_falls(verify, with_claims):
    with_claims(("needy", needs_a_package), ("right", one_is_one))
    result = verify()
    assert result.exit_code == 0, result.output
    assert "  --  needy" in result.stdout
    assert "not checked: minilm: needs a package; " in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "Not checked, because a package is not installed: needy.",
        "Every verdict is confirmed.",
    ]
    told = json.loads(verify("--json").stdout)
    assert told["ok"]
    assert "pip install it" in told["claims"][0]["findings"][0]["missing"]


def test_a_run_without_checks_confirms_nothing(verify, with_claims):
    with_claims(("needy", needs_a_package))
    result = verify()
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Nothing was checked."


def test_a_check_that_measures_nothing_confirms_nothing(verify, with_claims):
    with_claims(("empty", measures_nothing))
    assert verify().exit_code == 1


def test_many_seeds(verify, with_claims):
    with_claims(("sometimes", sometimes), ("right", one_is_one))
    result = verify("--seeds", "20", "--seed", "3", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    by_name = {claim["name"]: claim for claim in told["claims"]}
    assert [finding["seed"] for finding in by_name["sometimes"]["findings"]] == list(range(3, 23))
    assert len(by_name["right"]["findings"]) == 1  # it draws nothing: once is enough
    agreed = [finding["agrees"] for finding in by_name["sometimes"]["findings"]]
    assert True in agreed
    assert False in agreed
    shown = verify("--seeds", "20", "--seed", "3").stdout
    assert shown.count("x seed ") == agreed.count(False)
    assert " measurements, 20 seeds" in shown
    assert shown.splitlines()[-1] == "Contradicted: sometimes."


def test_the_seed_decides(verify):
    first, again, other = (
        verify("--only", "variance-of-dot-products", "--seed", seed).stdout for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_json_has_a_version_and_every_number(verify):
    result = verify("--only", "softmax", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["schema"] == "saccade.verification/2"
    assert told["ok"] is True
    assert {claim["topic"] for claim in told["claims"]} == {"softmax"}
    claim = told["claims"][0]
    fields = ["name", "topic", "statement", "latex", "source", "verdict", "conditions", "findings"]
    assert list(claim) == fields
    measurement = claim["findings"][0]["measurements"][0]
    assert list(measurement) == ["what", "relation", "expected", "seen", "tolerance", "why", "chance", "agrees"]


def test_json_holds_numbers_that_are_not_finite(verify, with_claims):
    with_claims(("infinite", lambda draw: iter([equal("x", float("nan"), float("inf"))])))
    result = verify("--json")
    assert result.exit_code == 1
    measurement = json.loads(result.stdout)["claims"][0]["findings"][0]["measurements"][0]
    assert (measurement["seen"], measurement["expected"]) == ("nan", "inf")


def test_markdown_is_the_table_of_verdicts(verify):
    result = verify("--markdown")
    assert result.exit_code == 0
    assert result.stdout.startswith("| claim | verdict | statement |\n")
    assert result.stdout.count("\n| `") == len(theory.CLAIMS)
    assert result.stdout.count("\n### `") == len(theory.CLAIMS)


def test_pictures_are_drawn(verify, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PICTURES", {"theory-softmax": PICTURES["theory-softmax"]})
    result = verify("--pictures", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "folder" / "theory-softmax.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "file").write_text("")
    result = verify("--pictures", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "--pictures must be a folder that can be written; got" in result.output


@pytest.mark.ci
def test_pictures_are_drawn_in_chinese(verify, tmp_path, monkeypatch):
    name = "theory-softmax"
    for pictures in ("PICTURES", "PICTURES_IN_CHINESE"):
        monkeypatch.setattr(command, pictures, {name: getattr(command, pictures)[name]})
    drawn = {}
    for language in ("en", "zh"):
        result = verify("--lang", language, "--pictures", str(tmp_path / language))
        assert result.exit_code == 0, result.output
        drawn[language] = matplotlib.image.imread(tmp_path / language / f"{name}.png")
    for language, draw in (("en", PICTURES[name]), ("zh", PICTURES_IN_CHINESE[name])):
        viz.save(draw(), tmp_path / "own.png")
        np.testing.assert_array_equal(drawn[language], matplotlib.image.imread(tmp_path / "own.png"))
    assert not np.array_equal(drawn["en"], drawn["zh"])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--by", "document"], "--by must be used with --list; got --by document alone."),
        (["--list", "--json"], "--json must be left out if --list is given, which checks nothing."),
        (["--only", "gravity\x1b[2J"], "--only must be the name of a claim or one of scaling, similarity, softmax,"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_wrong_arguments_are_refused(verify, arguments, sentence):
    result = verify(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "\x1b" not in result.output


def test_verify_refuses_what_is_no_claim():
    with pytest.raises(TypeError, match=r"^verify: claims must be claims of saccade\.theory; got str\."):
        theory.verify(["softmax-jacobian"])
    with pytest.raises(ValueError, match=r"^verify: seeds must be an int of at least 1; got 0\."):
        theory.verify([], seeds=0)
    with pytest.raises(TypeError, match=r"^verify: seeds must be an int of at least 1; got True\."):
        theory.verify([], seeds=True)
    assert not theory.verify([]).ok


@pytest.mark.parametrize(
    "arguments, first, chosen",
    [
        (("--markdown", "--json"), "--json", "--markdown"),
        (("--markdown", "--seeds", "3"), "--seeds", "--markdown"),
        (("--markdown", "--seed", "0"), "--seed", "--markdown"),
        (("--pictures", "new", "--markdown"), "--markdown", "--pictures"),
        (("--pictures", "new", "--json"), "--json", "--pictures"),
        (("--pictures", "new", "--seeds", "2"), "--seeds", "--pictures"),
        (("--pictures", "new", "--seed", "2"), "--seed", "--pictures"),
        (("--pictures", "new", "--only", "masking"), "--only", "--pictures"),
    ],
)
def test_options_that_would_do_nothing_are_refused(verify, tmp_path, monkeypatch, arguments, first, chosen):
    monkeypatch.chdir(tmp_path)
    result = verify(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"saccade verify: {first} must be left out if {chosen} is given, which ")
    assert result.stdout == ""
    assert not (tmp_path / "new").exists()
