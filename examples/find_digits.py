"""Detection of digits in scenes by learned queries: the digit and its box, each once.

    python examples/find_digits.py

composes scenes of scikit-learn's digits (``scenes.py``), and trains DETR (`saccade.models.SetDecoder`): eight queries
attend to a feature map and to each other, and each predicts a digit and its box, or none. The baseline is a network
with as many weights and no attention: convolutions, and a prediction in each cell of a 6x6 grid. Three seeds each;
prints the share of held-out scenes in which exactly the right digits are found, with fitting boxes; and draws what the
queries attend to. Both are right in about 97 of 100 scenes: as digits do not overlap, a grid does as well, and needs
fewer steps. Interrupted runs resume.

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

    steps: int = 1500
    batch_size: int = 32
    class_weight: float = 4.0
    num_queries: int = 8
    embed_dim: int = 64
    channels: int = 32
    peer_channels: int = 86
    test_scenes: int = 1000


QUICK = Settings(steps=6, batch_size=4, warm_up=2, channels=8, peer_channels=8, embed_dim=16, test_scenes=8, seeds=(0,))
FITS = 0.5  # smallest intersection over union of a right box


def finder(settings: Settings) -> models.SetDecoder:
    """Build a DETR over a feature map of 6x6."""
    config = models.SetDecoderConfig(
        channels=settings.channels,
        num_classes=10,
        num_queries=settings.num_queries,
        embed_dim=settings.embed_dim,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=2,
        feed_forward_dim=2 * settings.embed_dim,
        norm_first=True,
        dropout_p=0.0,
    )
    return models.SetDecoder(config, scenes.Seer(settings.channels))


class Grid(torch.nn.Module):
    """A baseline without attention: each cell of a convolutional map predicts the digit whose centre it contains."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.see, self.class_weight = scenes.Seer(settings.peer_channels), settings.class_weight
        self.guess = torch.nn.Conv2d(settings.peer_channels, 10 + 1 + 4, 1)

    def forward(self, images: Tensor) -> models.Detections:
        """Return predictions as a `SetDecoder` does, with a query for each cell."""
        logits, boxes = self.guess(self.see(images)).flatten(2).mT.split([11, 4], -1)
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).reshape(36, 2)
        middle = (places + boxes[..., :2].sigmoid()) / 6
        return models.Detections(logits, torch.cat([middle, boxes[..., 2:].sigmoid()], -1))

    def loss(self, found: models.Detections, shown: list[models.Targets]) -> Tensor:
        """Return `saccade.models.set_loss`, with each digit assigned to the cell of its centre."""
        logits, boxes = found
        item = torch.cat([torch.full_like(own.classes, index) for index, own in enumerate(shown)])
        classes, wanted = (torch.cat(own) for own in zip(*shown, strict=True))
        column, row = (wanted[:, :2] * 6).long().unbind(-1)
        cell = 6 * row + column
        answers = torch.full(logits.shape[:2], 10)
        answers[item, cell] = classes
        weight = torch.ones(11)
        weight[-1] = 0.1
        got = boxes[item, cell]
        far, apart = (got - wanted).abs().sum(-1).mean(), (1 - shared(got, wanted)).mean()
        return self.class_weight * F.cross_entropy(logits.mT, answers, weight) + 5 * far + 2 * apart


