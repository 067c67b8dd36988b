"""A Vision Transformer and a convolutional network on 5 % to 100 % of the digits.

    python examples/digits_few.py

trains both, with as many weights, on 5 %, 20 % and all of 1297 of scikit-learn's digits, and tests them on the other
500. Convolutions are local and translation-invariant by construction; a Vision Transformer has to learn that, and is
less accurate at every share: by ten points with 65 images, by three with all. Logistic regression and the nearest
neighbour are baselines. Three seeds, each with different images; prints accuracies, draws them over the number of
images, and what the class token of the Vision Transformer attends to. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import scenes
import sheets
import study
from saccade import models, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 1e-3
    embed_dim: int = 48
    num_heads: int = 4
    num_layers: int = 3
    channels: int = 52
    dropout_p: float = 0.1
    percent: tuple[int, ...] = (5, 20, 100)


QUICK = Settings(steps=6, warm_up=2, embed_dim=16, num_layers=1, channels=8, percent=(5, 20), seeds=(0,))


def transformer(settings: Settings) -> models.VisionTransformer:
    """Build a Vision Transformer with patches of 2x2 pixels and a class token."""
    config = models.VisionTransformerConfig(
        image_size=(scenes.SIDE, scenes.SIDE),
        patch_size=2,
        channels=1,
        embed_dim=settings.embed_dim,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        feed_forward_dim=2 * settings.embed_dim,
        num_classes=10,
        dropout_p=settings.dropout_p,
    )
    return scenes.start_larger(models.VisionTransformer(config))


def convolutions(settings: Settings) -> torch.nn.Module:
    """Build three convolutions, the second with stride 2, and a linear layer."""
    parts: list[torch.nn.Module] = []
    for index, inputs in enumerate((1, settings.channels, settings.channels)):
        conv = torch.nn.Conv2d(inputs, settings.channels, 3, padding=1, stride=1 + (index == 1), bias=False)
        parts += [conv, torch.nn.BatchNorm2d(settings.channels), torch.nn.ReLU()]
    flat = [torch.nn.Flatten(), torch.nn.Dropout(settings.dropout_p), torch.nn.Linear(16 * settings.channels, 10)]
    return torch.nn.Sequential(*parts, *flat)


MODELS = {"vit": ("Vision Transformer", transformer), "cnn": ("convolutions", convolutions)}


def some(digits: scenes.Digits, percent: int, seed: int) -> scenes.Digits:
    """Return a balanced part of the digits, drawn by the seed; smaller parts are subsets of larger ones."""
    order = np.random.default_rng(seed).permutation(len(digits.labels))
    rank = np.empty(len(order), int)
    for label in range(10):
        own = order[digits.labels[order] == label]
        rank[own] = np.arange(len(own)) * 10 + label
    kept = rank.argsort()[: round(len(order) * percent / 100)]
    return scenes.Digits(digits.images[kept], digits.labels[kept])


def run_of(name: str, percent: int, seed: int, settings: Settings, digits: scenes.Digits, out: Path) -> study.Run:
    """Return one seed of one network, with a part of the digits."""
    own = some(digits, percent, seed)
    images, labels = torch.from_numpy(own.images)[:, None], torch.from_numpy(own.labels)

    def loss(module: torch.nn.Module, rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(rng.integers(len(labels), size=settings.batch_size))
        return F.cross_entropy(module(images[chosen]), labels[chosen])

    return study.Run(f"{name}-{percent}", seed, lambda: MODELS[name][1](settings), loss, settings, out)


@torch.no_grad()
def accuracy(module: torch.nn.Module, digits: scenes.Digits) -> float:
    """Return the share of right decisions."""
    return float((module(torch.from_numpy(digits.images)[:, None]).argmax(1).numpy() == digits.labels).mean())


def classifiers(part: scenes.Digits, test: scenes.Digits) -> dict[str, float]:
    """Return the accuracy of two classifiers without a training loop."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  a second that --help need not wait for
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415

    found = {
        "logistic regression": LogisticRegression(max_iter=2000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    return {who: own.fit(part.flat(), part.labels).score(test.flat(), test.labels) for who, own in found.items()}


def draw(rows: list[dict[str, Any]], settings: Settings, pictures: list[int]) -> Any:
    """Draw accuracy over the number of images: the mean and range over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, row in enumerate(rows):
        found = 100 * np.array([list(row["by_share"][str(percent)].values()) for percent in settings.percent])
        mean = found.mean(1)
        spread = np.stack([mean - found.min(1), found.max(1) - mean])
        shift = np.array(pictures) * (1 + 0.03 * (index - 1.5))  # so that bars do not hide each other
        axes.errorbar(shift, mean, spread, marker="o", markersize=4, linewidth=1.4, capsize=3, label=row["who"])
    axes.set(xscale="log", xlabel="pictures to learn from", ylabel="of 500 others read right, %")
    axes.set_xticks(pictures, [f"{count:,}" for count in pictures], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title("Accuracy: mean of the seeds, lowest to highest", loc="left", size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e9")
    axes.legend(frameon=False, fontsize=9)
    return figure


@torch.no_grad()
def draw_looks(module: models.VisionTransformer, digits: scenes.Digits, count: int = 4) -> Any:
    """Draw what the class token attends to in the last layer (mean of the heads), in some images."""
    images = torch.from_numpy(digits.images[:count])[:, None]
    weights = module.matrices(images)[-1][:, :, 0, 1:].mean(1).reshape(count, *module.config.grid)
    read = module(images).argmax(1).tolist()
    panels = [
        sheets.panel(image, own, f"read as {said}") for image, own, said in zip(images, weights, read, strict=True)
    ]
    return sheets.sheet([panels], title="What the class token looks at: last layer, mean of all heads")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    given = study.parser(__doc__, "out/digits-few").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    parts = {(percent, seed): some(train, percent, seed) for percent in settings.percent for seed in settings.seeds}
    runs = {(name, *key): run_of(name, *key, settings, train, given.out) for name in MODELS for key in parts}
    study.train_all(list(runs.values()), console)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (percent, seed), part in parts.items():
        shares = {MODELS[name][0]: accuracy(runs[name, percent, seed].module, test) for name in MODELS}
        for who, share in (shares | classifiers(part, test)).items():
            found.setdefault(who, {}).setdefault(str(percent), {})[str(seed)] = share
    *fewer, most = map(str, settings.percent)
    rows = []
    for who, by_share in found.items():
        means = {f"at {percent}": float(np.mean(list(by_share[percent].values()))) for percent in fewer}
        rows.append(study.summary(who, by_share[most], by_share=by_share, **means))
    pictures = [len(parts[percent, settings.seeds[0]].labels) for percent in settings.percent]
    module = runs["vit", settings.percent[-1], settings.seeds[0]].module
    figures = [
        viz.save(draw(rows, settings, pictures), given.out / "shares.png"),
        viz.save(draw_looks(module, test), given.out / "looks.png"),
    ]
    title = f"accuracy on {len(test.labels)} held-out digits, learned from {pictures[-1]:,}"
    columns = {
        f"at {percent}": f"from {count}" for percent, count in zip(settings.percent[:-1], pictures[:-1], strict=True)
    }
    study.finish(given.out, title, settings, list(runs.values()), rows, console=console, figures=figures, **columns)
    return rows


if __name__ == "__main__":
    main()
