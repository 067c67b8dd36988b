"""One layer of self-attention, pooled, says whether a sentence of a film review is for or against the film.

    python examples/classify_sentences.py

10,604 sentences of film reviews, each rated by twenty people (Hutto and Gilbert 2014), are fetched from PyPI. A fifth
is held out. Words go through one self-attention layer, a learned query pools them, and a line decides. Beside it stand
the same without attention (the mean of the words), logistic regression on bags of words and pairs, and the more
frequent answer. Three seeds, a minute each; prints the share of held-out sentences that are judged right, and draws
what the pool, and the words among each other, look at in one of them. A run that is stopped goes on.

Needs ``pip install 'saccade[all]' scikit-learn``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import fetching
import study
from saccade import masks, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """Everything that decides a run's numbers."""

    steps: int = 1500
    embed_dim: int = 64
    num_heads: int = 4
    dropout_p: float = 0.3
    most_words: int = 48
    least_count: int = 2
    held_out: int = 5


QUICK = Settings(steps=30, warm_up=5, embed_dim=16, seeds=(0,))
UNKNOWN = 0


class Sentences(NamedTuple):
    """Sentences as words, and whether each is for the film."""

    words: list[list[str]]
    is_for: np.ndarray

    def split(self, every: int) -> tuple[Sentences, Sentences]:
        """Those to learn from, and every so many-th that is held out."""
        out = np.arange(len(self.words)) % every == 0
        return tuple(
            Sentences([w for w, one in zip(self.words, own, strict=True) if one], self.is_for[own])
            for own in (~out, out)
        )


def load(settings: Settings, path: Path | None = None) -> Sentences:
    """The sentences in an order that says nothing, without those that nobody is for or against."""
    data = (
        path.read_bytes()
        if path
        else fetching.member(
            fetching.fetched(fetching.VADER), "hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt"
        )
    )
    found = [line.split("\t") for line in data.decode("utf-8", "replace").splitlines()]
    rated = [(float(rating), text) for _, rating, text in found if float(rating)]
    order = np.random.default_rng(0).permutation(len(rated))
    words = [re.findall(r"[a-z]+(?:'[a-z]+)?|[^\w\s]", rated[i][1].lower())[: settings.most_words] for i in order]
    kept = [i for i, own in enumerate(words) if own]
    return Sentences([words[i] for i in kept], np.array([rated[order[i]][0] > 0 for i in kept]))


def vocabulary(sentences: Sentences, settings: Settings) -> dict[str, int]:
    """A number for each word that is frequent enough; all others share number 0."""
    counts = collections.Counter(word for words in sentences.words for word in words)
    known = sorted(word for word, count in counts.items() if count >= settings.least_count)
    return {word: 1 + index for index, word in enumerate(known)}


class Classifier(torch.nn.Module):
    """Words, one layer of self-attention (or none), a pool, and a decision."""

    def __init__(self, num_words: int, settings: Settings, *, attends: bool):
        super().__init__()
        width = settings.embed_dim
        self.embedding = torch.nn.Embedding(1 + num_words, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.place = positions.Learned(settings.most_words, width)
        self.dropout = torch.nn.Dropout(settings.dropout_p)
        self.block = nn.AttentionBlock(width, settings.num_heads, dropout_p=settings.dropout_p) if attends else None
        self.pool = nn.AttentionPool(width) if attends else None
        self.decide = torch.nn.Linear(width, 1)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """The logit of each sentence being for its film, ``[batch]``."""
        x, mask = self.dropout(self.embedding(tokens)), masks.Padding(lengths)
        if self.block is None or self.pool is None:
            real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
            return self.decide((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))[:, 0]
        x = self.block(x + self.place(range(tokens.shape[1])), mask=mask)
        return self.decide(self.dropout(self.pool(x, mask=mask)))[:, 0]


def batch_of(words: list[list[str]], known: dict[str, int]) -> tuple[Tensor, list[int]]:
    """Numbers ``[batch, longest]``, and how many words each sentence has."""
    lengths = [len(own) for own in words]
    rows = [[known.get(word, UNKNOWN) for word in own] + [UNKNOWN] * (max(lengths) - len(own)) for own in words]
    return torch.tensor(rows), lengths


def run_of(name: str, seed: int, settings: Settings, train: Sentences, known: dict[str, int], out: Path) -> study.Run:
    """One seed of the classifier with attention, or without."""

    def loss(module: Classifier, rng: np.random.Generator) -> Tensor:
        chosen = rng.integers(len(train.words), size=settings.batch_size)
        logits = module(*batch_of([train.words[i] for i in chosen], known))
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(train.is_for[chosen]).to(logits))

    return study.Run(
        name, seed, lambda: Classifier(len(known), settings, attends=name == "attention"), loss, settings, out
    )