def shared(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes, ``[...]`` of ``[..., 4]``."""
    (first, last), (other_first, other_last) = (
        (own[..., :2] - own[..., 2:] / 2, own[..., :2] + own[..., 2:] / 2) for own in (boxes, others)
    )
    both = (torch.minimum(last, other_last) - torch.maximum(first, other_first)).clamp(min=0).prod(-1)
    return both / (boxes[..., 2:].prod(-1) + others[..., 2:].prod(-1) - both)


def shown_in(drawn: scenes.Scenes) -> list[models.Targets]:
    """Return the objects of each scene."""
    there = drawn.things != scenes.NOTHING
    return [
        models.Targets(things[own] % 10, boxes[own])
        for things, boxes, own in zip(drawn.things, drawn.boxes, there, strict=True)
    ]


def run_of(name: str, seed: int, settings: Settings, digits: scenes.Digits, out: Path) -> study.Run:
    """Return one seed of the queries, or of the grid."""

    def loss(module: Any, rng: np.random.Generator) -> Tensor:
        drawn = scenes.drawn(digits, settings.batch_size, rng)
        shown = shown_in(drawn)
        if name == "grid":
            return module.loss(module(drawn.images), shown)
        found = module.every_layer(drawn.images)
        return sum(models.set_loss(own, shown, class_weight=settings.class_weight).total for own in found)

    make = finder if name == "queries" else Grid
    return study.Run(name, seed, lambda: make(settings), loss, settings, out)


def once(found: models.Detections) -> list[models.Targets]:
    """Return predictions with a probability above a half, without overlapping ones (NMS)."""
    kept = []
    for logits, boxes in zip(*found, strict=True):
        most, classes = logits.softmax(-1)[:, :-1].max(-1)
        own: list[int] = []
        for index in most.argsort(descending=True).tolist():
            if most[index] < 0.5:
                break
            if not own or shared(boxes[index], boxes[own]).max() < FITS:
                own.append(index)
        kept.append(models.Targets(classes[own], boxes[own]))
    return kept


def hits(found: models.Targets, shown: models.Targets) -> int:
    """Return the number of digits that are detected with the right class by a fitting box."""
    fits = shared(found.boxes[:, None], shown.boxes) > FITS
    same = found.classes[:, None] == shown.classes
    return int((fits & same).any(0).sum())


@torch.no_grad()
def marks(module: torch.nn.Module, drawn: scenes.Scenes) -> tuple[float, float]:
    """Return the share of scenes with exactly right detections, and the share of detected digits."""
    shown = shown_in(drawn)
    found = [own for part in drawn.images.split(250) for own in once(module(part))]
    hit = [hits(own, there) for own, there in zip(found, shown, strict=True)]
    sizes = [len(own.classes) for own in shown]
    right = [got == len(own.classes) == size for got, own, size in zip(hit, found, sizes, strict=True)]
    return float(np.mean(right)), sum(hit) / sum(sizes)


@torch.no_grad()
def draw(module: models.SetDecoder, drawn: scenes.Scenes) -> Any:
    """Draw a row for each scene: the detections, then what each query attends to (mean of the heads)."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415  imported when used

    rows = []
    for image in drawn.images[:, None]:
        found = module(image)
        weights = module.cross_matrices(image)[-1].to_dense()[0].mean(0)
        most, classes = found.logits[0].softmax(-1)[:, :-1].max(-1)
        queries = (most > 0.5).nonzero()[:, 0].tolist()
        row = [sheets.panel(image[0], None, f"{len(queries)} found")]
        row += [
            sheets.panel(image[0], weights[query].reshape(6, 6), f"query {query}: {classes[query]}")
            for query in queries
        ]
        for index, query in enumerate(queries):
            x, y, width, height = (scenes.CANVAS * found.boxes[0, query]).tolist()
            corner = x - width / 2 - 0.5, y - height / 2 - 0.5
            for figure in (row[0], row[1 + index]):
                figure.axes[0].add_patch(Rectangle(corner, width, height, fill=False, edgecolor="#0b7fd4", lw=3))
        rows.append(row)
    return sheets.sheet(rows, title="Boxes that were found, and what the query of each looks at (mean of all heads)")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    given = study.parser(__doc__, "out/find-digits").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    drawn = scenes.drawn(test, settings.test_scenes, np.random.default_rng(0), held_out=True)
    names = {"queries": "queries that look (DETR)", "grid": "a grid of convolutions"}
    runs = {name: [run_of(name, seed, settings, train, given.out) for seed in settings.seeds] for name in names}
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = []
    for name, own in runs.items():
        found = {str(run.seed): marks(run.module, drawn) for run in own}
        digits = float(np.mean([share for _, share in found.values()]))
        weights = sum(own.numel() for own in own[0].module.parameters())
        shares = {seed: share for seed, (share, _) in found.items()}
        rows.append(study.summary(names[name], shares, digits=digits, weights=weights))
        console.print(f"{names[name]}: {weights:,} weights")
    figure = viz.save(draw(runs["queries"][0].module, drawn.first(3)), given.out / "looks.png")
    title = f"{settings.test_scenes:,} held-out scenes with exactly the right detections"
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure], digits="of the digits")
    return rows


if __name__ == "__main__":
    main()
