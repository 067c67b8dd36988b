"""The figures of GPUs in the documents: made from benchmarks/gpu_results.json, or "not yet measured" without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import replace

__all__ = ["RESULTS", "publish", "results_of", "written"]

RESULTS = Path("benchmarks/gpu_results.json")
_START, _END = "<!-- made by `python -m benchmarks.gpu_check --publish` from here -->", "<!-- to here -->"
_README_START, _README_END = "<!-- gpu -->", "<!-- /gpu -->"
_STEPS_OF_TABLE = ("speed", "memory", "models")
_WORDS = {
    "en": {
        "none": '**Not yet measured.** "Checking on a GPU" in CONTRIBUTING.md says how to fill this section.',
        "readme none": "not yet measured",
        "readme": "checked on {card} with torch {torch}: {passed} checks passed, {failed} failed",
        "machine": "{date}, {card}, torch {torch}, transformers {transformers}, Python {python}: "
        "{passed} checks passed, {failed} failed.",
        "unfinished": "Not finished: {steps}.",
        "failed": "Failed:",
        "head": "| case | measured |",
    },
    "zh": {
        "none": '**尚未测量。**如何填写这一节，见 CONTRIBUTING.md 的 "Checking on a GPU"。',
        "readme none": "尚未测量",
        "readme": "在 {card} 上用 torch {torch} 检查过：{passed} 项通过，{failed} 项未通过",
        "machine": "{date}，{card}，torch {torch}，transformers {transformers}，Python {python}："
        "{passed} 项通过，{failed} 项未通过。",
        "unfinished": "没有做完的步骤：{steps}。",
        "failed": "未通过：",
        "head": "| 情形 | 实测 |",
    },
}
_PLACES = {"docs/en/gpu.md": "en", "docs/zh/gpu.md": "zh", "README.md": "en", "README.zh-CN.md": "zh"}


def publish(report: Path, root: Path) -> list[Path]:
    """Write the results of a report into the checkout, and the documents from them; whatever they say.

    Raises:
        ValueError: the report is that of a rehearsal, or a document has no place for the figures.
    """
    results = results_of(json.loads(report.read_text(encoding="utf-8")))
    pages = written(results, root)
    replace(root / RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    for path, text in pages.items():
        replace(path, text)
    return [root / RESULTS, *pages]


def results_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a report: the machine, counts, failures and main figures of every step."""
    if report["device"] != "cuda" or report["about"]["quick"]:
        raise ValueError("--publish: the report must be of a GPU at full size; got that of a rehearsal or a quick run")
    first = next(step for step in report["steps"] if step["name"] == "environment")
    found = {each["name"]: each["figures"] for each in first["findings"]}
    packages = ("torch", "triton", "transformers", "numpy")
    steps = []
    for step in report["steps"]:
        findings = step["findings"]
        kept = [each for each in findings if each["ok"] is False or each["headline"]]
        passed, failed = (sum(each["ok"] is answer for each in findings) for answer in (True, False))
        own = {name: step[name] for name in ("name", "status", "seconds", "note")}
        steps.append({**own, "passed": passed, "failed": failed, "findings": kept})
    return {
        "date": report["about"]["date"][:10],
        "python": report["about"]["python"],
        "machine": found.get("card", {}),
        "versions": {name: found.get(name, {}).get("version", "none") for name in packages},
        "done": report["done"],
        "steps": steps,
    }


def written(results: dict[str, Any] | None, root: Path) -> dict[Path, str]:
    """Return the documents as they are with these results, or without any."""
    pages = {}
    for name, language in _PLACES.items():
        path, is_readme = root / name, name.startswith("README")
        start, end = (_README_START, _README_END) if is_readme else (_START, _END)
        text = path.read_text(encoding="utf-8")
        before, opened, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"{name} must have {start} and {end}; got a page without them")
        part = _readme(results, language) if is_readme else "\n" + "\n".join(_lines(results, language)) + "\n"
        pages[path] = before + start + part + end + after
    return pages


def _told(results: dict[str, Any]) -> dict[str, Any]:
    counts = {name: sum(step[name] for step in results["steps"]) for name in ("passed", "failed")}
    card = results["machine"].get("card", "an unnamed card")
    return {**results, **results["versions"], **counts, "card": card}


def _readme(results: dict[str, Any] | None, language: str) -> str:
    words = _WORDS[language]
    return words["readme none"] if results is None else words["readme"].format(**_told(results))


def _lines(results: dict[str, Any] | None, language: str) -> Iterator[str]:
    """Yield the section of a page."""
    words = _WORDS[language]
    if results is None:
        yield words["none"]
        return
    yield words["machine"].format(**_told(results))
    unfinished = [
        f"{step['name']} ({step['status']})" for step in results["steps"] if step["status"] not in ("ok", "failed")
    ]
    if unfinished:
        yield from ("", words["unfinished"].format(steps=", ".join(unfinished)))
    failures = [each for step in results["steps"] for each in step["findings"] if each["ok"] is False]
    if failures:
        yield from ("", words["failed"], "")
        yield from (f"- {_cell(each['name'])}: {_cell(each['text'])}" for each in failures)
    figures = [
        each
        for step in results["steps"]
        for each in step["findings"]
        if step["name"] in _STEPS_OF_TABLE and each["ok"] is not False
    ]
    if figures:
        yield from ("", words["head"], "|---|---|")
        yield from (f"| {_cell(each['name'])} | {_cell(each['text'])} |" for each in figures)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
