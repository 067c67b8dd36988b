"""The kit from a shell: what it prints, and its exit status."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.testing.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
MINE = """
import torch.nn.functional as F


def attention(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def adapted(function, query, key, value, mask):
    return function(query, key, value, mask)


def refusing(query, key, value, mask):
    raise NotImplementedError("not yet")
"""
FEW = ["--cases", "causal", "padding", "--dtypes", "float32"]


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.parametrize(
    ("arguments", "status", "last_line"),
    [
        (["mine:attention", "--laws", "oracle", "causality"], 0, "All 2 laws that could be tried hold."),
        (["mine:attention", "--laws", "isolation"], 1, "1 of the 1 laws that could be tried are broken: isolation."),
        (["mine:refusing", "--laws", "oracle", "declined"], 1, "No law could be tried."),
        (["mine:attention", "--call", "mine:adapted", "--laws", "ones"], 0, "All 1 laws that could be tried hold."),
        (
            ["saccade:attention", "--with-lse", "saccade:attention_with_lse", "--masks", "objects", "--laws", "lse"],
            0,
            "All 1 laws that could be tried hold.",
        ),
    ],
)
def test_report_and_exit_status(arguments, status, last_line, capsys):
    assert main([*arguments, *FEW]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: function"),
        (["mine"], "'mine' must be written module:function"),
        (["mine:missing"], "module 'mine' has no attribute 'missing'"),
        (["mine:__name__"], "'mine:__name__' must be callable; got str"),
        (["nowhere:attention"], "No module named 'nowhere'"),
        (["mine:attention", "--device", "abacus"], "abacus"),
        (["mine:attention", "--laws", "gravity"], "invalid choice: 'gravity'"),
    ],
)
def test_wrong_usage_has_another_exit_status_than_a_broken_law(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.ci
def test_the_commands_of_the_documents_run(capsys):
    page = (DOCS / "en" / "conformance.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m saccade\.testing (.+)$", page, re.MULTILINE)
    assert [main(command.split()) for command in commands] == [0, 1]
    assert capsys.readouterr().out.startswith("law ")


@pytest.mark.ci
def test_it_runs_as_a_module_and_finds_what_lies_in_the_folder():
    command = [sys.executable, "-m", "saccade.testing", "mine:attention", "--laws", "isolation", *FEW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "isolation" in done.stdout


@pytest.mark.parametrize("rest", [("--laws", "oracle"), ("--cases", "causal")])
def test_sizes_beside_laws_or_cases_of_their_own_are_refused(rest, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["saccade:attention", "--sizes", "models", *rest])
    assert "--sizes chooses the laws" in capsys.readouterr().err
