"""Which attention helps a small convolutional network, and where does it look? Handwritten digits, a few minutes.

    python examples/digits_attention.py

trains one small network on scikit-learn's digits (1797 pictures of 8x8), with nothing but a 1x1 convolution, a channel
gate (SE), CBAM, BAM or a non-local block in the same place, three seeds each; prints accuracy with its spread,
parameters, time, and whether positions with ink get more weight than blank paper; and writes ``results.json`` and a
figure of what each looks at. Every number is measured by the run that prints it. A run that is stopped goes on where
it was: what is finished is read, what was begun is resumed after its last whole epoch, and ends with the same weights
as if it had never stopped.

Needs ``pip install 'saccade[all]' scikit-learn``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from saccade import vision, viz
from saccade.viz.fonts import covering_families


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a run's numbers; a checkpoint made with others is not used."""

    channels: int = 32
    train_size: int = 500
    batch_size: int = 50
    epochs: int = 30
    learning_rate: float = 3e-3
    seeds: tuple[int, ...] = (0, 1, 2)
    split_seed: int = 0
    threads: int = 1


INK = 0.5  # a pixel from which on counts as ink
EDGE, FRAME = "#2a9df4", "#0f7a8a"  # around the ink, and around the position that asks
QUICK = Settings(channels=8, train_size=100, epochs=2, seeds=(0,))


class Residual(nn.Module):
    """What stands where the others have attention: a 1x1 convolution beside the identity, as many parameters."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, channels, H, W]``."""
        return features + self.norm(self.conv(features))


# The one module that differs, by name. Sizes are such that all have about as many parameters.
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "plain": Residual,
    "SE": lambda channels: vision.ChannelAttention(channels, ratio=2),
    "CBAM": lambda channels: vision.CBAM(channels, ratio=2),
    "BAM": lambda channels: vision.BAM(channels, ratio=8, dilation=2),
    "non-local": lambda channels: vision.NonLocal(channels, bottleneck=channels // 4),
}


