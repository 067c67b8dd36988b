"""Contacts of residues in a folded chain, from an alignment, by attention over rows, columns and triangles.

    python examples/find_contacts.py

Folds are planted (``planted_folds.py``): a family's columns vary together where its residues touch, and also because
its sequences are related. An alignment goes through attention within rows and within columns; how its columns vary
together makes pairs, which attend to the pairs that they share a residue with: if i touches k and k touches j, then i
and j are near. Every test family has a fold that no training family has. Baselines are the same without triangles (as
many weights), mutual information, two inverse covariances (direct coupling analysis), a logistic regression on all of
these, and the frequency of contacts at each distance along the chain. Three seeds; prints the share of contacts among
the best L/2 pairs at least 6 residues apart, and draws a map, and what one pair attends to.

Learned methods have an advantage over inverse covariances: half of each coupling is the same in all families, like
chemistry. The regression learns that, too, and is as good as rows and columns; triangles are better (73 % of the pairs
touch, against 67 %, and 49 % with the best inverse covariance).

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

import contact_baselines
import planted_folds
import study
from planted_folds import APART, LETTERS, Families
from saccade import nn, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 500
    batch_size: int = 4
    learning_rate: float = 5e-3
    residues: int = 32
    doublings: int = 6
    embed_dim: int = 16
    pair_dim: int = 32
    num_heads: int = 2
    num_blocks: int = 2
    outer_dim: int = 8
    train_families: int = 1200
    test_families: int = 200


QUICK = Settings(
    steps=6,
    warm_up=2,
    residues=16,
    doublings=3,
    embed_dim=8,
    pair_dim=8,
    num_heads=2,
    num_blocks=1,
    train_families=20,
    test_families=10,
    seeds=(0,),
)
MODELS = {"triangles": "rows, columns and triangles", "rows": "rows and columns, as many weights"}


class Outer(torch.nn.Module):
    """The covariance of the representations of two columns over the rows, and a linear layer."""

    def __init__(self, embed_dim: int, outer_dim: int, pair_dim: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(embed_dim)
        self.left, self.right = (torch.nn.Linear(embed_dim, outer_dim) for _ in range(2))
        self.out = torch.nn.Linear(outer_dim**2, pair_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[batch, columns, columns, pair_dim]`` of ``[batch, rows, columns, embed_dim]``."""
        x = self.norm(x)
        left, right = (own - own.mean(1, keepdim=True) for own in (self.left(x), self.right(x)))
        together = torch.einsum("bric,brjd->bijcd", left, right) / x.shape[1]
        return self.out(together.flatten(3))


def transition(width: int, hidden: int) -> torch.nn.Module:
    """Build a norm and a feed-forward network for each token."""
    return torch.nn.Sequential(torch.nn.LayerNorm(width), nn.FeedForward(width, hidden))


