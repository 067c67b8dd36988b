"""The documents say what the claims say: every claim, its verdict and formula, in both languages."""

import re
from pathlib import Path

import pytest

from saccade import theory
from saccade.support.language import chinese
from saccade.theory.claims import sections, table

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "theory-scaling": ("scaling", "similarity"),
    "theory-softmax": ("softmax", "gradients"),
    "theory-averages": ("matrix-products", "averages", "symmetry", "universality"),
    "theory-matrices": ("rank", "spectrum"),
    "theory-inference": ("mixture", "information"),
    "theory-relatives": ("related-methods", "heads"),
    "theory-trained": ("trained-layers", "trained-models"),
    "theory-cost": ("paths", "capacity", "complexity", "decoding", "graphs"),
    "theory-features": ("features",),
    "theory-mistakes": ("masking",),
}
CHINESE = {"holds": "成立", "holds if": "有条件成立", "refuted": "被推翻"}
each = pytest.mark.parametrize("name", PAGES)


def read(language, name):
    return (DOCS / language / f"{name}.md").read_text(encoding="utf-8")


def claims_of(name):
    return [claim for claim in theory.CLAIMS if claim.topic in PAGES[name]]


def test_every_topic_has_a_page():
    topics = [topic for own in PAGES.values() for topic in own]
    assert topics == list(dict.fromkeys(claim.topic for claim in theory.CLAIMS))


def test_the_english_table_of_verdicts_is_current():
    assert read("en", "theory").endswith(table(theory.CLAIMS))


@each
def test_the_english_page_states_each_claim_word_for_word(name):
    assert read("en", name).endswith(sections(claims_of(name)).rstrip("\n") + "\n")


def test_the_chinese_table_of_verdicts_is_current():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\S+) \| (.+) \|$", read("zh", "theory"), re.MULTILINE)
    assert [row[:2] for row in rows] == [(claim.name, CHINESE[claim.verdict]) for claim in theory.CLAIMS]
    assert all(re.search(r"[\u4e00-\u9fff]", said) and said.endswith("。") for _, _, said in rows)


@each
def test_the_chinese_page_states_each_claim(name):
    headings = re.split(r"^### ", read("zh", name), flags=re.MULTILINE)[1:]
    claims = claims_of(name)
    assert len(headings) == len(claims)
    for text, claim in zip(headings, claims, strict=True):
        assert text.startswith(f"`{claim.name}`：{CHINESE[claim.verdict]}\n")
        assert f"$$\n{claim.latex}\n$$" in text
        assert ("条件：" in text or "实际上：" in text) == bool(claim.conditions)
        assert "*出处：*" in text
        assert f"\n\n{chinese()[claim.statement]}\n\n" in text
        assert not claim.conditions or f"：* {chinese()[claim.conditions]}\n" in text


@each
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_overview_leads_to_it(name, language):
    assert f"]({name}.md)" in read(language, "theory")


def test_both_languages_have_the_same_terms():
    english = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", read("en", "terms"), re.MULTILINE)
    chinese = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", read("zh", "terms"), re.MULTILINE)
    assert [(own, other) for own, other in english[1:]] == [(other, own) for own, other in chinese[1:]]
    terms = [own for own, _ in english[1:]]
    assert len(terms) == len(set(terms)) > 50


@pytest.mark.parametrize("name, said", [("README.md", "{} claims with verdicts"), ("README.zh-CN.md", "{} 条论断")])
def test_the_readme_counts_them(name, said):
    assert said.format(len(theory.CLAIMS)) in (DOCS.parent / name).read_text(encoding="utf-8")
