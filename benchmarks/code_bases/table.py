"""Write the verdicts in Markdown: a table by code base, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WORDS = {
    "en": {
        "head": "| code base | models | recorded | how | replaced |",
        "rewritten": "style rewritten",
        "comma": ", ",
        "recorded": "Recorded right: {right} of {models} models ({rate:.0%}), {all} of {bases} code bases.",
        "replaced": "Replaced with equal outputs and gradients: {right} of {models} models ({rate:.0%}), "
        "{all} of {bases} code bases.",
        "silent": "Silently partial: {silent}. Wrong: {wrong}.",
        "versions": "Versions: {versions}.",
        "record": {
            "right": "right",
            "partial": "partly, reported",
            "none": "no, reported",
            "silent": "silently partial",
            "wrong": "wrong",
        },
        "replace": {
            "equal": "equal",
            "refused": "refused",
            "silent": "silently partial",
            "wrong": "wrong",
            "broken": "error",
        },
    },
    "zh": {
        "head": "| 代码库 | 模型 | 记录 | 方式 | 替换 |",
        "rewritten": "按其写法重写",
        "comma": "、",
        "recorded": "记录正确：{models} 个模型中的 {right} 个（{rate:.0%}），{bases} 个代码库中的 {all} 个。",
        "replaced": "替换后输出与梯度相等：{models} 个模型中的 {right} 个（{rate:.0%}），"
        "{bases} 个代码库中的 {all} 个。",
        "silent": "未报告的部分结果：{silent}。错误：{wrong}。",
        "versions": "版本：{versions}。",
        "record": {
            "right": "正确",
            "partial": "部分，已报告",
            "none": "否，已报告",
            "silent": "部分，未报告",
            "wrong": "错误",
        },
        "replace": {"equal": "相等", "refused": "拒绝", "silent": "部分，未报告", "wrong": "错误", "broken": "报错"},
    },
}


def written(results: Mapping[str, Any], language: str) -> str:
    """Return the table and the counts.

    Args:
        results: ``versions``, and ``cases``: by key, ``code_base``, ``name``, ``is_rewritten``, ``record`` and
            ``replace`` as plain values, or a text for a judgement that ended with an error.
        language: "en" or "zh".
    """
    return "\n".join(_lines(results, _WORDS[language]))


def counts(results: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return how many models have each verdict, for the recording and for the replacement."""
    cases = results["cases"].values()
    return {what: dict(Counter(verdict(one[what]) for one in cases if what in one)) for what in ("record", "replace")}


def verdict(judged: Mapping[str, Any] | str) -> str:
    """Return the verdict of a judgement; "broken" for one that ended with an error."""
    return "broken" if isinstance(judged, str) else judged["verdict"]


def rates(results: Mapping[str, Any], what: str) -> tuple[int, int, int, int]:
    """Return the number of models that are right, of all models, of code bases whose models are all right, of all."""
    by_base = _by_base(results)
    good = [[verdict(one[what]) in ("right", "equal") for one in cases if what in one] for cases in by_base.values()]
    good = [verdicts for verdicts in good if verdicts]
    return sum(map(sum, good)), sum(map(len, good)), sum(map(all, good)), len(good)


def _by_base(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    by_base: dict[str, list[Mapping[str, Any]]] = {}
    for one in results["cases"].values():
        by_base.setdefault(one["code_base"], []).append(one)
    return by_base


def _lines(results: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[str]:
    by_base = _by_base(results)
    found = counts(results)
    for what in ("record", "replace"):
        right, models, whole, bases = rates(results, what)
        if not models:
            continue
        yield words[f"{what}ed" if what == "record" else "replaced"].format(
            right=right, models=models, rate=right / max(models, 1), all=whole, bases=bases
        )
        yield ""
    silent, wrong = (sum(found[what].get(one, 0) for what in found) for one in ("silent", "wrong"))
    yield from (words["silent"].format(silent=silent, wrong=wrong), "")
    yield from (words["head"], "|---|---|---|---|---|")
    for base, cases in sorted(by_base.items(), key=lambda item: item[0].lower()):
        name = f"{base} ({words['rewritten']})" if cases[0]["is_rewritten"] else base
        how = dict.fromkeys(
            one for judged in cases if not isinstance(judged["record"], str) for one in judged["record"]["degrees"]
        )
        cells = (
            words["comma"].join(one["name"] for one in cases),
            _cell(cases, "record", words),
            words["comma"].join(how),
            _cell(cases, "replace", words),
        )
        yield f"| {name} | {' | '.join(cells)} |"
    versions = words["comma"].join(f"{name} {version}" for name, version in results["versions"].items())
    yield from ("", words["versions"].format(versions=versions))


def _cell(cases: Sequence[Mapping[str, Any]], what: str, words: Mapping[str, Any]) -> str:
    cases = [one for one in cases if what in one]
    if not cases:
        return "–"
    verdicts = Counter(words[what].get(verdict(one[what]), words["replace"]["broken"]) for one in cases)
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return words["comma"].join(f"{count} {name}" for name, count in verdicts.items())
