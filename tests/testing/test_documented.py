"""The documents about the kit are complete: every law, every tolerance, in both languages."""

import re
from pathlib import Path

import pytest

from saccade import testing
from saccade.testing.kernel_under_test import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"
ENGLISH, CHINESE = ((DOCS / language / "conformance.md").read_text(encoding="utf-8") for language in ("en", "zh"))
EVERY = (*testing.SIZE_LAWS, *testing.LAWS)
both = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])


def rows(page, columns):
    """Rows of the tables whose first cell is a name in code."""
    cell = r" ([^|]+) \|"
    return re.findall(r"^\| `(\w+)` \|" + cell * (columns - 1) + "$", page, re.MULTILINE)


def test_the_english_page_states_each_law_word_for_word():
    assert rows(ENGLISH, 2) == [(law.name, law.statement) for law in EVERY]


def test_the_chinese_page_states_each_law_in_chinese():
    stated = rows(CHINESE, 2)
    assert [name for name, _ in stated] == [law.name for law in EVERY]
    assert all(re.search(r"[\u4e00-\u9fff]", sentence) and sentence.endswith("。") for _, sentence in stated)


@both
def test_each_tolerance_is_stated(page):
    stated = {
        (name, quantity): float(limit)
        for name, *limits in rows(page, 4)
        for quantity, limit in zip(("output", "lse", "gradient"), limits, strict=True)
    }
    table = testing.TOLERANCES.items()
    assert stated == {(str(dtype).removeprefix("torch."), quantity): entry.limit for (dtype, quantity), entry in table}


@both
def test_arguments_that_one_passes_are_explained(page):
    for argument in ("call=", "with_lse=", "offers=", "reasons=", "gqa=", "masks=", "claims=", "device="):
        assert argument in page, argument
    for option in (*OPTIONS, "q_positions", "kv_positions"):
        assert option in page, option
