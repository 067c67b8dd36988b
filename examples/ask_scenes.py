"""Question answering on scenes: the words of a question attend to the image.

    python examples/ask_scenes.py

composes scenes of scikit-learn's digits (``scenes.py``), and asks about each: "what stands at the top left?", "what
stands left of the seven?", "how many times three?", "how many are dark?", "is the seven dark or light?", "which is the
largest?". Convolutions make a map of 6x6 tokens; the words of the question are the queries of a decoder with
cross-attention to them. Baselines are the same convolutions with a network on the whole map and the question, without
attention, and the most frequent answer to each question, whatever the image. Three seeds; prints the share of answers
that are right on held-out scenes, by kind of question, and draws what questions attend to. Interrupted runs resume.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import scenes
import sheets
import study
from saccade import masks, nn, positions, viz


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    steps: int = 2000
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    questions: int = 4
    embed_dim: int = 64
    num_heads: int = 4
    num_decoder_layers: int = 2
    channels: int = 32
    test_scenes: int = 1000


QUICK = Settings(steps=6, batch_size=4, warm_up=2, embed_dim=16, channels=8, test_scenes=10, seeds=(0,))

KINDS = ("at a place", "beside", "how many", "how many dark", "dark or light", "largest")
BESIDE = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
INKS = ("light", "dark")
ANSWERS = [*scenes.NAMES, "nothing", *INKS]
WORDS = [
    "<pad>",
    "at",
    *scenes.PLACES,
    "what",
    "stands",
    "how",
    "many",
    "times",
    "are",
    "is",
    "the",
    "which",
    "or",
    "?",
]
WORDS += [*BESIDE, *scenes.NAMES, *INKS, "largest", "smallest"]
WORD_OF = {word: index for index, word in enumerate(WORDS)}
LONGEST = 7


class Question(NamedTuple):
    """A question, its kind and the right answer."""

    kind: int
    words: list[str]
    answer: int


def ask(things: list[int], kind: int, rng: np.random.Generator) -> Question | None:
    """Draw a question of a kind about a scene; None if the answer would be ambiguous."""
    if kind in (1, 4):
        return _ask_of_one(things, kind, rng)
    there = [thing for thing in things if thing != scenes.NOTHING]
    labels = [thing % 10 for thing in there]
    if kind == 0:
        cell = int(rng.integers(scenes.CELLS))
        words, answer = ["what", "stands", "at", "the", scenes.PLACES[cell], "?"], _digit(things[cell])
    elif kind == 2:
        label = int(rng.choice(labels) if rng.random() < 0.7 else rng.integers(10))
        words, answer = ["how", "many", "times", scenes.NAMES[label], "?"], labels.count(label)
    elif kind == 3:
        ink = int(rng.integers(2))
        words, answer = ["how", "many", "are", INKS[ink], "?"], sum(thing // 10 == ink for thing in there)
    else:
        which = int(rng.integers(2))
        words, answer = ["which", "is", "the", ("smallest", "largest")[which], "?"], (min, max)[which](labels)
    return Question(kind, words, answer)


def _ask_of_one(things: list[int], kind: int, rng: np.random.Generator) -> Question | None:
    """Draw a question about a digit that occurs once."""
    labels = [thing % 10 for thing in things if thing != scenes.NOTHING]
    alone = [label for label in labels if labels.count(label) == 1]
    if not alone:
        return None
    label = int(rng.choice(alone))
    cell = next(cell for cell, own in enumerate(things) if own != scenes.NOTHING and own % 10 == label)
    if kind == 4:
        words = ["is", "the", scenes.NAMES[label], "light", "or", "dark", "?"]
        return Question(kind, words, ANSWERS.index(INKS[things[cell] // 10]))
    side = list(BESIDE)[rng.integers(4)]
    row, column = (a + b for a, b in zip(divmod(cell, 2), BESIDE[side], strict=True))
    beside = things[2 * row + column] if row in (0, 1) and column in (0, 1) else scenes.NOTHING
    return Question(kind, ["what", "stands", side, "the", scenes.NAMES[label], "?"], _digit(beside))


def _digit(thing: int) -> int:
    """Return the answer for an object."""
    return ANSWERS.index("nothing") if thing == scenes.NOTHING else thing % 10


def ask_all(things: Tensor, count: int, rng: np.random.Generator) -> list[list[Question]]:
    """Draw a number of questions about each scene, with equal shares of all possible kinds."""
    found = []
    for own in things.tolist():
        kinds = np.resize(rng.permutation(len(KINDS)), count)
        asked = [ask(own, int(kind), rng) or ask(own, int(rng.choice([0, 2, 3, 5])), rng) for kind in kinds]
        found.append([question for question in asked if question is not None])
    return found


class Words(NamedTuple):
    """A batch of questions: words ``[n, 7]``, and the length of each."""

    tokens: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, questions: list[Question]) -> Words:
        """Return the words of questions, padded to the longest possible question."""
        rows = [[WORD_OF[word] for word in own.words] for own in questions]
        return cls(torch.tensor([own + [0] * (LONGEST - len(own)) for own in rows]), [len(own) for own in rows])


class Asker(torch.nn.Module):
    """A model whose words attend to each other and to the cells of the image; their average gives the answer."""

    def __init__(self, settings: Settings):
        super().__init__()
        width, heads = settings.embed_dim, settings.num_heads
        self.see = scenes.Cells(settings.channels, width, heads)
        self.embedding, self.place = torch.nn.Embedding(len(WORDS), width), positions.Learned(LONGEST, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.5)

        def layer() -> nn.DecoderLayer:
            own, across = nn.MultiHeadAttention(width, heads), nn.MultiHeadAttention(width, heads)
            return nn.DecoderLayer(own, nn.FeedForward(width, 2 * width), cross_attention=across)

        layers = [layer() for _ in range(settings.num_decoder_layers)]
        self.read = nn.DecoderStack(layers, final_norm=torch.nn.LayerNorm(width))
        self.pool = nn.AttentionPool(width)
        self.answer = torch.nn.Linear(width, len(ANSWERS))

    def forward(self, images: Tensor, words: Words) -> Tensor:
        """Return logits of the answers, ``[questions, answers]``; each image has the same number of questions."""
        seen = self.see(images).repeat_interleave(len(words.tokens) // len(images), 0)
        mask = masks.Padding(words.lengths)
        return self.answer(self.pool(self.read(self.embed(words), seen, mask=mask), mask=mask))

    def embed(self, words: Words) -> Tensor:
        """Return the embeddings of words with their positions."""
        return self.embedding(words.tokens) + self.place(range(LONGEST))


class Joined(torch.nn.Module):
    """A baseline without attention: image and question as one vector each, joined by a network."""

    def __init__(self, settings: Settings):
        super().__init__()
        width, channels = settings.embed_dim, settings.channels
        self.see = torch.nn.Sequential(scenes.Seer(channels), torch.nn.Flatten())
        # One vector per word and position: each kind of question has a fixed form.
        self.embedding = torch.nn.Embedding(LONGEST * len(WORDS), width)
        sizes = (36 * channels + width, 256, 256)
        hidden = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        self.answer = torch.nn.Sequential(*hidden, torch.nn.Linear(256, len(ANSWERS)))

    def forward(self, images: Tensor, words: Words) -> Tensor:
        """Return logits as `Asker.forward` does."""
        seen = self.see(images).repeat_interleave(len(words.tokens) // len(images), 0)
        asked = self.embedding(words.tokens + len(WORDS) * torch.arange(LONGEST)).sum(1)
        return self.answer(torch.cat([seen, asked], -1))


MODELS = {
    "look": ("the question looks", Asker),
    "joined": ("convolutions, and an MLP", Joined),
}


def run_of(name: str, seed: int, settings: Settings, digits: scenes.Digits, out: Path) -> study.Run:
    """Return one seed of one model."""

    def loss(module: torch.nn.Module, rng: np.random.Generator) -> Tensor:
        drawn = scenes.drawn(digits, settings.batch_size, rng)
        questions = [own for asked in ask_all(drawn.things, settings.questions, rng) for own in asked]
        answers = torch.tensor([own.answer for own in questions])
        return F.cross_entropy(module(drawn.images, Words.of(questions)), answers)

    return study.Run(name, seed, lambda: MODELS[name][1](settings), loss, settings, out)


@torch.no_grad()
def answered(module: torch.nn.Module, images: Tensor, asked: list[list[Question]]) -> list[int]:
    """Return the likeliest answer to each question."""
    found = []
    for start in range(0, len(images), 100):
        questions = [own for questions in asked[start : start + 100] for own in questions]
        found += module(images[start : start + 100], Words.of(questions)).argmax(-1).tolist()
    return found


def most_frequent(settings: Settings, questions: list[Question]) -> list[int]:
    """Return the most frequent answer in training to the same question: the best that ignores the image."""
    rng = np.random.default_rng(1)
    counts: dict[tuple[str, ...], collections.Counter[int]] = collections.defaultdict(collections.Counter)
    things = torch.from_numpy(scenes.draw_things(20 * settings.test_scenes, rng, held_out=False))
    for asked in ask_all(things, settings.questions, rng):
        for own in asked:
            counts[tuple(own.words)][own.answer] += 1
    return [max(counts[tuple(own.words)].items(), key=lambda item: item[1], default=(0, 0))[0] for own in questions]


def summarise(who: str, by_seed: dict[str, list[int]], questions: list[Question]) -> dict[str, Any]:
    """Return one row: the share of right answers, over seeds and by kind of question."""
    right = {seed: np.array(said) == [own.answer for own in questions] for seed, said in by_seed.items()}
    kinds = np.array([own.kind for own in questions])
    every = np.mean(list(right.values()), 0)
    shares = {f"kind {kind}": float(every[kinds == kind].mean()) for kind in range(len(KINDS)) if kind in kinds}
    return study.summary(who, {seed: float(own.mean()) for seed, own in right.items()}, **shares)


@torch.no_grad()
def draw(module: Asker, image: Tensor, questions: list[Question]) -> Any:
    """Draw which cells the words of each question attend to (mean of the words, heads and layers)."""
    panels = []
    for own in sorted(questions):
        words = Words.of([own])
        seen, mask = module.see(image[None]), masks.Padding(words.lengths)
        across = module.read.cross_matrices(module.embed(words), seen, mask=mask)
        weights = torch.stack([matrix.to_dense()[0, :, : len(own.words)] for matrix in across]).mean((0, 1, 2))
        said = ANSWERS[int(module(image[None], words).argmax())]
        panels.append(sheets.panel(image, weights.reshape(6, 6), f"{' '.join(own.words[:-1])}? {said}"))
    title = "What each question looks at, and its answer (mean of words, heads and layers)"
    return sheets.sheet([panels[:3], panels[3:]], title=title)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    given = study.parser(__doc__, "out/ask-scenes").parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = scenes.load()
    rng = np.random.default_rng(0)
    drawn = scenes.drawn(test, settings.test_scenes, rng, held_out=True)
    asked = ask_all(drawn.things, len(KINDS), rng)
    questions = [own for each in asked for own in each]
    runs = {name: [run_of(name, seed, settings, train, given.out) for seed in settings.seeds] for name in MODELS}
    trained = [run for own in runs.values() for run in own]
    study.train_all(trained, console)
    rows = [
        summarise(MODELS[name][0], {str(run.seed): answered(run.module, drawn.images, asked) for run in own}, questions)
        for name, own in runs.items()
    ]
    rows.append(summarise("the most frequent answer", {"-": most_frequent(settings, questions)}, questions))
    figure = viz.save(draw(runs["look"][0].module, drawn.images[0], asked[0]), given.out / "looks.png")
    title = f"right answers to {len(questions):,} questions about held-out scenes"
    kinds = {f"kind {kind}": name for kind, name in enumerate(KINDS)}
    study.finish(given.out, title, settings, trained, rows, console=console, figures=[figure], **kinds)
    return rows


if __name__ == "__main__":
    main()
