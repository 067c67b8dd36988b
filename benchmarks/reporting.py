"""Rows of results, printed as one table and written to one file."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measuring import Pair, Referee

OUT = Path("out/bench")

Answers = Mapping[str, Sequence["Row"]]
"""Rows, by the title of their question."""


class Row(NamedTuple):
    """One measured number with its target."""

    case: str
    measured: str
    target: str = ""
    met: bool | None = None
    """None where nothing is asked."""
    figures: dict[str, float] = {}
    """The numbers behind the text, in SI units."""
    rate: float | None = None
    """Rate of the reference product beside it; None where no time is measured."""
    quiet: bool = True

    def is_disturbed(self, referee: Referee) -> bool:
        """Return True if the machine was busy, judged by the best rate of the whole run."""
        return not (self.quiet and (self.rate is None or referee.is_quiet(self.rate)))


def asked(value: float, target: float | None, but: str = "", form: str = "at least {:g}x") -> tuple[str, bool | None]:
    """Describe the target of a row and whether it is met, or what this machine lacks for it."""
    if target is None:
        return "", None
    told = form.format(target)
    return (f"{told}; not asked: {but}", None) if but else (told, value >= target)


def ratio_row(case: str, pair: Pair, *, peer: str, target: float | None = None, note: str = "", but: str = "") -> Row:
    """Make a row with our speed relative to a peer; see `asked` for ``but``."""
    told, met = asked(pair.ratio, target, but)
    figures = {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs}
    ratio = f"{pair.ratio:.{1 if pair.ratio >= 3 else 2}f}x"
    return Row(
        case,
        f"{ratio}: {duration(pair.ours)}, {peer} {duration(pair.theirs)}" + (f"; {note}" if note else ""),
        told,
        met,
        figures if target is None else figures | {"target_ratio": target},
        pair.rate,
        pair.quiet,
    )


def memory_row(case: str, ours: int, theirs: int, *, peer: str, target: float | None = None, but: str = "") -> Row:
    """Make a row with our memory of a call relative to a peer."""
    told, met = asked(theirs / ours, target, but, "at most 1/{:g}")
    part = theirs / ours
    measured = f"1/{part:.{0 if part >= 10 else 1}f}: {ours / 2**20:.0f} MiB, {peer} {theirs / 2**20:.0f} MiB"
    return Row(case, measured, told, met, {"ours_bytes": ours, "theirs_bytes": theirs})


def duration(seconds: float) -> str:
    """Format seconds with three digits."""
    unit, factor = ("s", 1.0) if seconds >= 1.0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    number = seconds * factor
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"


def share(flops: float, seconds: float, peak: float) -> str:
    """Format a rate as a share of a dense product's."""
    return f"{flops / seconds / peak:.0%} of matmul peak"


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def features() -> list[str]:
    """Return the processor's instructions that decide the speed of products, such as those for bfloat16."""
    level = torch.backends.cpu.get_cpu_capability()
    if level != "AVX512":  # as ATEN_CPU_CAPABILITY may demand
        return [level]
    known = {"AVX512-BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    return [level, *(name for name, there in known.items() if there)]


def machine() -> dict[str, object]:
    """Describe the machine of the figures."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "features": features(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return versions of the peers that are installed."""
    found = {}
    for name in ("transformers", "local-attention", "x-transformers", "performer-pytorch", "saccade-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def table(answers: Answers, referee: Referee) -> Table:
    """Format all rows as a table, question by question."""
    shown = Table("case", "measured", "target", "met", box=box.SIMPLE)
    for question, rows in answers.items():
        shown.add_row(Text(question, style="bold"))
        for number, row in enumerate(rows):
            met = "" if row.met is None else "yes" if row.met else "NO"
            disturbed = "  [disturbed]" if row.is_disturbed(referee) else ""
            cells = ("  " + row.case, row.measured + disturbed, row.target, met)
            shown.add_row(*(Text(cell) for cell in cells), end_section=number == len(rows) - 1)
    return shown


def say(answers: Answers, referee: Referee) -> None:
    """Print the table on stdout."""
    about = machine()
    console = Console(width=130)
    console.print(
        f"{about['cpu']}, {about['cores']} cores, {', '.join(about['features'])}; torch {about['torch']}, "
        f"{about['threads']} threads; dense float32 product {referee.peak / 1e9:.0f} GFLOP/s",
        highlight=False,
    )
    console.print(table(answers, referee))


def results(answers: Answers, referee: Referee) -> dict[str, object]:
    """Return all results, and the machine that they are from."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "matmul_peak_flops": referee.peak,
        "rows": [
            {
                "question": question,
                "case": row.case,
                "measured": row.measured,
                "target": row.target,
                "met": row.met,
                "disturbed": row.is_disturbed(referee),
                "matmul_flops": row.rate,
                **row.figures,
            }
            for question, rows in answers.items()
            for row in rows
        ],
    }


def write(answers: Answers, referee: Referee, folder: Path = OUT, name: str = "results.json") -> Path:
    """Write the results to a file, completely or not at all."""
    written = json.dumps(results(answers, referee), indent=1, ensure_ascii=False) + "\n"
    return replace(folder / name, written.encode())


def replace(path: Path, content: bytes) -> Path:
    """Replace a file atomically, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
