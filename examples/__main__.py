"""Run the examples and collect their results in one table: ``python examples [NAME]... [--quick] [--docs]``.

Each example runs in a separate process, one after the other, and resumes where it was stopped; finished ones are only
measured again. ``--docs`` runs nothing: it writes the table and the images of the last runs into the pages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "classify_sentences": "sentences",
    "judge_reviews": "reviews",
    "summarize": "summaries",
    "translate": "translation",
    "train_chinese_encoder": "chinese-encoder",
    "read_numbers": "numbers",
    "digits_few": "digits-few",
    "find_digits": "find-digits",
    "ask_scenes": "ask-scenes",
    "match_scenes": "match-scenes",
    "caption_scenes": "caption-scenes",
    "draw_scenes": "draw-scenes",
    "hear_digits": "hear-digits",
    "play_chorales": "chorales",
    "predict_molecules": "molecules",
    "find_contacts": "contacts",
}
"""The examples that end with a table, and the folder in ``out`` of each."""
HEADINGS = {
    "en": ("example", "what is measured", "with attention", "best baseline", "minutes"),
    "zh": ("例子", "指标", "用注意力", "最好的基线", "分钟"),
}


def results(names: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """Return the results of the examples by name, without those that have not run."""
    found = {}
    for name in names:
        path = out / EXAMPLES[name] / "results.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def groups(told: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return the title, our row and the strongest baseline of each group of rows.

    Rows without a group belong to all; rows with more information compete only if there is no other.
    """
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for row in told["rows"]:
        by_group.setdefault(row.get("group", ""), []).append(row)
    of_all = by_group.pop("") if len(by_group) > 1 and "" in by_group else []
    best = min if told.get("lower_is_better") else max
    for group, (ours, *own) in by_group.items():
        others = [*own, *of_all]
        beside = [row for row in others if not row.get("knows_more")] or others
        title = f"{told['title']}, {group}" if group else told["title"]
        yield title, ours, best(beside, key=lambda row: row["mean"])


def cell(row: Mapping[str, Any], form: str) -> str:
    """Format a measure and the range of its seeds."""
    if row["lowest"] == row["highest"]:
        return form.format(row["mean"])
    return f"{form.format(row['mean'])} ({form.format(row['lowest'])} to {form.format(row['highest'])})"


def table(found: Mapping[str, Mapping[str, Any]], language: str = "en") -> str:
    """Return the table of all examples in Markdown: ours, the best baseline, and the duration."""
    lines = [f"| {' | '.join(HEADINGS[language])} |", "|---|---|---|---|---|"]
    for name, told in found.items():
        minutes = f"{told['minutes']:.0f}"
        for title, ours, other in groups(told):
            numbers = [cell(ours, told["form"]), f"{other['who']}: {cell(other, told['form'])}"]
            link = f"[`{name}.py`](../../examples/{name}.py)"
            lines.append(f"| {link} | {title} | {' | '.join(numbers)} | {minutes} |")
            minutes = ""
    text = "\n".join(lines) + "\n"
    return re.sub(r"(?<=\d%) to (?=\d)|(?<=\d) to (?=\d)", " 到 ", text) if language == "zh" else text


def write_pages(found: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Write the table between its marks in both pages, and the images beside them."""
    begin, end = "<!-- the table of python examples -->", "<!-- its end -->"
    for language in HEADINGS:
        page = ROOT / "docs" / language / "examples.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(f"{before}{begin}\n\n{table(found, language)}\n{end}{after}", encoding="utf-8")
    pictures = ROOT / "docs" / "images" / "examples"
    pictures.mkdir(parents=True, exist_ok=True)
    for name, told in found.items():
        for figure in told["figures"]:
            shutil.copy(out / EXAMPLES[name] / figure, pictures / f"{EXAMPLES[name]}-{figure}")


def main(arguments: list[str] | None = None) -> int:
    """Run the requested examples and print the table; return an exit status."""
    parser = argparse.ArgumentParser(prog="python examples", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(EXAMPLES)}; all when none")
    parser.add_argument("--quick", action="store_true", help="a few seconds each, to see that they run")
    parser.add_argument("--docs", action="store_true", help="run nothing; write the table and pictures into the pages")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of their folders (default: out)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in EXAMPLES]
    if unknown:
        parser.error(f"NAME must be of {', '.join(EXAMPLES)}; got {', '.join(unknown)}")
    names, failed = given.names or list(EXAMPLES), []
    for name in [] if given.docs else names:
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--out", str(given.out / EXAMPLES[name])]
        print(f"--- {name}", flush=True)
        if subprocess.run([*command, *(["--quick"] if given.quick else [])], check=False).returncode:
            failed.append(name)
    found = results(names, given.out)
    if given.docs:
        write_pages(found, given.out)
    print(table(found))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