class Network(nn.Module):
    """Two convolutions, the module under study at 8x8, two more at 4x4, the mean of all positions, ten classes."""

    def __init__(self, module: nn.Module, channels: int):
        super().__init__()
        self.stem = nn.Sequential(*_conv(1, channels), *_conv(channels, channels))
        self.module = module
        self.head = nn.Sequential(nn.MaxPool2d(2), *_conv(channels, channels), *_conv(channels, channels))
        self.classify = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[batch, 10]``, of ``[batch, 1, 8, 8]``."""
        return self.classify(self.head(self.module(self.stem(images))).mean((2, 3)))


def _conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


class Digits(NamedTuple):
    """Pictures ``[n, 1, 8, 8]`` between 0 and 1, and their digits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(settings: Settings) -> Digits:
    """scikit-learn's digits, split once: the same pictures are tested for every module and seed."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  a second of import that --help need not wait for
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=settings.train_size,
        stratify=data.target,
        random_state=settings.split_seed,
    )
    return Digits(images[train], labels[train], images[test], labels[test])


class Run:
    """One module with one seed: trained, or read back where it was trained before."""

    def __init__(self, name: str, seed: int, settings: Settings, out: Path):
        self.name, self.seed, self.settings = name, seed, settings
        self.path = out / f"{name}-seed{seed}.safetensors"
        torch.manual_seed(seed)
        self.network = Network(MODULES[name](settings.channels), settings.channels)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=settings.learning_rate, weight_decay=1e-2)
        self.epoch, self.seconds, self.starts_over = 0, 0.0, False
        self._resume()

    def train(self, digits: Digits, after_epoch: Callable[[], None]) -> None:
        """Train what is left, with a checkpoint after each epoch."""
        while self.epoch < self.settings.epochs:
            started = time.perf_counter()
            self._train_epoch(digits)
            self.epoch += 1
            self.seconds += time.perf_counter() - started
            self._save()
            after_epoch()

    def accuracy(self, digits: Digits) -> float:
        """Share of the test pictures that are read right, after the last epoch."""
        self.network.eval()
        with torch.no_grad():
            return (self.network(digits.test).argmax(1) == digits.test_labels).double().mean().item()

    def _train_epoch(self, digits: Digits) -> None:
        # The order of the pictures depends on seed and epoch alone, so a resumed run needs no random state.
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        batches = torch.randperm(len(digits.train), generator=generator).split(self.settings.batch_size)
        self.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * (1 + np.cos(np.pi * self.epoch / self.settings.epochs)) / 2
        for batch in batches:
            loss = nn.functional.cross_entropy(self.network(digits.train[batch]), digits.train_labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _save(self) -> None:
        tensors = {f"network.{name}": own for name, own in self.network.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": own for name, own in state.items()}
        told = {"settings": _fingerprint(self.settings), "epoch": str(self.epoch), "seconds": repr(self.seconds)}
        # Written beside its destination and renamed when it is complete: a run that is killed leaves no half file.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            save_file(tensors, beside, metadata=told)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def _resume(self) -> None:
        if not self.path.exists():
            return
        with safe_open(self.path, "pt") as file:
            told = file.metadata() or {}
            if told.get("settings") != _fingerprint(self.settings):
                self.starts_over = True
                return
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        states: dict[int, dict[str, Tensor]] = {}
        for name, own in tensors.items():
            part, _, rest = name.partition(".")
            if part == "optimizer":
                index, _, key = rest.partition(".")
                states.setdefault(int(index), {})[key] = own
        self.network.load_state_dict({n.removeprefix("network."): x for n, x in tensors.items() if n[0] == "n"})
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
        self.epoch, self.seconds = int(told["epoch"]), float(told["seconds"])


def _fingerprint(settings: Settings) -> str:
    """What a checkpoint must agree with; the list of seeds is no part of any one run."""
    return json.dumps({**dataclasses.asdict(settings), "seeds": None})


def ink_over_paper(run: Run, digits: Digits) -> float | None:
    """Mean weight where there is ink, over that on blank paper, in all test pictures: 1 is no preference.

    The weight of a position is its gate, or how much all positions look at it; None where positions have no weights.
    """
    network = run.network.eval()
    module = network.module
    with torch.no_grad():
        features = network.stem(digits.test)
        if isinstance(module, (vision.CBAM, vision.BAM)):
            weights = module.weights(features).spatial[:, 0]
        elif isinstance(module, vision.NonLocal):
            matrix = module.matrix(features)
            looked_at = matrix.mT @ torch.ones(*matrix.shape[:3], 1)
            weights = looked_at.reshape(features[:, 0].shape)
        else:
            return None
    ink, paper = digits.test[:, 0] > INK, digits.test[:, 0] == 0
    return float(weights[ink].mean() / weights[paper].mean())


def summarise(runs: list[Run], digits: Digits) -> list[dict[str, Any]]:
    """One row per module: accuracy with its spread over seeds, parameters, time, and where it looks."""
    accuracies = [run.accuracy(digits) for run in runs]
    rows = []
    for name in dict.fromkeys(run.name for run in runs):
        own = [(run, accuracy) for run, accuracy in zip(runs, accuracies, strict=True) if run.name == name]
        found = [accuracy for _, accuracy in own]
        rows.append(
            {
                "module": name,
                "accuracy": statistics.mean(found),
                "lowest": min(found),
                "highest": max(found),
                "by_seed": {str(run.seed): accuracy for run, accuracy in own},
                "parameters": sum(p.numel() for p in own[0][0].network.parameters()),
                "module_parameters": sum(p.numel() for p in own[0][0].network.module.parameters()),
                "seconds": statistics.median(run.seconds for run, _ in own),
                "ink_over_paper": {str(run.seed): ink_over_paper(run, digits) for run, _ in own},
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]], seeds: int) -> Table:
    """The rows as a person reads them."""
    table = Table(title=f"test accuracy over {seeds} seed{'s' if seeds > 1 else ''}", title_justify="left")
    for heading in ("module", "mean", "lowest", "highest", "parameters", "module's", "seconds", "ink : paper"):
        table.add_column(heading, justify="left" if heading == "module" else "right")
    for row in rows:
        shares = [f"{100 * row[key]:.2f} %" for key in ("accuracy", "lowest", "highest")]
        counts = [f"{row['parameters']:,}", f"{row['module_parameters']:,}", f"{row['seconds']:.1f}"]
        looked = [f"{ratio:.2f}" for ratio in row["ink_over_paper"].values() if ratio is not None]
        table.add_row(row["module"], *shares, *counts, " ".join(looked) or "–")
    return table


class Look(NamedTuple):
    """A panel of the figure.

    Attributes:
        title: stands above it.
        weights: ``[channels]``, or ``[H, W]``.
        query: the position that looks, row and column; None where all positions are alike.
    """

    title: str
    weights: Tensor
    query: tuple[int, int] | None = None


def looks(runs: list[Run], digits: Digits, picture: int) -> list[Look]:
    """What each module looks at in one test picture: a gate for each channel, or a weight for each position."""
    image = digits.test[picture : picture + 1]
    first_seed: dict[str, Run] = {}
    for run in runs:
        first_seed.setdefault(run.name, run)
    found = [Look("the picture", image[0, 0])]
    for run in first_seed.values():
        network = run.network.eval()
        module = network.module
        with torch.no_grad():
            features = network.stem(image)
            if isinstance(module, vision.ChannelAttention):
                found.append(Look("SE: gates of the channels", module.weights(features)[0]))
            elif isinstance(module, (vision.CBAM, vision.BAM)):
                kind = "CBAM: gates of the positions" if isinstance(module, vision.CBAM) else "BAM: its spatial branch"
                found.append(Look(kind, module.weights(features).spatial[0].reshape(image.shape[2:])))
            elif isinstance(module, vision.NonLocal):
                # The brightest position asks, so that the map shows where a stroke looks.
                query = int(image.flatten().argmax())
                row = module.matrix(features)[0, 0, query].reshape(image.shape[2:])
                found.append(Look("non-local: from the frame", row, divmod(query, image.shape[3])))
    return found


CHINESE = {
    "the picture": "图片",
    "SE: gates of the channels": "SE：通道的门控值",
    "CBAM: gates of the positions": "CBAM：位置的门控值",
    "BAM: its spatial branch": "BAM：空间分支",
    "non-local: from the frame": "non-local：从方框处看",
    "channel": "通道",
}


def draw(found: list[Look], words: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The figure of one picture; ``words`` says what is written in it in another language."""
    from matplotlib import rc_context  # noqa: PLC0415  imported when used

    with rc_context({"font.family": covering_families("".join(words.values()))[0]}):
        figure = _drawn(found, lambda word: words.get(word, word))
        figure.canvas.draw()
    return figure


