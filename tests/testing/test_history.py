"""The command saccade.testing.history, and the counts of past bugs and cheats on pages."""

import re
from pathlib import Path

import pytest

from saccade.testing import history
from saccade.testing.cheats import CHEATS
from saccade.testing.past_bugs import PAST_BUGS
from saccade.testing.plain_kernel import attend

BY_WHERE = {bug.where: bug for bug in PAST_BUGS}


@pytest.mark.parametrize(
    "name", ["CHANGELOG.md", "docs/en/conformance.md", "docs/zh/conformance.md"], ids=lambda name: name
)
def test_pages_count_the_bugs(name):
    text = (Path(__file__).parents[2] / name).read_text("utf-8")
    assert re.search(rf"\b{len(PAST_BUGS)} (past bugs|种)", text)
    assert re.search(rf"\b{len(CHEATS)} (cheats|种)", text)


def test_the_command_prints_a_table(capsys, monkeypatch):
    bugs = (BY_WHERE["NVIDIA/TransformerEngine#3528"], BY_WHERE["pytorch/pytorch#103749"])
    monkeypatch.setattr(history, "PAST_BUGS", bugs)
    monkeypatch.setattr(history, "CHEATS", ())
    assert history.main([]) == 0
    printed = capsys.readouterr().out
    assert "oracle" in printed
    assert printed.endswith("2 past bugs and 0 cheats, 0 not found\n")
    right = bugs[0]._replace(make=lambda: attend)
    monkeypatch.setattr(history, "PAST_BUGS", (right,))
    assert history.main([]) == 1
    assert "NOT FOUND" in capsys.readouterr().out
