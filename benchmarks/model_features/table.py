"""Write the features of language models in Markdown: how many models have each, and which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.model_features.features import FEATURES

_SHOWN = 6  # names of models in a row
_WORDS = {
    "en": {
        "head": ("feature", "models", "share", "such as", "in saccade"),
        "ran": "{count} causal language models of transformers {version}, with their default configurations.",
        "failed": "Not built: {names}.",
        "none": "not yet",
    },
    "zh": {
        "head": ("特征", "模型数", "占比", "例如", "在 saccade 中"),
        "ran": "transformers {version} 的 {count} 个因果语言模型，采用各自的默认配置。",
        "failed": "未能构造：{names}。",
        "none": "尚无",
    },
}


def written(results: Mapping[str, Any], language: str) -> str:
    """Return the table of features, most frequent first.

    Args:
        results: ``version``, ``models`` (the features of each model by name) and ``failed`` (names).
        language: "en" or "zh".
    """
    words, models = _WORDS[language], results["models"]
    lines = [words["ran"].format(count=len(models), version=results["version"]), ""]
    lines += [_row(words["head"]), _row(["---"] * len(words["head"]))]
    having = {one: [name for name, own in models.items() if one.english in own] for one in FEATURES}
    for feature, names in sorted(having.items(), key=lambda pair: -len(pair[1])):
        name = feature.english if language == "en" else feature.chinese
        shown = ", ".join(f"`{model}`" for model in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        ours = words["none"] if feature.ours is None else feature.ours
        lines.append(_row([name, str(len(names)), f"{len(names) / max(1, len(models)):.0%}", shown or "–", ours]))
    if results["failed"]:
        lines += ["", words["failed"].format(names=", ".join(f"`{name}`" for name in results["failed"]))]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
