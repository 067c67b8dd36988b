"""Compare surveys of several versions of transformers: which claims hold in one version and not in another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.survey.table import COLUMNS, mark, shown_lines

COMPARED = "python -m benchmarks.survey --compare"
_IMPLEMENTATIONS = ("sdpa", "eager")
_UPSTREAM = {
    **{(name, "reach"): "#48745" for name in ("roformer", "big_bird", "rembert", "megatron-bert")},
    ("doge", "reach"): "#48748",
}
"""Issues of transformers that report a broken claim, by model and column."""
_WORDS = {
    "en": {
        "ran": "transformers {versions}; torch {torch}. {count} cells changed.",
        "row": ("model", "claim", "attention"),
        "lines": "Code for each model that was broken, after the first lines of the code above, prints a difference:",
    },
    "zh": {
        "ran": "transformers {versions}；torch {torch}。{count} 格有变化。",
        "row": ("模型", "论断", "注意力"),
        "lines": "每个曾不成立的模型的代码，接在上面代码的开头几行之后，打印一个差异：",
    },
}


def compared(surveys: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cells that are broken in one survey and hold in another, oldest version first.

    Args:
        surveys: surveys of different versions, oldest first.
    """
    changed = []
    models = dict.fromkeys(name for survey in surveys for name in survey["cells"])
    for name in sorted(models):
        for column in COLUMNS:
            if column == "ours":  # whether our kernel helps depends on saccade, too
                continue
            for implementation in _IMPLEMENTATIONS:
                cells = [survey["cells"].get(name, {}).get(implementation, "") for survey in surveys]
                marks = [mark(cell, column) if cell else "" for cell in cells]
                if {"✓", "✗"} <= set(marks):
                    broken = cells[marks.index("✗")]
                    lines = shown_lines(broken, column)
                    changed.append([name, column, implementation, marks, lines])
    return {"versions": [survey["versions"] for survey in surveys], "changed": changed}


def versions_table(comparison: Mapping[str, Any], language: str) -> str:
    """Return the table of changed cells, and lines that show each model broken, in Markdown."""
    return "\n".join(_lines(comparison, _WORDS[language]))


def _lines(comparison: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[str]:
    versions = [one["transformers"] for one in comparison["versions"]]
    torch = ", ".join(dict.fromkeys(one["torch"] for one in comparison["versions"]))
    changed = comparison["changed"]
    yield from (words["ran"].format(versions=", ".join(versions), torch=torch, count=len(changed)), "")
    yield f"| {' | '.join([*words['row'], *versions])} | |"
    yield f"|---|---|---|{'---|' * len(versions)}---|"
    for name, column, implementation, marks, _ in changed:
        number = _UPSTREAM.get((name, column), "")
        url = f"[{number}](https://github.com/huggingface/transformers/issues/{number[1:]})" if number else ""
        yield f"| {name} | {column} | {implementation} | {' | '.join(one or '·' for one in marks)} | {url} |"
    yield from ("", words["lines"], "", "```text")
    seen = set[str]()
    for name, column, implementation, _, lines in changed:
        if name not in seen and lines:
            seen.add(name)
            yield f"# {name}, {column}, {implementation}"
            yield from lines
    yield "```"