@torch.no_grad()
def accuracy(module: Classifier, sentences: Sentences, known: dict[str, int]) -> float:
    """The share that is judged right."""
    right = 0
    for start in range(0, len(sentences.words), 256):
        own = slice(start, start + 256)
        said = module(*batch_of(sentences.words[own], known)) > 0
        right += int((said.numpy() == sentences.is_for[own]).sum())
    return right / len(sentences.words)


def baselines(train: Sentences, test: Sentences) -> dict[str, float]:
    """Logistic regression on which words and pairs of words are there, and the more frequent answer."""
    from sklearn.feature_extraction.text import CountVectorizer  # noqa: PLC0415  a second that --help need not wait for
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    bags = CountVectorizer(analyzer=lambda words: [*words, *map(" ".join, itertools.pairwise(words))], binary=True)
    line = LogisticRegression(C=0.3, max_iter=1000).fit(bags.fit_transform(train.words), train.is_for)
    often = train.is_for.mean() > 0.5
    return {
        "logistic regression, words and pairs": float(line.score(bags.transform(test.words), test.is_for)),
        "the more frequent answer": float((test.is_for == often).mean()),
    }


@torch.no_grad()
def draw(module: Classifier, words: list[str], known: dict[str, int]) -> Any:
    """What the pool looks at (the last row), and what each word looks at (mean of the heads)."""
    assert module.block is not None
    assert module.pool is not None
    tokens, _ = batch_of([words], known)
    x = module.embedding(tokens) + module.place(range(len(words)))
    among = module.block.matrix(x).to_dense()[0].mean(0)
    pooled = module.pool.matrix(module.block(x)).to_dense()[0, 0]
    return viz.heatmap(torch.cat([among, pooled]), x_labels=words, y_labels=[*words, "the pool"])


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure, write; returns the rows of the table."""
    parser = study.parser(__doc__, "out/sentences")
    parser.add_argument("--data", type=Path, help="a file of lines: id, rating and sentence, with tabs between")
    parser.add_argument("--sentence", default="an overlong but never dull film that is not without charm")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = load(settings, given.data).split(settings.held_out)
    known = vocabulary(train, settings)
    runs = {
        name: [run_of(name, seed, settings, train, known, given.out) for seed in settings.seeds]
        for name in ("attention", "mean")
    }
    study.train_all([run for own in runs.values() for run in own], console)
    said = {"attention": "one layer of self-attention, pooled", "mean": "the mean of the words"}
    rows = [
        study.summary(said[name], {str(run.seed): accuracy(run.module, test, known) for run in own})
        for name, own in runs.items()
    ]
    rows += [study.summary(name, {"-": share}) for name, share in baselines(train, test).items()]
    words = re.findall(r"[a-z]+(?:'[a-z]+)?|[^\w\s]", given.sentence.lower())[: settings.most_words]
    figure = viz.save(draw(runs["attention"][0].module, words, known), given.out / "looks.png")
    title = f"{len(test.words):,} held-out sentences that are judged right"
    trained = [run for own in runs.values() for run in own]
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure])
    return rows


if __name__ == "__main__":
    main()