class Block(torch.nn.Module):
    """One exchange between an alignment and its pairs."""

    def __init__(self, settings: Settings, *, has_triangles: bool):
        super().__init__()
        width, pair, heads = settings.embed_dim, settings.pair_dim, settings.num_heads
        self.rows, self.columns = nn.RowAttention(width, heads, pair_dim=pair), nn.ColumnAttention(width, heads)
        self.alignment_transition = transition(width, 2 * width)
        self.outer = Outer(width, settings.outer_dim, pair)
        around = ("start", "end") if has_triangles else ()
        self.triangles = torch.nn.ModuleList([nn.TriangleAttention(pair, heads, around=own) for own in around])
        # Without triangles their parameters, about 5 squares of the width each, go to the network after them.
        hidden = 2 * pair if has_triangles else 7 * pair + heads
        self.pair_transition = transition(pair, hidden)

    def forward(self, alignment: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Update ``[batch, rows, columns, embed_dim]`` and ``[batch, columns, columns, pair_dim]``."""
        alignment, pairs = self.read(alignment, pairs)
        for triangle in self.triangles:
            pairs = pairs + triangle(pairs)
        return alignment, pairs + self.pair_transition(pairs)

    def read(self, alignment: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Update the alignment, and the pairs from it, before triangle attention."""
        alignment = alignment + self.rows(alignment, pairs)
        alignment = alignment + self.columns(alignment)
        alignment = alignment + self.alignment_transition(alignment)
        return alignment, pairs + self.outer(alignment)


class Reader(torch.nn.Module):
    """A model that predicts contacts from an alignment."""

    def __init__(self, settings: Settings, *, has_triangles: bool):
        super().__init__()
        self.letter = torch.nn.Embedding(LETTERS, settings.embed_dim)
        self.apart = torch.nn.Embedding(settings.residues, settings.pair_dim)
        own = [Block(settings, has_triangles=has_triangles) for _ in range(settings.num_blocks)]
        self.blocks = torch.nn.ModuleList(own)
        self.say = torch.nn.Sequential(torch.nn.LayerNorm(settings.pair_dim), torch.nn.Linear(settings.pair_dim, 1))

    def forward(self, letters: Tensor) -> Tensor:
        """Return symmetric logits ``[batch, columns, columns]`` of ``[batch, rows, columns]``."""
        alignment, pairs = self.start(letters)
        for block in self.blocks:
            alignment, pairs = block(alignment, pairs)
        logits = self.say(pairs)[..., 0]
        return (logits + logits.transpose(1, 2)) / 2

    def start(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Embed letters, and the distance of each pair along the chain."""
        place = torch.arange(letters.shape[2])
        pairs = self.apart((place[:, None] - place).abs())
        return self.letter(letters), pairs.expand(len(letters), -1, -1, -1)


def load(settings: Settings) -> tuple[Families, Families, Families]:
    """Load families for training, for settings and for testing; each has another fold."""
    counts = (settings.train_families, settings.test_families // 2, settings.test_families)
    return tuple(
        planted_folds.families(range(10**6 * part, 10**6 * part + count), settings.residues, settings.doublings)
        for part, count in enumerate(counts)
    )


def run_of(name: str, seed: int, settings: Settings, families: Families, out: Path) -> study.Run:
    """Return one seed of a model, which learns from pairs with a minimal distance along the chain."""
    i, j = torch.triu_indices(settings.residues, settings.residues, APART)

    def loss(module: Reader, rng: np.random.Generator) -> Tensor:
        chosen = torch.from_numpy(rng.integers(len(families.letters), size=settings.batch_size))
        logits = module(families.letters[chosen])
        return F.binary_cross_entropy_with_logits(logits[:, i, j], families.touches[chosen][:, i, j].float())

    return study.Run(name, seed, lambda: Reader(settings, has_triangles=name == "triangles"), loss, settings, out)


@torch.no_grad()
def maps(module: Reader, letters: Tensor) -> list[Tensor]:
    """Return the predictions of a model for each family, ``[residues, residues]``."""
    return [own for part in letters.split(10) for own in module(part)]


def row_of(who: str, by_seed: dict[str, list[Tensor]], families: Families) -> dict[str, Any]:
    """Return one row: the precision of the best L/2 pairs, and of the best L."""
    length = families.letters.shape[2]
    of = {
        count: {seed: contact_baselines.mean_precision(own, families.touches, count) for seed, own in by_seed.items()}
        for count in (length // 2, length)
    }
    return study.summary(who, of[length // 2], best_l=float(np.mean(list(of[length].values()))))


@torch.no_grad()
def looks(module: Reader, letters: Tensor) -> dict[str, Tensor]:
    """Return the attention of pairs of one family in the last block: ``[heads, i, j, k]`` for both triangles.

    Around the start, the pair (i, j) attends to the pair (i, k); around the end, to the pair (k, j).
    """
    alignment, pairs = module.start(letters[None])
    for block in module.blocks[:-1]:
        alignment, pairs = block(alignment, pairs)
    _, pairs = module.blocks[-1].read(alignment, pairs)
    start, end = module.blocks[-1].triangles
    return {
        "start": start.matrix(pairs).to_dense().transpose(0, 1),
        "end": end.matrix(pairs + start(pairs)).to_dense().permute(1, 2, 0, 3),
    }


def draw(module: Reader, letters: Tensor, touches: Tensor) -> tuple[Any, Any]:
    """Draw the map of one family, and what the most confident pair attends to."""
    length = len(touches)
    said = torch.sigmoid(maps(module, letters[None])[0])
    apart = torch.arange(length) - torch.arange(length)[:, None]
    both = torch.where(apart > 0, said, touches.to(said)).masked_fill(apart.abs() < APART, torch.nan)
    title = "above: predicted contacts; below: the planted fold"
    page = viz.heatmap(
        both, title=title, x_name="residue", y_name="residue", limits=(0.0, 1.0), scale_name="probability"
    )

    i, j = divmod(int(torch.where((apart >= APART) & touches, said, 0).argmax()), length)
    names, weights = [], []
    for around, found in looks(module, letters).items():
        for head, own in enumerate(found):
            names.append(f"({i}, k), head {head + 1}" if around == "start" else f"(k, {j}), head {head + 1}")
            weights.append(own[i, j])
    most = max(float(own.max()) for own in weights)
    for own in (i, j):
        names.append(f"k touches {own}")
        weights.append(touches[own] * most)
    title = f"what the pair ({i}, {j}), which touches, looks at in the last triangles; last rows: the planted fold"
    numbers = [str(k) for k in range(length)]
    return page, viz.heatmap(torch.stack(weights), x_labels=numbers, y_labels=names, title=title, x_name="k", y_name="")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/contacts")
    parser.add_argument("--family", type=int, default=0, help="the test family of the figures (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    if not 0 <= given.family < settings.test_families:
        parser.error(f"--family must be at least 0 and below {settings.test_families}; got {given.family}.")
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, chosen_by, test = load(settings)
    runs = {name: [run_of(name, seed, settings, train, given.out) for seed in settings.seeds] for name in MODELS}
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)

    found = {MODELS[name]: {str(run.seed): maps(run.module, test.letters) for run in own} for name, own in runs.items()}
    some = Families(train.letters[:300], train.touches[:300])  # a regression on 100 is as good as one on 600
    found |= {name: {"-": own} for name, own in contact_baselines.all_of(some, chosen_by, test).items()}
    rows = [row_of(who, own, test) for who, own in found.items()]
    pages = draw(runs["triangles"][0].module, test.letters[given.family], test.touches[given.family])
    figures = [viz.save(page, given.out / name) for page, name in zip(pages, ("map.png", "looks.png"), strict=True)]
    title = f"contacts among the best {settings.residues // 2} pairs of {settings.test_families} unseen folds"
    heading = f"best {settings.residues}"
    study.finish(given.out, title, settings, trained, rows, console=console, figures=figures, best_l=heading)
    return rows


if __name__ == "__main__":
    main()
