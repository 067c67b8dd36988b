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
_WORDS: dict[str, dict[str, str]] = {
    "en": {
        "head": "| model | forward | forward and backward | `generate` | exported | AOTInductor | ONNX |",
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
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, each in a process of its own, write their results and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS), help="models")
    parser.add_argument("--trials", nargs="*", choices=tuple(TRIALS), default=tuple(TRIALS), help="columns")
    parser.add_argument(
        "--results", type=Path, default=Path("compiled_models.json"), help="the file of the results, which is updated"
    )
    parser.add_argument("--page", nargs="*", type=Path, help="try nothing: update the table of these pages")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    options = parser.parse_args(arguments)
    if options.page is not None:
        for page in options.page:
            text, table = page.read_text("utf-8"), written(_results(options.results), page.parent.name)
            page.write_text(with_generated(text, COMMAND, table), "utf-8")
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
        results = _results(options.results)
        results.setdefault(row, {})[trial] = verdict
        ordered = {name: results[name] for name in ROWS if name in results}
        write_whole(options.results, memoryview((json.dumps(ordered, indent=1) + "\n").encode()))
    sys.stdout.write(written(_results(options.results), "en") + "\n")
    return int(failed > 0)


def _results(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


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
