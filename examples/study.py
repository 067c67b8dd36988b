"""The common parts of the larger examples: training of seeds with checkpoints, and their table.

An example defines a module, and a loss that draws its data from a random generator; see
``read_numbers.py``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Loss = Callable[[Any, np.random.Generator], Tensor]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of training; examples add fields. Checkpoints of other settings are ignored."""

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 0.05
    save_every: int = 100
    seeds: tuple[int, ...] = (0, 1, 2)


Own = TypeVar("Own", bound=Settings)


class Run:
    """One seed: trained, or resumed from its checkpoint.

    The draws of a step depend on the seed and the step only, so that an interrupted run needs no random state, and
    ends with the same weights as an uninterrupted one.

    Args:
        name: name of the run and of its file.
        seed: seed of the weights and of all draws.
        make: builds the module.
        loss: computes the loss of the module, with the step's generator.
        settings: the settings.
        out: the folder of its file.
    """

    def __init__(self, name: str, seed: int, make: Callable[[], torch.nn.Module], loss: Loss, settings: Any, out: Path):
        self.name, self.seed, self.settings, self.path = name, seed, settings, out / f"{name}-seed{seed}.safetensors"
        torch.manual_seed(seed)
        self.module, self.loss = make(), loss
        self.optimizers = self.make_optimizers()
        self.step, self.seconds, self.starts_over = 0, 0.0, False
        self.notes: list[Any] = []  # written by `at_checkpoint`
        if self.path.exists():
            self._resume()

    def make_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """Return the optimizers, each with its highest rate."""
        own = torch.optim.AdamW(self.module.parameters(), weight_decay=self.settings.weight_decay)
        return [(own, self.settings.learning_rate)]

    def at_checkpoint(self, losses: Sequence[float]) -> None:
        """Run before each checkpoint, with the losses since the last one; additions to `notes` are saved too."""

    def train(self, after_step: Callable[[float], object] = lambda loss: None) -> None:
        """Train the remaining steps, with regular checkpoints."""
        recent: list[float] = []
        while self.step < self.settings.steps:
            started = time.process_time()
            recent.append(self._learn())
            self.step += 1
            self.seconds += time.process_time() - started
            after_step(recent[-1])
            if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                self.at_checkpoint(recent)
                recent = []
                self._save()
        self.module.eval()

    def _learn(self) -> float:
        torch.manual_seed(self.seed * 1_000_003 + self.step)  # dropout
        self.module.train()
        loss = self.loss(self.module, np.random.default_rng([self.seed, self.step]))
        self.module.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self._rate()
            optimizer.step()
        return loss.item()

    def _rate(self) -> float:
        """Return the rate of a step: linear warm-up, then cosine decay."""
        up = min(1.0, (self.step + 1) / self.settings.warm_up)
        return up * (1 + math.cos(math.pi * self.step / self.settings.steps)) / 2

    def _save(self) -> None:
        tensors = {f"module.{name}": own for name, own in self.module.state_dict().items()}
        for number, (optimizer, _) in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer{number}.{index}.{name}": own for name, own in state.items()}
        told = {"settings": fingerprint(self.settings), "step": str(self.step), "seconds": repr(self.seconds)}
        told["notes"] = json.dumps(self.notes)
        write_whole(self.path, lambda beside: save_file(tensors, beside, metadata=told))

    def _resume(self) -> None:
        with safe_open(self.path, "pt") as file:
            told = file.metadata() or {}
            if told.get("settings") != fingerprint(self.settings):
                self.starts_over = True
                return
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        parts: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, own in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = own
        self.module.load_state_dict(parts["module"])
        for number, (optimizer, _) in enumerate(self.optimizers):
            states: dict[int, dict[str, Tensor]] = collections.defaultdict(dict)
            for name, own in parts[f"optimizer{number}"].items():
                index, _, key = name.partition(".")
                states[int(index)][key] = own
            optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(states)})
        self.notes = json.loads(told["notes"])
        self.step, self.seconds = int(told["step"]), float(told["seconds"])


class MuonRun(Run):
    """A run with Muon for matrices, and Adam for vectors and embeddings.

    The settings have a ``matrix_rate`` besides the ``learning_rate``.

    Reference: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """

    def make_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        tables = [m.weight for m in self.module.modules() if isinstance(m, torch.nn.Embedding)]
        inner = [p for p in self.module.parameters() if p.dim() == 2 and not any(p is own for own in tables)]
        outer = [p for p in self.module.parameters() if not any(p is own for own in inner)]
        return [
            (torch.optim.Muon(inner, weight_decay=self.settings.weight_decay), self.settings.matrix_rate),
            (torch.optim.AdamW(outer, betas=(0.9, 0.95), weight_decay=0.0), self.settings.learning_rate),
        ]


