"""Matching of scenes and sentences by two encoders with a common space, as in CLIP.

    python examples/match_scenes.py

composes scenes of scikit-learn's digits and their sentences (``scenes.py``), and trains a `saccade.models.DualEncoder`,
a Vision Transformer over the map of some convolutions beside a decoder that reads the sentence: those that belong
together are to point the same way. Every batch has each scene with another one of the same objects elsewhere.
Two baselines learn from the same batches by the same loss: such convolutions with their whole map and a recurrent
    network
(GRU), and the mean of such a map with the mean of the words. Three seeds; prints how often a sentence finds its own
scene among 1000 that were held out, how often a scene its sentence, and how often a scene prefers its own sentence to
three others with the same objects elsewhere; and draws similarities. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import scenes
import study
from saccade import models, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 500
    batch_size: int = 128
    learning_rate: float = 5e-3
    matrix_rate: float = 0.02
    embed_dim: int = 128
    num_heads: int = 4
    num_picture_layers: int = 2
    num_text_layers: int = 3
    channels: int = 32
    test_scenes: int = 1000


QUICK = Settings(steps=6, batch_size=8, warm_up=2, embed_dim=16, channels=8, test_scenes=20, seeds=(0,))
OTHERS = 3  # sentences with the same objects elsewhere


class Clip(models.DualEncoder):
    """Convolutions, a Vision Transformer over the cells of their map, and a decoder, all of one width."""

    def __init__(self, settings: Settings):
        sizes = {"embed_dim": settings.embed_dim, "num_heads": settings.num_heads}
        sizes["feed_forward_dim"] = 4 * settings.embed_dim
        over = {"image_size": (6, 6), "patch_size": 3, "channels": settings.channels}
        pictures = models.VisionTransformerConfig(**over, num_layers=settings.num_picture_layers, **sizes)
        # With rotary positions a word can attend to the place two words before it; with learned positions neither
        # encoder learns which object is where, and both act like bags of words.
        texts = models.DecoderConfig(
            vocab_size=len(scenes.TOKENS),
            max_len=scenes.LONGEST + 1,
            num_layers=settings.num_text_layers,
            norm="layer",
            gated=False,
            activation="gelu",
            end_tokens=(scenes.END,),
            **sizes,
        )
        seer = scenes.start_larger(models.VisionTransformer(pictures))
        super().__init__(seer, models.Decoder(texts), settings.embed_dim)
        torch.nn.init.normal_(self.text_encoder.embedding.weight, std=0.5)
        self.see = scenes.Seer(settings.channels)

    def embed_images(self, images: Tensor) -> Tensor:
        """Return a unit vector for each scene."""
        return super().embed_images(self.see(images))


class Pair(torch.nn.Module):
    """A baseline of two encoders without attention, with the interface of `saccade.models.DualEncoder`."""

    def __init__(self, settings: Settings, *, ordered: bool):
        super().__init__()
        width, channels = settings.embed_dim, settings.channels
        whole = [torch.nn.Flatten()] if ordered else [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
        self.see = torch.nn.Sequential(
            scenes.Seer(channels), *whole, torch.nn.Linear(channels * (36 if ordered else 1), width)
        )
        self.embedding = torch.nn.Embedding(len(scenes.TOKENS), width)
        self.read = torch.nn.GRU(width, 2 * width, batch_first=True) if ordered else None
        self.project = torch.nn.Linear(2 * width if ordered else width, width)
        self.log_scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def embed_images(self, images: Tensor) -> Tensor:
        """Return a unit vector for each image."""
        return F.normalize(self.see(images), dim=-1)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Return a unit vector for each sentence: of its end token, or the mean of its words."""
        x = self.embedding(tokens)
        ends = (tokens == scenes.END).int().argmax(1)
        if self.read is not None:
            last = self.read(x)[0][torch.arange(len(x)), ends]
        else:
            real = (torch.arange(tokens.shape[1]) <= ends[:, None])[..., None]
            last = (x * real).sum(1) / real.sum(1)
        return F.normalize(self.project(last), dim=-1)

    def similarity(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Return ``[images, texts]``."""
        return self.log_scale.exp() * self.embed_images(images) @ self.embed_texts(tokens).mT

    def loss(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of `saccade.models.DualEncoder`."""
        logits, own = self.similarity(images, tokens), torch.arange(len(images))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own)) / 2


MODELS = {
    "dual": ("two that attend (CLIP)", Clip),
    "gru": ("convolutions and a GRU", lambda settings: Pair(settings, ordered=True)),
    "bags": ("means of both", lambda settings: Pair(settings, ordered=False)),
}