def _drawn(found: list[Look], say: Callable[[str], str]) -> Any:
    """The picture and maps with the outline of its ink, side by side; gates of channels as bars below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    maps, bars = ([look for look in found if look.weights.ndim == axes] for axes in (2, 1))
    ink = found[0].weights > INK
    figure = Figure(figsize=(9, 2.7 + 1.9 * len(bars)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.08)
    parts = figure.subfigures(1 + len(bars), 1, height_ratios=[2.7, *[1.9] * len(bars)], squeeze=False)[:, 0]
    for axes, look in zip(parts[0].subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        axes.set_title(say(look.title), loc="left", size=9)
        axes.set(xticks=[], yticks=[])
        if look is found[0]:
            axes.imshow(look.weights.numpy(), cmap="gray")
            continue
        image = axes.imshow(look.weights.numpy(), cmap="magma_r", vmin=0)
        outline(axes, ink)
        if look.query is not None:
            row, column = look.query
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=FRAME, linewidth=2.5, zorder=3)
            )
        parts[0].colorbar(image, ax=axes, orientation="horizontal", aspect=14, pad=0.03).ax.tick_params(labelsize=8)
    for part, look in zip(parts[1:], bars, strict=True):
        axes = part.subplots()
        axes.bar(range(len(look.weights)), look.weights.tolist(), color="#3b0f70")
        axes.set_title(say(look.title), loc="left", size=9)
        axes.set(ylim=(0, 1), xlim=(-0.7, len(look.weights) - 0.3), xlabel=say("channel"))
        axes.axhline(0.5, color="0.5", linewidth=0.8, linestyle="--")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def outline(axes: Any, ink: Tensor) -> None:
    """Draw the edges between ink and paper."""
    wide = torch.nn.functional.pad(ink.long(), (1, 1, 1, 1))
    for row, column in (wide[1:, 1:] != wide[1:, :-1]).nonzero().tolist():
        axes.plot([column - 0.5] * 2, [row - 0.5, row + 0.5], color=EDGE, linewidth=1.4)
    for row, column in (wide[1:, 1:] != wide[:-1, 1:]).nonzero().tolist():
        axes.plot([column - 0.5, column + 0.5], [row - 0.5] * 2, color=EDGE, linewidth=1.4)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure, write; returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path("out/digits"), help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, to see that it runs; its numbers mean little"
    )
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the figure (default: %(default)s)")
    parser.add_argument("--picture", type=int, default=0, help="the test picture of the figure (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    torch.set_num_threads(settings.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    digits = load(settings)
    if not 0 <= given.picture < len(digits.test):
        parser.error(f"--picture must be at least 0 and below {len(digits.test)}; got {given.picture}.")
    console = Console()
    runs = [Run(name, seed, settings, given.out) for name in MODULES for seed in settings.seeds]
    if any(run.starts_over for run in runs):
        console.print(f"{given.out} holds checkpoints of other settings; these runs start over")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("epochs", total=len(runs) * settings.epochs, completed=sum(run.epoch for run in runs))
        for run in runs:
            progress.update(task, description=f"{run.name}, seed {run.seed}")
            run.train(digits, lambda: progress.advance(task))
    rows = summarise(runs, digits)
    console.print(as_table(rows, len(settings.seeds)))
    told = {
        "settings": dataclasses.asdict(settings),
        "test_pictures": len(digits.test),
        "torch": torch.__version__,
        "rows": rows,
    }
    written = given.out / "results.json"
    beside = written.with_name(f".{written.name}.{os.getpid()}.part")
    beside.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, written)
    words = CHINESE if given.language == "zh" else {}
    figure = viz.save(draw(looks(runs, digits, given.picture), words), given.out / "looks.png")
    console.print(f"wrote {written} and {figure}")
    return rows


if __name__ == "__main__":
    main()
