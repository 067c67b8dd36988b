"""The page of tolerances says what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from saccade import testing
from saccade.testing import TOLERANCES, Tolerance

DOCS = Path(__file__).parents[3] / "docs"


def _script():
    spec = importlib.util.spec_from_file_location("tolerances", DOCS / "site" / "tolerances.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()
PAGES = {language: (DOCS / language / "tolerances.md").read_text(encoding="utf-8") for language in SCRIPT.LANGUAGES}
both = pytest.mark.parametrize("language", SCRIPT.LANGUAGES)


@both
def test_the_tables_are_those_of_the_code(language):
    assert PAGES[language] == SCRIPT.with_tables(PAGES[language], language), "run: python docs/site/tolerances.py"


@both
def test_every_limit_stands_in_the_page(language):
    number = r"(\d\S+) \([\d,.]+\)"
    stated = re.findall(rf"^\| (\w+) \| {number} \| {number} \| {number} \|$", PAGES[language], re.MULTILINE)
    assert {
        (dtype, quantity): float(limit)
        for dtype, *limits in stated
        for quantity, limit in zip(("output", "lse", "gradient"), limits, strict=True)
    } == {(str(dtype).removeprefix("torch."), quantity): entry.limit for (dtype, quantity), entry in TOLERANCES.items()}


def test_a_limit_that_changes_changes_the_page(monkeypatch):
    wider = Tolerance(1e-3, TOLERANCES[torch.float32, "output"].reason)
    monkeypatch.setitem(testing.TOLERANCES, (torch.float32, "output"), wider)
    assert "| float32 | 1e-03 (8,400) |" in SCRIPT.with_tables(PAGES["en"], "en")


def test_every_reason_has_its_chinese():
    assert set(SCRIPT.REASONS) == {entry.reason for entry in TOLERANCES.values()}
    assert all(re.search(r"[\u4e00-\u9fff]", reason) for reason in SCRIPT.REASONS.values())
