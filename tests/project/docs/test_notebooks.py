"""The notebooks print what they show, draw their pictures, and hold the same code in both languages."""

import ast
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

DOCS = Path(__file__).parents[3] / "docs"
NAMES = sorted(path.stem for path in (DOCS / "en" / "notebooks").glob("*.ipynb"))
WORDS = ("title", "x_name", "y_name", "scale_name", "names")  # of figures: in the language of the reader
LARGEST = 400_000  # bytes: they are read on hosts of code, too


def tool():
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "site" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def file(name, language):
    return DOCS / language / "notebooks" / f"{name}.ipynb"


def read(name, language="en"):
    return nbformat.read(file(name, language), as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook):
    """Return the printed text and the number of pictures of every cell; a warning or an error is neither."""
    found = []
    for cell in code(notebook):
        assert {output.get("name", "stdout") for output in cell.outputs} <= {"stdout"}, cell.source
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        drawn = [output.data for output in cell.outputs if output.output_type != "stream"]
        assert all(set(data) == {"image/png"} for data in drawn), cell.source
        found.append((printed, len(drawn)))
    return found


def without_words(source):
    """The code as a tree without comments, docstrings, the words of figures and their language."""
    tree = ast.parse(re.sub(r'(?<=set_language\()"(en|zh)"', '""', source))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in WORDS:
            for one in ast.walk(node.value):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    one.value = ""
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body[0].value.value = ""
    return ast.dump(tree)


def runs():
    """Return all notebooks in both languages; Chinese ones hold the same code and results, and are run less often."""
    return [
        pytest.param(name, language, id=f"{language}-{name}", marks=[pytest.mark.slow] if language == "zh" else [])
        for name in NAMES
        for language in ("en", "zh")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name, language", runs())
def test_a_notebook_shows_what_is_kept_in_it(name, language):
    kept = read(name, language)
    assert shown(tool().run(read(name, language))) == shown(kept)


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_code_and_show_the_same(name):
    english, chinese = read(name), read(name, "zh")
    assert [cell.cell_type for cell in english.cells] == [cell.cell_type for cell in chinese.cells]
    for ours, theirs in zip(code(english), code(chinese), strict=True):
        assert without_words(ours.source) == without_words(theirs.source)
    assert shown(english) == shown(chinese)


def test_both_languages_have_the_same_notebooks():
    assert [file(name, "zh").exists() for name in NAMES] == [True] * len(list((DOCS / "zh" / "notebooks").iterdir()))
    assert len(NAMES) > 1


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_small_and_says_nothing_of_who_ran_it(name, language):
    notebook, text = read(name, language), file(name, language).read_text(encoding="utf-8")
    assert len(text) < LARGEST
    assert text == nbformat.writes(tool().tidied(notebook)) + "\n", "run: python docs/site/notebooks.py"
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_text_and_links_resolve(name, language):
    for cell in read(name, language).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#\s]+)", cell.source):
                assert (file(name, language).parent / target).exists(), target
        elif any(output.output_type != "stream" for output in cell.outputs):
            assert cell.metadata.mystnb.image.alt
