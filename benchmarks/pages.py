"""The tables of the documentation's page of figures, in both languages, from the results of a run."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import chinese
from benchmarks.plotting import Curve, drawn, drawn_ratios, png
from benchmarks.questions import QUESTIONS
from benchmarks.reporting import replace
from saccade.theory.pictures_in_chinese import in_chinese

RESULTS = Path("benchmarks/results.json")
"""Results on the processor with the most instructions; those with fewer are in files such as ``results-avx2.json``."""
_MAIN_LEVEL = "AVX512"
START, END = "<!-- made by `python -m benchmarks --docs` from here -->", "<!-- to here -->"
_WORDS = {
    "en": {
        "machine": "{date}, {cpu}, {cores} cores with {features}, {threads} threads; Python {python}, torch {torch}, "
        "{versions}; a dense float32 product runs at {peak:.0f} GFLOP/s.",
        "images": "images",
        "level": "Column {level}: {date}, {cpu} with no instructions beyond {level}, {threads} threads; a dense "
        "float32 product runs at {peak:.0f} GFLOP/s.",
        "head": "| case | measured | target | met |",
        "met": {True: "yes", False: "**no**", None: ""},
        "busy": "† Other processes ran at the same time.",
        "pictures": {
            "ratios.png": "ratios and their targets; grey: no target on this machine",
            "growth.png": "time and memory against length",
        },
    },
    "zh": {
        "machine": "{date}，{cpu}，{cores} 个核心，指令集 {features}，{threads} 个线程；Python {python}，"
        "torch {torch}，{versions}；稠密 float32 乘积 {peak:.0f} GFLOP/s。",
        "images": "images/zh",
        "level": "{level} 一列：{date}，{cpu}，只用到 {level} 为止的指令，{threads} 个线程；"
        "稠密 float32 乘积 {peak:.0f} GFLOP/s。",
        "head": "| 情形 | 实测 | 目标 | 达到 |",
        "met": {True: "是", False: "**否**", None: ""},
        "busy": "† 测量时机器另有负载。",
        "pictures": {"ratios.png": "比值与目标；灰色：这台机器上没有目标", "growth.png": "时间和内存随长度的变化"},
    },
}


def part(results: dict[str, Any], language: str, others: Sequence[dict[str, Any]] = ()) -> str:
    """Write the part between the two markers. Each of the other results, of lower levels, is one more column."""
    return "\n".join(_lines(results, others, _WORDS[language], language == "zh"))


def _lines(
    results: dict[str, Any], others: Sequence[dict[str, Any]], words: dict[str, Any], is_zh: bool
) -> Iterator[str]:
    about = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    told = {"features": ", ".join(about["features"]), "peak": results["matmul_peak_flops"] / 1e9}
    yield words["machine"].format(**about | told, date=results["date"], versions=versions)
    for other in others:
        told = {"level": level_of(other), "peak": other["matmul_peak_flops"] / 1e9, "date": other["date"]}
        yield from ("", words["level"].format(**other["machine"] | told))
    for name in drawings(results):
        yield from ("", f"![{words['pictures'][name]}](../{words['images']}/{name})")
    for name, question in QUESTIONS.items():
        rows = [row for row in results["rows"] if row["question"] == question.TITLE]
        if not rows:
            continue
        columns = {level_of(other): _measured(other, question.TITLE) for other in others}
        columns = {level: measured for level, measured in columns.items() if measured}
        yield from ("", f"### {name}: {question.TITLE_ZH if is_zh else question.TITLE}", "")
        yield words["head"] + "".join(f" {level} |" for level in columns)
        yield "|---|---|---|---|" + "---|" * len(columns)
        for row, key in zip(rows, _keys(rows), strict=True):
            lower = [measured.get(key, "") for measured in columns.values()]
            cells = (row["case"], _told(row), row["target"], words["met"][row["met"]], *lower)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    if any(row["disturbed"] for one in (results, *others) for row in one["rows"]):
        yield from ("", words["busy"])


def level_of(results: dict[str, Any]) -> str:
    """Return the processor level of a run, such as AVX512 or AVX2."""
    level: str = results["machine"]["features"][0]
    return level


def _measured(results: dict[str, Any], title: str) -> dict[tuple[str, int], str]:
    """Return the measurements of a question by the keys of their rows."""
    rows = [row for row in results["rows"] if row["question"] == title]
    return {key: _told(row) for key, row in zip(_keys(rows), rows, strict=True)}


def _keys(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Yield the case of each row, and the number of rows of the same case before it."""
    seen = Counter[str]()
    for row in rows:
        yield row["case"], seen[row["case"]]
        seen[row["case"]] += 1