def fingerprint(settings: Any) -> str:
    """Return the settings that a checkpoint must match; the number of seeds is not part of them."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(settings, seeds=(), save_every=0)))


def write_whole(path: Path, put: Callable[[Path], object]) -> None:
    """Write a file atomically: to a temporary name, then rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        put(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return the argument parser of all examples: ``--out`` and ``--quick``."""
    own = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    own.add_argument("--out", type=Path, default=Path(out), help="folder to write to (default: %(default)s)")
    own.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs; its numbers mean little")
    return own


def train_all(runs: Sequence[Run], console: Console) -> None:
    """Train all runs on one thread, one after the other, with a progress bar."""
    torch.set_num_threads(1)
    if any(run.starts_over for run in runs):
        console.print(f"{runs[0].path.parent} holds checkpoints of other settings; these runs start over")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total, done = sum(run.settings.steps for run in runs), sum(run.step for run in runs)
        task = progress.add_task("steps", total=total, completed=done)
        for run in runs:
            told = f"{run.name}, seed {run.seed}"
            run.train(lambda loss, told=told: progress.update(task, advance=1, description=f"{told}, loss {loss:.3f}"))


def summary(who: str, by_seed: Mapping[str, float], **others: Any) -> dict[str, Any]:
    """Return one row of a table: a measure over seeds, with its spread.

    Args:
        who: name of the model.
        by_seed: the measure of each seed.
        others: further numbers; ``knows_more=True`` marks models with additional information, which do not compete.
    """
    found = by_seed.values()
    spread = {"mean": statistics.mean(found), "lowest": min(found), "highest": max(found)}
    return {"who": who, **spread, "by_seed": dict(by_seed), **others}


def as_table(title: str, rows: Sequence[Mapping[str, Any]], form: str = "{:.1%}", **columns: str) -> Table:
    """Format the rows for readers.

    Args:
        title: title of the table.
        rows: rows from `summary`.
        form: format of the measure.
        columns: headings of further numbers, by their name in the rows; text is shown as it is.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "mean", "lowest", "highest", *columns.values()):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        shown = [row["mean"], row["lowest"], row["highest"], *(row.get(name) for name in columns)]
        table.add_row(row["who"], *(_shown(value, form) for value in shown))
    return table


def _shown(value: float | str | None, form: str) -> str:
    """Format a number; text as it is; a dash for None."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else form.format(value)


def finish(
    out: Path,
    title: str,
    settings: Any,
    runs: Sequence[Run],
    rows: Sequence[Mapping[str, Any]],
    *,
    console: Console,
    form: str = "{:.1%}",
    figures: Sequence[Path] = (),
    lower_is_better: bool = False,
    **columns: str,
) -> None:
    """Print the table, and write ``results.json``: the rows, the settings and the duration.

    Args:
        out: the folder of the file.
        title: the measure and the data.
        settings: settings of the runs.
        runs: all trained runs.
        rows: rows from `summary`, ours first, then the baselines.
        console: the console for the table.
        form: format of the measure.
        figures: names of the figures in ``out``.
        lower_is_better: whether a small measure is a good one.
        columns: headings of further numbers, by their name in the rows.
    """
    console.print(as_table(title, rows, form, **columns))
    told = {
        "title": title,
        "form": form,
        "lower_is_better": lower_is_better,
        "rows": list(rows),
        "minutes": sum(run.seconds for run in runs) / 60,
        "settings": dataclasses.asdict(settings),
        "figures": [path.name for path in figures],
        "torch": torch.__version__,
    }
    path, text = out / "results.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    console.print(f"wrote {' and '.join(map(str, [path, *figures]))}")


def card(
    script: str, run: Run, module: torch.nn.Module, texts: Sequence[Mapping[str, Any]], held_out: Any
) -> dict[str, Any]:
    """Return the card of a shipped model: training data, licences and measurements."""
    return {
        "command": f"python examples/{script}",
        "settings": dataclasses.asdict(run.settings),
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": "float16",
        "texts": list(texts),
        "held_out": held_out,
        "minutes": round(run.seconds / 60, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
