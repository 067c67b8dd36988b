"""``python -m benchmarks.compiled_models``: try models in compiled and exported forms, and write the table."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compiled_models.rows import ROWS
from benchmarks.compiled_models.trials import TRIALS, judge
from benchmarks.generated_part import with_generated
from benchmarks.survey.subprocess_pool import each_alone
from saccade.caches.files.tensor_files import write_whole

COMMAND = "python -m benchmarks.compiled_models"
RESULTS = Path(__file__).parents[2] / "docs" / "compiled-models.json"
_WORDS: dict[str, dict[str, str]] = {
    "en": {
        "head": "| model | forward | forward and backward | `generate`, static cache | exported | AOTInductor | ONNX |",
        "equal": "yes",
        "untried": "not tried",
        "MultiHeadAttention": "`MultiHeadAttention`",
        "nn.TransformerEncoder": "`nn.TransformerEncoder`, replaced",
        "Mistral": "Mistral, with a window",
    },
    "zh": {
        "head": "| 模型 | 编译，前向 | 前向与反向 | `generate`，静态缓存 | 导出 | AOTInductor | ONNX |",
        "equal": "是",
        "untried": "未测试",
        "MultiHeadAttention": "`MultiHeadAttention`",
        "nn.TransformerEncoder": "替换后的 `nn.TransformerEncoder`",
        "Mistral": "Mistral（带窗口）",
        **{
            f"{model}, {kind}": f"{model}（{words}）"
            for model in ("Llama", "GPT-2")
            for kind, words in (("packed", "打包文本"), ("bool mask", "布尔掩码"), ("float mask", "浮点掩码"))
        },
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, each in a process of its own, and write their results and the pages; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS), help="models")
    parser.add_argument("--trials", nargs="*", choices=tuple(TRIALS), default=tuple(TRIALS), help="columns")
    parser.add_argument("--page", action="store_true", help="try nothing: write the pages from stored results")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    options = parser.parse_args(arguments)
    if options.page:
        _write_pages()
        return 0
    warnings.filterwarnings("ignore")
    cells = [(row, trial) for trial in options.trials for row in options.rows]
    failed = 0
    for place, verdict in each_alone([partial(judge, *cell) for cell in cells], jobs=options.jobs, seconds=1200.0):
        row, trial = cells[place]
        sys.stdout.write(f"{row:24}{trial:12}{verdict}\n")
        sys.stdout.flush()
        if isinstance(verdict, str) and verdict != "equal":
            failed += 1
            continue
        results = _results()
        results.setdefault(row, {})[trial] = verdict
        ordered = {name: results[name] for name in ROWS if name in results}
        write_whole(RESULTS, memoryview((json.dumps(ordered, indent=1) + "\n").encode()))
    _write_pages()
    return int(failed > 0)


def _results() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))
    return found


def _write_pages() -> None:
    for language in _WORDS:
        page = RESULTS.parent / language / "compile-export.md"
        page.write_text(with_generated(page.read_text("utf-8"), COMMAND, written(_results(), language)), "utf-8")


def written(results: Mapping[str, Mapping[str, Any]], language: str) -> str:
    """Return the table in Markdown.

    Args:
        results: the verdict of each trial, by row and column.
        language: "en" or "zh".
    """
    words = _WORDS[language]
    lines = [words["head"], "|---" * (1 + len(TRIALS)) + "|"]
    for row in ROWS:
        cells = [_cell(results.get(row, {}), trial, words) for trial in TRIALS]
        lines.append(f"| {words.get(row, row)} | {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines)


def _cell(verdicts: Mapping[str, Any], trial: str, words: Mapping[str, str]) -> str:
    if trial not in verdicts:
        return words["untried"]
    verdict = verdicts[trial]
    return "" if verdict is None else words["equal"] if verdict == "equal" else "{} / {}".format(*verdict)


if __name__ == "__main__":
    sys.exit(main())
