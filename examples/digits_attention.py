"""Attention modules in a small convolutional network for handwritten digits, in a few minutes.

    python examples/digits_attention.py

trains one small network on scikit-learn's digits (1797 images of 8x8), with nothing but a 1x1 convolution, a channel
gate (SE), CBAM, BAM or a non-local block in the same place, three seeds each; prints accuracy with its spread,
parameters, time, and whether positions with ink get more weight than blank paper; and writes ``results.json`` and a
figure of what each attends to. Every number is measured by the run that prints it. An interrupted run
resumes: what is finished is read, what was begun is resumed after its last whole epoch, and ends with the same weights
as if it had never stopped.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import study
from saccade import vision, viz
from saccade.viz.fonts import covering_families


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run; a step is an epoch here."""

    steps: int = 30
    batch_size: int = 50
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    save_every: int = 1
    channels: int = 32
    train_size: int = 500
    split_seed: int = 0


INK = 0.5  # pixels of at least this value are ink
EDGE, FRAME = "#2a9df4", "#0f7a8a"  # around the ink, and around the query's position
QUICK = Settings(channels=8, train_size=100, steps=2, seeds=(0,))


class Residual(nn.Module):
    """A baseline without attention: a residual 1x1 convolution with the same number of parameters."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[batch, channels, H, W]``."""
        return features + self.norm(self.conv(features))


# The module under study, by name. All have about the same number of parameters.
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "plain": Residual,
    "SE": lambda channels: vision.ChannelAttention(channels, ratio=2),
    "CBAM": lambda channels: vision.CBAM(channels, ratio=2),
    "BAM": lambda channels: vision.BAM(channels, ratio=8, dilation=2),
    "non-local": lambda channels: vision.NonLocal(channels, bottleneck=channels // 4),
}


class Network(nn.Module):
    """Two convolutions, the module under study at 8x8, two more at 4x4, mean pooling, ten classes."""

    def __init__(self, module: nn.Module, channels: int):
        super().__init__()
        self.stem = nn.Sequential(*_conv(1, channels), *_conv(channels, channels))
        self.module = module
        self.head = nn.Sequential(nn.MaxPool2d(2), *_conv(channels, channels), *_conv(channels, channels))
        self.classify = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, ``[batch, 10]``, of ``[batch, 1, 8, 8]``."""
        return self.classify(self.head(self.module(self.stem(images))).mean((2, 3)))


def _conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


class Digits(NamedTuple):
    """Images ``[n, 1, 8, 8]`` between 0 and 1, and their digits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(settings: Settings) -> Digits:
    """Load scikit-learn's digits, with the same split for every module and seed."""
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