def _told(row: dict[str, Any]) -> str:
    return str(row["measured"]) + " †" * row["disturbed"]


def page(text: str, results: dict[str, Any], language: str, others: Sequence[dict[str, Any]] = ()) -> str:
    """Replace the part of a page between its markers; see `part`."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"the page must have the lines {START} and {END}")
    return f"{before}{START}\n\n{part(results, language, others)}\n\n{END}{after}"


def write(found: Path, root: Path) -> list[Path]:
    """Save the results of a run, and write both pages and their figures from all saved results."""
    results = json.loads(found.read_text(encoding="utf-8"))
    level = level_of(results)
    saved = root / (RESULTS if level == _MAIN_LEVEL else RESULTS.with_name(f"results-{level.lower()}.json"))
    if saved.exists():
        results = joined(json.loads(saved.read_text(encoding="utf-8")), results)
    head = json.dumps({name: value for name, value in results.items() if name != "rows"}, indent=1, ensure_ascii=False)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in results["rows"])
    kept = head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
    written = [replace(saved, kept.encode())]
    results, *others = saved_results(root)
    for language, words in _WORDS.items():
        path = root / "docs" / language / "benchmarks.md"
        written.append(replace(path, page(path.read_text(encoding="utf-8"), results, language, others).encode()))
        for name, draw in drawings(results, language).items():
            written.append(replace(root / "docs" / words["images"] / name, draw()))
    return written


def saved_results(root: Path) -> list[dict[str, Any]]:
    """Read the saved results, those of the highest level first."""
    paths = [root / RESULTS, *sorted((root / RESULTS).parent.glob("results-*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def joined(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Replace rows of some questions by those of a run, in the order of the questions.

    Raises:
        ValueError: the run was made elsewhere than the rows that stay.
    """
    asked = {row["question"] for row in found["rows"]}
    left = [row for row in kept["rows"] if row["question"] not in asked]
    if left and (kept["machine"], kept["versions"]) != (found["machine"], found["versions"]):
        raise ValueError("a run of some questions must be of the machine and versions of the others; run all of them")
    titles = [question.TITLE for question in QUESTIONS.values()]
    rows = [row for title in titles for row in found["rows"] + left if row["question"] == title]
    peak = max(one["matmul_peak_flops"] for one in (found, kept if left else found))
    dates = sorted({*kept["date"].split("/") * bool(left), found["date"]})
    told = {"date": "/".join(dict.fromkeys((dates[0], dates[-1]))), "matmul_peak_flops": peak, "rows": rows}
    return found | told


def drawings(results: dict[str, Any], language: str = "en") -> dict[str, Callable[[], bytes]]:
    """Draw the figures of the measurements: ratios with their targets, and growth."""
    asked = [row for row in results["rows"] if "target_ratio" in row]
    grown = [row for row in results["rows"] if "time_slope" in row]
    found: dict[str, Callable[[], Figure]] = {}
    if asked:
        found["ratios.png"] = lambda: drawn_ratios(asked)
    if grown:
        by_size = [{what: _by_size(row, what) for what in ("seconds_", "bytes_")} for row in grown]
        curves = {
            row["case"]: Curve(list(own["seconds_"].values()), list(own["bytes_"].values()))
            for row, own in zip(grown, by_size, strict=True)
        }
        sizes = max((list(own["seconds_"]) for own in by_size), key=len)
        found["growth.png"] = lambda: drawn(sizes, curves)
    if language == "zh":
        words = chinese.of(asked + grown)
        found = {name: partial(in_chinese, draw, words) for name, draw in found.items()}
    return {name: partial(_png, draw) for name, draw in found.items()}


def _by_size(row: dict[str, Any], what: str) -> dict[int, Any]:
    """Return the measurements of a row by length, shortest first; some rows lack the longest."""
    found = {int(name.removeprefix(what)): number for name, number in row.items() if name.startswith(what)}
    return dict(sorted(found.items()))


def _png(draw: Callable[[], Figure]) -> bytes:
    return png(draw())
