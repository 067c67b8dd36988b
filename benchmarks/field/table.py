"""Write the verdicts on the field in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.field.judged import SIZES
from saccade.testing.laws import declarations, definition, invariance, locality, program_behaviour

__all__ = ["GROUPS", "written"]

GROUPS: dict[str, tuple[str, ...]] = {
    "definition": tuple(law.name for law in definition.LAWS),
    "locality": tuple(law.name for law in locality.LAWS),
    "invariance": tuple(law.name for law in invariance.LAWS),
    "conduct": tuple(law.name for law in (*program_behaviour.LAWS, *declarations.LAWS)),
    "sizes": SIZES,
}
"""The laws of each column of the table."""
_WORDS = {
    "en": {
        "head": ("function", "package", "device", "definition", "locality", "invariance", "conduct", "sizes of models"),
        "broken": "Broken laws, each with its first counter-example:",
    },
    "zh": {
        "head": ("函数", "软件包", "设备", "定义", "局部性", "不变性", "行为", "模型的尺寸"),
        "broken": "被违反的定律，各附第一个反例：",
    },
}


def written(results: Mapping[str, Any], language: str) -> str:
    """Return the table, and a list of the broken laws of each function with their first counter-examples."""
    return "\n".join(_lines(results, _WORDS[language]))


def _lines(results: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {' | '.join(words['head'])} |"
    yield f"|{'---|' * len(words['head'])}"
    for one in results["entries"]:
        cells = (_cell(one["laws"], names) for names in GROUPS.values())
        yield f"| `{one['call']}` | {one['package']} {one['version']} | {one['device']} | {' | '.join(cells)} |"
    yield ""
    yield words["broken"]
    yield ""
    yield "```text"
    for one in results["entries"]:
        broken = {name: law for name, law in one["laws"].items() if law["verdict"] == "broken"}
        yield f"{one['call']} ({one['package']}, {one['device']})" + ("" if broken else ": no law is broken")
        for name, law in broken.items():
            yield f"  {name}: {law['first']}"
    yield "```"


def _cell(laws: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return how many laws of a group are kept, of those that could be tried."""
    tried = [laws[name]["verdict"] for name in names if name in laws and laws[name]["verdict"] in ("kept", "broken")]
    return f"{tried.count('kept')} / {len(tried)}" if tried else "–"
