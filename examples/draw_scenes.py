"""Scenes drawn from a sentence, patch by patch, by a decoder with row, column and local attention (DALL-E).

    python examples/draw_scenes.py

composes scenes of scikit-learn's digits and their sentences (``scenes.py``). A scene is 64 patches of 3x3 pixels, each
represented by the nearest of 256 that k-means chose; a decoder reads the sentence and predicts the next patch, from
left to right and down. Every layer sees the sentence, and of the image the row, the column or a neighbourhood
(`saccade.masks.image_rows` and its relatives), and draws through a KV cache. Baselines are the same without the
sentence, and a count of what follows which patches (Markov). Three seeds; prints bits per patch of held-out scenes, the
share of drawn digits that a logistic regression trained on real digits reads as the sentence says, and the share of
cells with the right ink; and draws scenes, and which words patches attend to. After a minute or two of training the ink
is right, light or dark, in 96 of 100 cells; the digit is right in one of ten, hardly more often than by chance.
Interrupted runs resume.

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
from painting import Markov, Patches, Reader
from saccade import caches, masks, models, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 1000
    batch_size: int = 24
    embed_dim: int = 64
    num_heads: int = 4
    radius: int = 2
    codes: int = 256
    fit_scenes: int = 1000
    count_scenes: int = 20_000
    temperature: float = 0.9
    test_scenes: int = 500


QUICK = Settings(
    steps=6, batch_size=4, warm_up=2, embed_dim=16, codes=16, fit_scenes=60, count_scenes=100, test_scenes=6, seeds=(0,)
)
WORDS = len(scenes.TOKENS)  # number of the first patch
TEXT = scenes.LONGEST + 1


class Painter(torch.nn.Module):
    """A language model of sentences and patches, whose layers have different sparse masks."""

    def __init__(self, settings: Settings, side: int):
        super().__init__()
        width = settings.embed_dim
        self.embedding = torch.nn.Embedding(WORDS + settings.codes, width)
        self.place = positions.Learned(TEXT + side**2, width)
        for table in (self.embedding, self.place):
            torch.nn.init.normal_(table.weight, std=0.3)
        near = masks.image_neighbors(TEXT, side, side, settings.radius)
        rules = [near, masks.image_rows(TEXT, side, side), masks.image_columns(TEXT, side, side), near]

        def layer(mask: masks.Mask) -> nn.DecoderLayer:
            own = nn.MultiHeadAttention(width, settings.num_heads, mask=mask)
            return nn.DecoderLayer(own, nn.FeedForward(width, 4 * width))

        self.decoder = nn.DecoderStack([layer(rule) for rule in rules], final_norm=torch.nn.LayerNorm(width))
        self.tell = torch.nn.Linear(width, WORDS + settings.codes)

    def embed(self, tokens: Tensor, where: range | Tensor) -> Tensor:
        """Return the embeddings of tokens with their positions."""
        return self.embedding(tokens) + self.place(where)

    def forward(
        self, tokens: Tensor, *, positions: range | Tensor | None = None, cache: caches.Cache | None = None
    ) -> Tensor:
        """Return logits of the next token; with a cache, ``tokens`` are the new ones only."""
        if positions is None:
            positions = range(tokens.shape[1]) if cache is None else cache.positions(tokens.shape[1])
        return self.tell(self.decoder(self.embed(tokens, positions), positions=positions, cache=cache))

    def new_cache(self) -> caches.Cache:
        """Return an empty cache for all layers."""
        return self.decoder.new_cache()


def texts(things: Tensor, *, told: bool) -> Tensor:
    """Return the sentences of scenes, padded to 14 tokens by the end token; only start tokens without a sentence."""
    if not told:
        return torch.full((len(things), TEXT), scenes.START)
    said = [scenes.sentence(own) for own in things.tolist()]
    return torch.tensor([own + [scenes.END] * (TEXT - len(own)) for own in said])


def nats(module: Painter, drawn: scenes.Scenes, patches: Patches, *, told: bool) -> Tensor:
    """Return the mean negative log-likelihood of the patches of scenes."""
    wanted = patches.tokens(drawn.images) + WORDS
    tokens = torch.cat([texts(drawn.things, told=told), wanted], 1)
    logits = module(tokens[:, :-1])[:, TEXT - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def run_of(name: str, seed: int, settings: Settings, digits: scenes.Digits, patches: Patches, out: Path) -> study.Run:
    """Return one seed, with sentences or without."""

    def loss(module: Painter, rng: np.random.Generator) -> Tensor:
        return nats(module, scenes.drawn(digits, settings.batch_size, rng), patches, told=name == "told")

    return study.Run(name, seed, lambda: Painter(settings, patches.side), loss, settings, out)


@torch.no_grad()
def bits(module: Painter, drawn: scenes.Scenes, patches: Patches, *, told: bool) -> float:
    """Return bits per patch of scenes."""
    return float(nats(module, drawn, patches, told=told)) / math.log(2)


@torch.no_grad()
def paint(module: Painter, things: Tensor, patches: Patches, temperature: float, *, told: bool) -> Tensor:
    """Draw a scene for each sentence, patch by patch: ``[n, 1, 24, 24]``."""
    start = texts(things, told=told)
    sampler = models.Sampler(temperature=temperature)
    made = torch.tensor(models.generate(module, start, patches.side**2, sampler=sampler, seed=0))
    return patches.images((made - WORDS).clamp(min=0))


@torch.no_grad()
def draw(module: Painter, drawn: scenes.Scenes, patches: Patches, settings: Settings) -> Any:
    """Draw a row for each sentence: its scene in patches, and four generated ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    real = patches.images(patches.tokens(drawn.images))
    made = paint(module, drawn.things.repeat_interleave(4, 0), patches, settings.temperature, told=True)
    count = len(real)
    figure = Figure(figsize=(6.4, 1.45 * count), dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.subplots(count, 5, squeeze=False)
    for row, (axes, things) in enumerate(zip(grid, drawn.things.tolist(), strict=True)):
        for one, image in zip(axes, [real[row], *made[4 * row : 4 * row + 4]], strict=True):
            one.imshow((1 - image[0]).numpy(), cmap="gray", vmin=0, vmax=1)
            one.set(xticks=[], yticks=[])
        axes[0].set_title(scenes.as_text(scenes.sentence(things)), loc="left", size=8)
    grid[0, 0].text(0, -8, "a real scene, and four that were drawn from its sentence", size=9, weight="bold")
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.01, top=0.9, wspace=0.04, hspace=0.28)
    return figure


