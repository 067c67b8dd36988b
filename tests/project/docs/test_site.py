"""The site: its table of contents, its pairs of pages, its diagrams; and, slowly, all of it built."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def script(name):
    """A script of docs/site as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD, PAIRS = script("build"), script("pairs")


def test_every_page_is_in_the_table_of_contents_once():
    made = ("api/index", "decisions/index")
    parts = [page for part in BUILD.parts() for page in part["pages"] if page not in made]
    for language in ("en", "zh"):
        folder = DOCS / language
        listed = Counter([*parts, *(f"recipes/{name}" for name in BUILD.recipes(language))])
        paths = [*folder.glob("**/*.md"), *folder.glob("notebooks/*.ipynb")]
        pages = {path.relative_to(folder).with_suffix("").as_posix() for path in paths} - {"index"}
        assert dict(listed) == dict.fromkeys(pages, 1)


def test_recipes_are_listed_in_the_same_order_in_both_languages():
    assert BUILD.recipes("en") == BUILD.recipes("zh")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_recipes_are_listed_under_their_titles(language):
    folder = DOCS / language / "recipes"
    listed = dict(re.findall(r"\[([^]]+)\]\(([\w-]+)\.md\)", (folder / "index.md").read_text(encoding="utf-8")))
    titles = {path.read_text(encoding="utf-8").partition("\n")[0]: path.stem for path in folder.glob("*.md")}
    assert {f"# {title}": name for title, name in listed.items()} == {
        title: name for title, name in titles.items() if name != "index"
    }


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", BUILD.recipes("en"))
def test_a_recipe_is_a_question_with_one_block_of_code_and_links(name, language):
    text = (DOCS / language / "recipes" / f"{name}.md").read_text(encoding="utf-8")
    assert text.partition("\n")[0].endswith(("?", "？"))
    assert text.count("\n```python\n") == 1
    assert re.match(r"(?:More: |更多：).*\]\(\.\./", text.rpartition("\n\n")[2])
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("language", ["en", "zh"])
def test_links_to_example_reports_open_the_pages_that_the_script_writes(language):
    text = BUILD._rewritten((DOCS / language / "report.md").read_text(encoding="utf-8"), language)
    linked = re.findall(rf'<a href="\.\./reports/([\w-]+\.html)#language={language}">', text)
    written = re.findall(r'out / "([\w-]+\.html)"', BUILD.REPORT_PAGES.read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(written)
    assert len(linked) == 3


def test_a_readme_may_link_to_example_reports():
    assert BUILD._with_reports("[a](examples/report_pages.py#dates)", "zh") == (
        '<a href="../reports/dates.html#language=zh">a</a>'
    )


def test_links_of_pages_in_a_folder_lead_to_the_same_places_on_the_site():
    page = (
        "[](../masks.md) ![](../../images/zh/a.png) [](../../../README.md) [](../../decisions/b.md) [](../../zh/c.md)"
    )
    wanted = "[](../masks.md) ![](../images/zh/a.png) [](../index.md) [](../decisions/b.md) [](../c.md)"
    assert BUILD._rewritten(page, "en", "../") == wanted


def test_no_page_has_changed_in_one_language_alone():
    hint = "read the pair beside one another, then run: python docs/site/pairs.py"
    assert PAIRS.marks() == PAIRS.recorded(), hint


def test_a_page_that_changes_alone_is_found():
    old = {"a": ["1", "2"], "b": ["1", "2"], "c": ["1", "2"]}
    assert PAIRS.changed_alone(old, {"a": ["1", "2"], "b": ["9", "2"], "c": ["9", "9"], "d": ["1", "1"]}) == ["b"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_diagrams_are_those_of_the_page(language):
    diagrams = re.findall(r"```mermaid\n(.*?)```", (DOCS / language / "flow.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(diagrams) == len(list((DOCS / "images").glob(f"flow-*-{language}.svg")))
    for number, diagram in enumerate(diagrams, 1):
        drawn = unescape((DOCS / "images" / f"flow-{number}-{language}.svg").read_text(encoding="utf-8"))
        drawn = re.sub(r"\s", "", re.sub(r"<[^>]*>", "", drawn))
        labels = re.findall(r'"([^"]+)"', diagram) or re.findall(r": (.+)", diagram)
        assert labels
        for label in labels:
            for line in label.split("<br/>"):
                assert re.sub(r"\s", "", unescape(line)) in drawn, (number, line)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    pytest.importorskip("furo", reason="needs pip install 'saccade-attention[site]'")
    subprocess.run([sys.executable, str(DOCS / "site" / "build.py"), str(tmp_path / "site")], check=True)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 2 * 100
    assert (tmp_path / "site" / "zh" / "api" / "saccade.masks.html").exists()
    assert {path.name for path in (tmp_path / "site" / "reports").iterdir()} == {
        "encoder.html",
        "language-model.html",
        "dates.html",
    }
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', text
        )
        assert not [one for pair in loaded for one in pair if one.startswith(("http", "//"))], page
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
        assert not [one for one in scripts if "http:" in one or "https:" in one], page
        other = {"en": "zh", "zh": "en"}.get(page.relative_to(tmp_path / "site").parts[0])
        if other:
            assert re.search(rf'href="[./]+{other}/[^"]+" lang="{other}"', text), page


def test_words_that_readers_type_lead_to_one_page_each():
    table = tomllib.loads((DOCS / "site" / "search_words.toml").read_text(encoding="utf-8"))
    listed = {str(page) for part in BUILD.parts() for page in part["pages"]}
    assert set(table) <= listed
    typed = Counter(
        word for words in table.values() for word in {one.lower() for both in words.values() for one in both}
    )
    assert [word for word, count in typed.items() if count > 1] == []
    entries = BUILD.index_entries("vision", "zh")
    assert "```{index} ! SE block\n```\n" in entries
    assert "```{index} ! 通道注意力\n```\n" in entries
    assert "通道" not in BUILD.index_entries("vision", "en")
    assert BUILD.index_entries("index", "en") == ""


def test_the_menu_has_at_most_seven_groups():
    assert len(BUILD.parts()) <= 7


def test_chinese_text_is_searched_by_pairs_of_characters():
    pytest.importorskip("sphinx", reason="needs pip install 'saccade-attention[site]'")
    words = script("site_search").SearchChinese({})
    assert words.split("滑动窗口 KV缓存") == [*"滑动窗口", "滑动", "动窗", "窗口", "kv", *"缓存", "缓存"]
    assert "ChineseStemmer" not in words.js_stemmer_code


@pytest.mark.parametrize(
    "text, joined",
    [
        ("一行\n另一行", "一行另一行"),
        ("句子。\n下一句", "句子。下一句"),
        ("用 `mask`，\nit is", "用 `mask`，it is"),
        ("中文\nEnglish", "中文\nEnglish"),
        ("English\nwords", "English\nwords"),
    ],
)
def test_lines_of_chinese_sentences_are_joined(text, joined):
    assert script("han_lines").joined(text) == joined


@pytest.mark.parametrize(
    "pieces",
    [
        ["窗口在四个键之前，", "\n", "汇点仍然是词元 0。"],
        ["窗口在四个键之前，\n", "汇点", "仍然是词元 0。"],
        ["窗口在四个键之前，", "汇点", "\n仍然是词元 0。"],
    ],
)
def test_breaks_between_pieces_of_a_sentence_are_joined(pieces):
    joined = script("han_lines").joined_pieces(pieces)
    assert len(joined) == len(pieces)
    assert "".join(joined) == "窗口在四个键之前，汇点仍然是词元 0。"


def test_breaks_beside_latin_words_stay():
    pieces = ["用", "\n", "mask", "\n", "and more"]
    assert script("han_lines").joined_pieces(pieces) == pieces
