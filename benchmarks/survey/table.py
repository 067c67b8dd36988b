"""Write a survey in Markdown: a table of models and claims, and lines that reproduce broken claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LEAST = 1e-5
"""The lines print a number below this for a correct model."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "reach": ("reach", "sight", "by layer"),
    "batch": ("one by one = in a batch", "batch"),
    "train": ("in training, without dropout",),
    "autocast": ("under autocast", "autocast = float32"),
    "shift": ("positions shifted",),
    "right": ("padded at the right",),
    "left": ("padded at the left",),
    "packed": ("packed",),
    "states": ("states", "states between calls"),
    "+cache": ("packed, with a cache",),
    "+ones": ("packed, with a mask of ones",),
    "+4-D": ("packed, with a mask of four dimensions",),
    "ours": (),
    "steps": ("steps",),
    "state": ("cache cropped", "cache forked", "cache reordered"),
}
"""Claims by column; "steps" has one claim for each split, and "ours" is saccade's kernel on packed texts.

Columns without any answer are left out.
"""
_WORDS = {
    "en": {
        "model": "model",
        "ran": "{count} models; {versions}.",
        "none": "Not run:",
        "broken": "Broken in {count} models. Code for {name}:",
        "others": "Printed difference by model:",
        "models": "The third line of each, which builds the model:",
        "ours": "{count} models also ran with saccade inside transformers, the fourth mark.",
        "in packages": "{column}, in packages",
    },
    "zh": {
        "model": "模型",
        "ran": "{count} 个模型；{versions}。",
        "none": "没有运行的模型：",
        "broken": "{count} 个模型不成立。{name} 的代码：",
        "others": "各模型打印的差异：",
        "models": "各模型代码的第三行（构造模型）：",
        "ours": "{count} 个模型另用 transformers 里的 saccade 运行，为第四个符号。",
        "in packages": "{column}（其他软件包）",
    },
}

_KNOWN = ("llama", "mistral", "gpt2", "mamba", "bert (masked)")  # preferred models for the printed lines
_Cell = Mapping[str, Any]


def written(survey: Mapping[str, Any], language: str, *, packages: bool = False) -> str:
    """Return the table, the models that were not run, and for each column the lines that show it broken.

    Args:
        survey: ``versions``, and ``cells``: by model and implementation, a `Cell` as plain values, or a text if its
            process ended early.
        language: "en" or "zh".
        packages: whether the models are of packages other than transformers.
    """
    words = dict(_WORDS[language])
    return "\n".join(_lines(survey, words | {"heading": words["in packages"] if packages else "{column}"}))


def mark(cell: _Cell | str, column: str) -> str:
    """Return ``✗`` broken and reproduced, ``?`` broken, ``✓`` held, ``–`` not answered; "" if the model did not run."""
    if not _ran(cell):
        return ""
    assert not isinstance(cell, str)
    if column == "ours":
        met = [one["is_held_by_ours"] for name, one in cell["broken"].items() if name.startswith("packed")]
        return "–" if not met else "✓" if all(met) else "✗"
    broken = [one for name, one in cell["broken"].items() if _of(column, name)]
    if broken:
        return "✗" if any(_is_shown(one, column) for one in broken) else "?"
    return "✓" if any(_of(column, name) for name in cell["held"]) else "–"


def shown_lines(cell: _Cell, column: str) -> list[str]:
    """Return the line that makes the model of a cell, and lines that show a claim of a column broken; [] if none do."""
    found = [one for name, one in cell["broken"].items() if _of(column, name) and one["lines"]]
    return [cell["model"][2], *max(found, key=lambda one: one["printed"] or 0.0)["lines"]] if found else []


def _of(column: str, claim: str) -> bool:
    return claim.partition(": ")[0] in COLUMNS[column]


def _is_shown(broken: Mapping[str, Any], column: str) -> bool:
    if column == "reach" and broken["printed"] is None:  # by layer, which has no lines
        return True
    return (broken["printed"] or 0.0) > LEAST


def _ran(cell: _Cell | str) -> bool:
    return not isinstance(cell, str) and bool(cell["model"])


def _lines(survey: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    cells = survey["cells"]
    ran = {name: by for name, by in cells.items() if any(map(_ran, by.values()))}
    versions = ", ".join(f"{name} {version}" for name, version in survey["versions"].items())
    yield from (words["ran"].format(count=len(ran), versions=versions), "")
    if ours := sum(_ran(by.get("saccade", "")) for by in ran.values()):
        yield from (words["ours"].format(count=ours), "")
    columns = [column for column in COLUMNS if any(_marks(by, column) != "–" for by in ran.values())]
    yield f"| {words['model']} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, by in ran.items():
        yield f"| {name} | {' | '.join(_marks(by, column) for column in columns)} |"
    if len(ran) < len(cells):
        yield from ("", words["none"], "")
        yield from (f"- {name}: {_reason(by)}" for name, by in cells.items() if name not in ran)
    for column in columns:
        yield from _reproductions(column, ran, words)
    broken = {name: _first(by) for name, by in ran.items() if any("✗" in _marks(by, column) for column in columns)}
    yield from ("", words["models"], "", "```text")
    yield from (f"{name}: {cell['model'][2]}" for name, cell in broken.items())
    yield "```"


def _first(by: Mapping[str, Any]) -> _Cell:
    return next(cell for cell in by.values() if _ran(cell))


def _marks(by: Mapping[str, Any], column: str) -> str:
    """Return one mark if all implementations that answer agree; else one for each, in order."""
    marks = [mark(cell, column) for cell in by.values()]
    answered = {one for one in marks if one not in ("", "–")}
    return answered.pop() if len(answered) == 1 else "".join(one or "·" for one in marks) if answered else "–"


def _reason(by: Mapping[str, Any]) -> str:
    first = next(iter(by.values()))
    text = first if isinstance(first, str) else first["unanswered"]["runs"]
    return "`" + text.replace("`", "'")[:140] + "`"


def _reproductions(column: str, ran: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    shown = {}
    for name, by in ran.items():
        for cell in filter(_ran, by.values()):
            found = [one for claim, one in cell["broken"].items() if _of(column, claim) and _is_shown(one, column)]
            if found and name not in shown:
                shown[name] = (cell, max(found, key=lambda one: one["printed"] or 0.0))
    if not shown:
        return
    first = next((name for name in _KNOWN if name in shown), next(iter(shown)))
    cell, broken = shown[first]
    yield from (
        "",
        "### " + words["heading"].format(column=column),
        "",
        words["broken"].format(count=len(shown), name=first),
        "",
        "```text",
    )
    yield from (*cell["model"], *broken["lines"]) if broken["lines"] else (broken["where"],)
    yield from ("```", "", words["others"] + " " + ", ".join(_summary(name, one) for name, (_, one) in shown.items()))


def _summary(name: str, broken: Mapping[str, Any]) -> str:
    if broken["printed"] is None:
        return f"{name} ({broken['where']})"
    mixers = broken["where"].partition("across documents: ")[2]
    return f"{name} {broken['printed']:g}" + (f" (`{mixers}`)" if mixers else "")