class Run(study.Run):
    """One module with one seed; each step is an epoch."""

    def __init__(self, name: str, seed: int, settings: Settings, digits: Digits, out: Path):
        def loss(network: nn.Module, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(network(digits.train[batch]), digits.train_labels[batch])

        self.pictures = len(digits.train)
        channels = settings.channels
        super().__init__(name, seed, lambda: Network(MODULES[name](channels), channels), loss, settings, out)

    def accuracy(self, digits: Digits) -> float:
        """Return the accuracy on the test images after the last epoch."""
        with torch.no_grad():
            return (self.module.eval()(digits.test).argmax(1) == digits.test_labels).double().mean().item()

    def _learn(self) -> float:
        # The order of images depends on seed and epoch only, so a resumed run needs no random state.
        generator = torch.Generator().manual_seed(1000 * self.seed + self.step)
        batches = torch.randperm(self.pictures, generator=generator).split(self.settings.batch_size)
        self.module.train()
        ((optimizer, rate),) = self.optimizers
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + np.cos(np.pi * self.step / self.settings.steps)) / 2
        for batch in batches:
            loss = self.loss(self.module, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()


def ink_over_paper(run: Run, digits: Digits) -> float | None:
    """Return the mean weight on ink over that on blank paper, in all test images; 1 means no preference.

    The weight of a position is its gate, or the mean attention to it; None if positions have no weights.
    """
    network = run.module.eval()
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
    """Return one row per module: accuracy with its spread over seeds, parameters, time, and weight on ink."""
    rows = []
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        network = own[0].module
        whole, part = (sum(p.numel() for p in one.parameters()) for one in (network, network.module))
        seconds = statistics.median(run.seconds for run in own)
        looked = {str(run.seed): ink_over_paper(run, digits) for run in own}
        others = {"parameters": whole, "module_parameters": part, "seconds": seconds, "ink_over_paper": looked}
        shown = {
            "all weights": f"{whole:,}",
            "its own": f"{part:,}",
            "time": f"{seconds:.1f}",
            "ink": " ".join(f"{ratio:.2f}" for ratio in looked.values() if ratio is not None) or None,
        }
        by_seed = {str(run.seed): run.accuracy(digits) for run in own}
        rows.append(study.summary(name, by_seed, **others, **shown))
    return rows


HEADINGS = {"all weights": "parameters", "its own": "module's", "time": "seconds", "ink": "ink : paper"}


class Look(NamedTuple):
    """A panel of the figure.

    Attributes:
        title: title of the panel.
        weights: ``[channels]``, or ``[H, W]``.
        query: row and column of the query; None for all positions.
    """

    title: str
    weights: Tensor
    query: tuple[int, int] | None = None


def looks(runs: list[Run], digits: Digits, picture: int) -> list[Look]:
    """Return what each module attends to in a test image: gates of channels, or weights of positions."""
    image = digits.test[picture : picture + 1]
    first_seed: dict[str, Run] = {}
    for run in runs:
        first_seed.setdefault(run.name, run)
    found = [Look("the picture", image[0, 0])]
    for run in first_seed.values():
        network = run.module.eval()
        module = network.module
        with torch.no_grad():
            features = network.stem(image)
            if isinstance(module, vision.ChannelAttention):
                found.append(Look("SE: gates of the channels", module.weights(features)[0]))
            elif isinstance(module, (vision.CBAM, vision.BAM)):
                kind = "CBAM: gates of the positions" if isinstance(module, vision.CBAM) else "BAM: its spatial branch"
                found.append(Look(kind, module.weights(features).spatial[0].reshape(image.shape[2:])))
            elif isinstance(module, vision.NonLocal):
                # The query is the brightest position, so that the map belongs to a stroke.
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
    """Draw the figure of one image; ``words`` holds its labels in another language."""
    from matplotlib import rc_context  # noqa: PLC0415  imported when used

    with rc_context({"font.family": covering_families("".join(words.values()))[0]}):
        figure = _drawn(found, lambda word: words.get(word, word))
        figure.canvas.draw()
    return figure


def _drawn(found: list[Look], say: Callable[[str], str]) -> Any:
    """Draw the image and maps with the outline of its ink side by side, and gates of channels as bars below."""
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
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/digits")
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the figure (default: %(default)s)")
    parser.add_argument("--picture", type=int, default=0, help="the test picture of the figure (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    digits = load(settings)
    if not 0 <= given.picture < len(digits.test):
        parser.error(f"--picture must be at least 0 and below {len(digits.test)}; got {given.picture}.")
    console = Console()
    runs = [Run(name, seed, settings, digits, given.out) for name in MODULES for seed in settings.seeds]
    study.train_all(runs, console)
    rows = summarise(runs, digits)
    words = CHINESE if given.language == "zh" else {}
    figure = viz.save(draw(looks(runs, digits, given.picture), words), given.out / "looks.png")
    how: dict[str, Any] = {"form": "{:.2%}", "figures": [figure], **HEADINGS}
    title = f"{len(digits.test):,} test pictures that are read right"
    study.finish(given.out, title, settings, runs, rows, console=console, **how)
    return rows


if __name__ == "__main__":
    main()