@torch.no_grad()
def draw_looks(module: Painter, drawn: scenes.Scenes, patches: Patches) -> Any:
    """Draw how much the patches of each quarter attend to each word, the mean over layers and heads."""
    said = texts(drawn.things, told=True)
    tokens = torch.cat([said, patches.tokens(drawn.images) + WORDS], 1)[:, :-1]
    matrices = module.decoder.matrices(module.embed(tokens, range(tokens.shape[1])))
    weights = torch.stack([matrix.to_dense()[0].mean(0) for matrix in matrices]).mean(0)
    # Row i of a matrix belongs to token i, which predicts the next one.
    weights = weights[TEXT - 1 :, :TEXT].reshape(patches.side, patches.side, TEXT)
    half, length = patches.side // 2, len(scenes.sentence(drawn.things[0].tolist()))
    quarters = torch.stack([weights[y : y + half, x : x + half].mean((0, 1)) for y in (0, half) for x in (0, half)])
    places = ["top left", "top right", "bottom left", "bottom right"]
    words = [scenes.TOKENS[token] for token in said[0, :length].tolist()]
    title = "How much patches of each quarter look at each word"
    return viz.heatmap(quarters[:, :length], x_labels=words, y_labels=places, x_name="", y_name="", title=title)


COLUMNS = {"shown read": "digits right", "shown inked": "place and ink right"}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    given = study.parser(__doc__, "out/draw-scenes").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    rng = np.random.default_rng(0)
    patches = Patches.of(scenes.drawn(train, settings.fit_scenes, rng).images, settings.codes)
    reader = Reader(train)
    drawn = scenes.drawn(test, settings.test_scenes, rng, held_out=True)
    names = {"told": "with the sentence", "untold": "without the sentence"}
    runs = {
        name: [run_of(name, seed, settings, train, patches, given.out) for seed in settings.seeds] for name in names
    }
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = []
    for name, own in runs.items():
        told = name == "told"
        found = {str(run.seed): bits(run.module, drawn, patches, told=told) for run in own}
        painted = [paint(run.module, drawn.things, patches, settings.temperature, told=told) for run in own]
        every = torch.cat(painted), drawn.things.repeat(len(own), 1)
        rows.append(study.summary(names[name], found, **reader.shares(*every)))
    counted = patches.tokens(scenes.drawn(train, settings.count_scenes, rng).images).numpy()
    markov, wanted = Markov(counted, patches.side, settings.codes), patches.tokens(drawn.images)
    read = reader.shares(patches.images(markov.paint(len(wanted))), drawn.things)
    rows.append(study.summary("Markov", {"-": markov.bits(wanted.numpy())}, **read))
    read = reader.shares(patches.images(wanted), drawn.things)
    none = dict.fromkeys(("mean", "lowest", "highest"))
    rows.append({"who": "real scenes, in these patches", **none, "knows_more": True, **read})
    module = runs["told"][0].module
    figures = [
        viz.save(draw(module, drawn.first(5), patches, settings), given.out / "scenes.png"),
        viz.save(draw_looks(module, drawn.first(1), patches), given.out / "looks.png"),
    ]
    title = f"bits per patch of {settings.test_scenes:,} held-out scenes"
    how: dict[str, Any] = {"form": "{:.3f}", "figures": figures, "lower_is_better": True}
    study.finish(given.out, title, settings, trained, rows, console=console, **how, **COLUMNS)
    return rows


if __name__ == "__main__":
    main()