def elsewhere(things: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move the same objects to other cells, so that another sentence describes them: ``[n, 4]``."""
    moved = things.copy()
    while (same := (moved == things).all(1)).any():
        moved[same] = rng.permuted(things[same], axis=1)
    return moved


def pairs(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw scenes, and as many with the same objects elsewhere; none held out, no sentence twice."""
    drawn = scenes.draw_things(2 * count, rng, held_out=False)
    drawn = drawn[np.sort(drawn, 1)[:, 0] != np.sort(drawn, 1)[:, -1]]  # four equal objects have no other arrangement
    moved = elsewhere(drawn, rng)
    both = np.stack([drawn, moved], 1)[~scenes.is_held_out(moved)].reshape(-1, scenes.CELLS)
    _, first = np.unique(both, axis=0, return_index=True)
    return both[np.sort(first)][:count]


def tokens_of(things: np.ndarray) -> Tensor:
    """Return the sentences of scenes, ``[n, longest]``; tokens after an end do not matter."""
    return scenes.padded([scenes.sentence(own) for own in things.tolist()], fill=scenes.START)


def run_of(name: str, seed: int, settings: Settings, digits: scenes.Digits, out: Path) -> study.Run:
    """Return one seed of one model."""

    def loss(module: Any, rng: np.random.Generator) -> Tensor:
        module.log_scale.data.clamp_(max=math.log(100))
        things = pairs(settings.batch_size, rng)
        return module.loss(scenes.compose(digits, things, rng).images, tokens_of(things))

    return study.MuonRun(name, seed, lambda: MODELS[name][1](settings), loss, settings, out)


def held_out(digits: scenes.Digits, count: int, rng: np.random.Generator) -> tuple[scenes.Scenes, np.ndarray]:
    """Return test scenes with distinct sentences, and other arrangements of each, ``[OTHERS, n, 4]``.

    The others put the same things elsewhere, each in another way.
    """
    things = scenes.draw_things(2 * count, rng, held_out=True)
    things = things[np.sort(np.unique(things, axis=0, return_index=True)[1])]
    things = things[[len(set(own)) > 2 for own in things.tolist()]][:count]
    moved: list[np.ndarray] = []
    while len(moved) < OTHERS:
        new = elsewhere(things, rng)
        while (same := np.any([(new == own).all(1) for own in moved], 0) if moved else np.zeros(1, bool)).any():
            new[same] = elsewhere(things[same], rng)
        moved.append(new)
    return scenes.compose(digits, things, rng), np.stack(moved)


@torch.no_grad()
def marks(module: Any, drawn: scenes.Scenes, others: np.ndarray) -> dict[str, float]:
    """Return the accuracies of matching sentences to scenes, scenes to sentences, and to the right arrangement."""
    images = torch.cat([module.embed_images(part) for part in drawn.images.split(250)])
    texts = module.embed_texts(tokens_of(drawn.things.numpy()))
    own = torch.arange(len(images))
    cosines = images @ texts.mT
    rivals = torch.stack([(images * module.embed_texts(tokens_of(moved))).sum(-1) for moved in others])
    return {
        "scene": float((cosines.argmax(0) == own).double().mean()),
        "sentence": float((cosines.argmax(1) == own).double().mean()),
        "place": float((cosines.diagonal() > rivals.amax(0)).double().mean()),
    }


@torch.no_grad()
def draw(module: Clip, drawn: scenes.Scenes, others: np.ndarray, digits: scenes.Digits) -> Any:
    """Draw three scenes, each in two arrangements, against their sentences."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    things = np.stack([drawn.things.numpy(), others[0]], 1)[:3].reshape(-1, scenes.CELLS)
    images = scenes.compose(digits, things, np.random.default_rng(0)).images
    cosines = module.embed_images(images) @ module.embed_texts(tokens_of(things)).mT
    figure = Figure(figsize=(9, 5.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    count = len(things)
    grid = figure.add_gridspec(2, count + 1, height_ratios=[1, 4.4], width_ratios=[*[1] * count, 0.25])
    for column, image in enumerate(images):
        above = figure.add_subplot(grid[0, column])
        above.imshow((1 - image[0]).numpy(), cmap="gray", vmin=0, vmax=1)
        above.set(xticks=[], yticks=[])
    axes = figure.add_subplot(grid[1, :count])
    shown = axes.imshow(cosines.mT.numpy(), cmap="magma_r", vmin=0, vmax=1, aspect="auto")
    for row, column in np.ndindex(count, count):
        value = float(cosines[column, row])
        ink = "white" if value > 0.5 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", size=9, color=ink)
    texts = [scenes.as_text(scenes.sentence(own)).replace(", ", ",\n") for own in things.tolist()]
    axes.set_yticks(range(count), texts, size=8)
    axes.set_xticks([])
    figure.colorbar(shown, cax=figure.add_subplot(grid[1, count]))
    figure.suptitle("Cosine of each sentence with each scene: the diagonal belongs together", size=10)
    return figure


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    given = study.parser(__doc__, "out/match-scenes").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    drawn, others = held_out(test, settings.test_scenes, np.random.default_rng(0))
    runs = {name: [run_of(name, seed, settings, train, given.out) for seed in settings.seeds] for name in MODELS}
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = []
    for name, own in runs.items():
        found = {str(run.seed): marks(run.module, drawn, others) for run in own}
        further = {key: float(np.mean([each[key] for each in found.values()])) for key in ("sentence", "place")}
        rows.append(study.summary(MODELS[name][0], {seed: each["scene"] for seed, each in found.items()}, **further))
    chance = 1 / len(drawn.images)
    rows.append(study.summary("chance", {"-": chance}, sentence=chance, place=1 / (1 + OTHERS)))
    figure = viz.save(draw(runs["dual"][0].module, drawn, others, test), given.out / "similarities.png")
    title = f"sentences that rank their own scene first, among {len(drawn.images):,} held-out scenes"
    columns = {"sentence": "scene to sentence", "place": "things elsewhere"}
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure], **columns)
    return rows


if __name__ == "__main__":
    main()
