"""One command for all examples: each is there, and what they found becomes a table and pictures."""

import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "examples" / "__main__.py"
FOUND = {
    "title": "things that are right",
    "form": "{:.0%}",
    "minutes": 3.4,
    "figures": ["looks.png"],
    "rows": [
        {"who": "A: ours", "group": "A", "mean": 0.8, "lowest": 0.7, "highest": 0.9},
        {"who": "A: told", "group": "A", "mean": 1.0, "lowest": 1.0, "highest": 1.0, "knows_more": True},
        {"who": "A: other", "group": "A", "mean": 0.5, "lowest": 0.5, "highest": 0.5},
        {"who": "A: third", "group": "A", "mean": 0.4, "lowest": 0.4, "highest": 0.4},
        {"who": "B: ours", "group": "B", "mean": 0.1, "lowest": 0.1, "highest": 0.1},
        {"who": "B: other", "group": "B", "mean": 0.2, "lowest": 0.2, "highest": 0.2},
    ],
}


def test_every_example_has_a_script_a_folder_and_a_test(example):
    for name in example.EXAMPLES:
        assert (PATH.parent / f"{name}.py").exists()
        assert (PATH.parents[1] / "tests" / "project" / "examples" / f"test_{name}.py").exists()
    assert len(set(example.EXAMPLES.values())) == len(example.EXAMPLES)


def test_the_table_says_who_is_best_of_those_that_know_as_much(example):
    lines = example.table({"translate": FOUND}).splitlines()[2:]
    link = "[`translate.py`](../../examples/translate.py)"
    assert lines == [
        f"| {link} | things that are right, A | 80% (70% to 90%) | A: other: 50% | 3 |",
        f"| {link} | things that are right, B | 10% | B: other: 20% |  |",
    ]
    of_all = [{"who": "told", "mean": 0.9, "lowest": 0.9, "highest": 0.9, "knows_more": True}]
    ours = [row for row in FOUND["rows"] if row["who"].endswith("ours")]
    lines = example.table({"translate": {**FOUND, "rows": ours + of_all}}).splitlines()[2:]
    assert [line.split(" | ")[3] for line in lines] == ["told: 90%", "told: 90%"]
    lines = example.table({"translate": {**FOUND, "lower_is_better": True}}).splitlines()[2:]
    assert "A: third: 40%" in lines[0]


def test_pages_and_pictures_are_those_of_the_last_runs(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "ROOT", tmp_path)
    for language in ("en", "zh"):
        page = tmp_path / "docs" / language / "examples.md"
        page.parent.mkdir(parents=True)
        page.write_text("before\n<!-- the table of python examples -->\nold\n<!-- its end -->\nafter\n")
    folder = tmp_path / "out" / "translation"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(FOUND))
    (folder / "looks.png").write_bytes(b"picture")
    assert example.main(["--docs", "--out", str(tmp_path / "out")]) == 0
    english, chinese = ((tmp_path / "docs" / own / "examples.md").read_text() for own in ("en", "zh"))
    assert english.startswith("before\n<!-- the table of python examples -->\n\n| example |")
    assert english.endswith("\n<!-- its end -->\nafter\n")
    assert "old" not in english
    assert "80% (70% 到 90%)" in chinese
    assert (tmp_path / "docs" / "images" / "examples" / "translation-looks.png").read_bytes() == b"picture"
    assert "A: other: 50%" in capsys.readouterr().out


def test_a_name_that_is_none_is_refused(example, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["translation"])
    assert "got translation" in capsys.readouterr().err
