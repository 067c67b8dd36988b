"""Every statement of the tutorials has a claim that judges it, and a measurement that could contradict the verdict."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from saccade import theory
from saccade.cli.app import app
from saccade.theory.claim import VERDICTS
from saccade.theory.tutorials import TUTORIALS, listed, tables

DOCS = Path(__file__).parents[2] / "docs"
SAID = [said for tutorial in TUTORIALS for said in tutorial.says]


def command(*arguments):
    result = CliRunner().invoke(app, ["verify", "--list", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_there_are_five_with_many_statements():
    assert len(TUTORIALS) == 5
    assert len(SAID) > 140
    for tutorial in TUTORIALS:
        statements = [said.statement for said in tutorial.says]
        assert len(statements) == len(set(statements))


@pytest.mark.parametrize("said", SAID, ids=lambda said: said.statement[:50])
def test_each_statement_is_complete(said):
    if said.verdict == "not checked":
        assert not said.claim
        assert said.reason.endswith(".")
        assert said.reason_in_chinese.endswith("。")
    else:
        assert theory.find(said.claim)  # whose measurement of this name is looked for where the claim is run
        assert said.row
        assert said.verdict in VERDICTS
    if said.verdict == "holds if":  # a condition of its own, where the claim has another verdict
        assert said.condition or theory.find(said.claim).verdict == "holds if"
    else:
        assert not said.condition
    assert bool(said.condition) == bool(said.condition_in_chinese)
    assert not said.condition.endswith(".")
    assert not said.condition_in_chinese.endswith("。")
    assert said.statement.endswith(".")
    assert said.chinese.endswith("。")
    assert re.search(r"[\u4e00-\u9fff]", said.chinese)


def test_the_list_by_document_has_every_statement():
    told = command("--by", "document")
    assert told == listed()
    for said in SAID:
        below = [f"{said.claim}: {said.row}" if said.claim else said.reason]
        if said.verdict == "holds if":
            below.insert(0, f"if {said.condition or theory.find(said.claim).conditions}.")
        assert "\n               ".join([f"  {said.verdict:<11}  {said.statement}", *below]) + "\n" in told


def test_a_list_can_be_of_some_claims():
    told = command("--by", "document", "--only", "low-rank-explains-global-reach")
    assert told.splitlines()[0] == "THE MATHEMATICS OF ATTENTION"
    assert len(told.splitlines()) == 3


def test_the_list_by_topic_has_every_claim():
    told = command()
    for claim in theory.CLAIMS:
        assert f"  {claim.verdict:<8}  {claim.name}: {claim.statement}\n" in told


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_what_the_command_prints(language):
    told = command("--by", "document", "--markdown", "--lang", language)
    assert told == tables(chinese=language == "zh")
    assert (DOCS / language / "theory-documents.md").read_text(encoding="utf-8").endswith(told)
