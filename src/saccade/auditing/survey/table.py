"""What a survey found, in Markdown: a table of models and claims, and lines that reproduce what is broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

__all__ = ["COLUMNS", "LEAST", "Survey", "mark", "written"]

LEAST = 1e-5
"""What the lines of a right model print is below this."""
Survey = Mapping[str, Any]
"""The form of results.json: ``versions``, and ``cells``: model, implementation, claim to an `Outcome` as a mapping."""
Language = Literal["en", "zh"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "reach": ("reach", "sight", "by layer"),
    "batch": ("one by one = in a batch",),
    "train": ("in training, without dropout",),
    "shift": ("positions shifted",),
    "right": ("padded at the right",),
    "left": ("padded at the left",),
    "packed": ("packed",),
    "+cache": ("packed, with a cache",),
    "+ones": ("packed, with a mask of ones",),
    "+4-D": ("packed, with a mask of four dimensions",),
    "steps": ("steps: ",),
    "state": ("cache cropped", "cache forked", "cache reordered"),
}
"""Claims by column; a name that ends in a blank begins many."""
_WORDS: dict[Language, dict[str, str]] = {
    "en": {"model": "model", "none": "Not run, and why:", "unsure": "Differences that the lines below do not show:"},
    "zh": {"model": "模型", "none": "没有运行的，以及原因：", "unsure": "有差异，但下面的代码显示不出来的："},
}


def mark(outcomes: Mapping[str, Mapping[str, Any]], column: str) -> str:
    """``✗`` broken and reproduced, ``?`` broken and not reproduced, ``✓`` held, ``–`` not answered."""
    found = [one for name, one in outcomes.items() if name.startswith(COLUMNS[column])]
    broken = [one for one in found if one["verdict"] == "broken"]
    if any(is_shown(one, column) for one in broken):
        return "✗"
    if broken:
        return "?"
    return "✓" if any(one["verdict"] == "held" for one in found) else "–"


def is_shown(outcome: Mapping[str, Any], column: str) -> bool:
    """Whether lines that run without this library show that a claim is broken; of reach, the audit itself does."""
    return column == "reach" or (outcome["printed"] or 0.0) > LEAST


def written(survey: Survey, language: Language) -> str:
    """The table and the models that were not run."""
    return "\n".join(_lines(survey["cells"], _WORDS[language]))


def _lines(cells: Mapping[str, Mapping[str, Any]], words: Mapping[str, str]) -> Iterator[str]:
    ran = {name: by for name, by in cells.items() if any(_ran(one) for one in by.values())}
    yield f"| {words['model']} | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for name, by in ran.items():
        yield f"| {name} | {' | '.join(_cell(by, column) for column in COLUMNS)} |"
    yield from ("", words["none"], "")
    for name, by in cells.items():
        if name not in ran:
            yield f"- {name}: {_reason(by)}"


def _ran(found: Any) -> bool:
    return not isinstance(found, str) and "runs" not in found


def _cell(by: Mapping[str, Any], column: str) -> str:
    """One mark where all implementations that ran agree, else one for each, in their order."""
    marks = [mark(found, column) if _ran(found) else "" for found in by.values()]
    told = [one for one in marks if one not in ("", "–")]
    return told[0] if len(set(told)) == 1 else "".join(one or "·" for one in marks) if told else "–"


def _reason(by: Mapping[str, Any]) -> str:
    first = next(iter(by.values()))
    text: str = first if isinstance(first, str) else first["runs"]["why"]
    return text.replace("|", r"\|").replace("<", "&lt;")[:160]
