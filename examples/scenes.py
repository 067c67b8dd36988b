"""Scenes of handwritten digits, dark or light, two to four of them in a square of four cells; and what they show.

A digit stands anywhere in its cell, and is anyone's hand. A sentence says all that there is to say of a scene but that:
``top left dark seven, bottom left light three``. Every tenth such sentence is held out, and so are the
pictures of 500 digits: nothing of what a scene of the test shows was seen in training, neither its digits nor all of
them together.

Needs ``pip install scikit-learn``.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade import models, nn, positions

SIDE, CELL, CANVAS = 8, 12, 24  # of a digit, of a cell and of a scene, in pixels
CELLS = 4  # as PLACES
LIGHT = 0.5  # the ink of a light digit, where that of a dark one is 1
NOTHING = 20  # what stands in an empty cell; below 10 a light digit, from 10 on a dark one

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PLACES = ["top left", "top right", "bottom left", "bottom right"]
TOKENS = ["<start>", "<end>", *PLACES, "light", "dark", *NAMES]
TOKEN_OF = {token: index for index, token in enumerate(TOKENS)}
START, END = TOKEN_OF["<start>"], TOKEN_OF["<end>"]
LONGEST = 13  # four places, inks and digits, and the end


class Digits(NamedTuple):
    """Single digits: pictures ``[n, 8, 8]`` between 0 and 1, and what they are."""

    images: np.ndarray
    labels: np.ndarray

    def flat(self) -> np.ndarray:
        """``[n, 64]``, as classifiers want them."""
        return self.images.reshape(len(self.images), -1)


class Scenes(NamedTuple):
    """Scenes, and what they show.

    Attributes:
        images: ``[n, 1, 24, 24]``, paper 0, ink up to 1.
        things: int64 ``[n, 4]``, what stands in each cell: a digit, 10 more where it is dark, or `NOTHING`.
        boxes: float ``[n, 4, 4]``, around the ink of each: x and y of the middle, width and height, as parts of 24.
        which: int64 ``[n, 4]``, the picture that each was drawn with; -1 where nothing stands.
    """

    images: Tensor
    things: Tensor
    boxes: Tensor
    which: Tensor

    def first(self, count: int) -> Scenes:
        """The first so many."""
        return Scenes(*(own[:count] for own in self))

    def sentences(self) -> list[list[int]]:
        """What each shows, in tokens, the start and the end among them."""
        return [sentence(own) for own in self.things.tolist()]


@functools.cache
def load(train_digits: int = 1297) -> tuple[Digits, Digits]:
    """scikit-learn's digits to train with and to test with; no picture is in both."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  a second of import that --help need not wait for
        from sklearn.model_selection import train_test_split  # noqa: PLC0415
    except ModuleNotFoundError:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    how = {"train_size": train_digits, "test_size": 500, "stratify": data.target, "random_state": 0}
    split = train_test_split(data.images.astype(np.float32) / 16, data.target, **how)
    return Digits(split[0], split[2]), Digits(split[1], split[3])


def is_held_out(things: np.ndarray) -> np.ndarray:
    """Every tenth scene, scattered by a product: none in training, no others in testing; bool ``[n]``."""
    return things @ 21 ** np.arange(CELLS) * 7919 % 9973 % 10 == 0


def draw_things(count: int, rng: np.random.Generator, *, held_out: bool) -> np.ndarray:
    """Two, three or four things, each as often, in any cells: ``[count, 4]``, held out or not."""
    found = np.empty((0, CELLS), np.int64)
    while len(found) < count:
        drawn = rng.integers(0, NOTHING, (count, CELLS))
        place = rng.random((count, CELLS)).argsort(1)
        drawn[place >= rng.integers(2, CELLS + 1, (count, 1))] = NOTHING
        found = np.concatenate([found, drawn[is_held_out(drawn) == held_out]])
    return found[:count]


def compose(digits: Digits, things: np.ndarray, rng: np.random.Generator) -> Scenes:
    """Draw each thing with a digit of anyone's hand, anywhere in its cell."""
    images = np.zeros((len(things), CANVAS, CANVAS), np.float32)
    boxes = np.zeros((len(things), CELLS, 4), np.float32)
    which = np.full(things.shape, -1)
    by_label = [np.flatnonzero(digits.labels == label) for label in range(10)]
    shift = rng.integers(0, CELL - SIDE + 1, (len(things), CELLS, 2))
    pick = rng.random((len(things), CELLS))
    for scene, cell in zip(*np.nonzero(things != NOTHING), strict=True):
        dark, label = divmod(int(things[scene, cell]), 10)
        own = by_label[label]
        which[scene, cell] = own[int(pick[scene, cell] * len(own))]
        digit = digits.images[which[scene, cell]]
        top, left = np.array(divmod(int(cell), 2)) * CELL + shift[scene, cell]
        images[scene, top : top + SIDE, left : left + SIDE] = digit * (1 if dark else LIGHT)
        y, x = (np.flatnonzero(digit.any(axis)) + first for axis, first in ((1, top), (0, left)))
        middle = (x[0] + x[-1] + 1) / 2, (y[0] + y[-1] + 1) / 2
        boxes[scene, cell] = np.array([*middle, x[-1] + 1 - x[0], y[-1] + 1 - y[0]]) / CANVAS
    return Scenes(torch.from_numpy(images[:, None]), *(torch.from_numpy(own) for own in (things, boxes, which)))


def drawn(digits: Digits, count: int, rng: np.random.Generator, *, held_out: bool = False) -> Scenes:
    """Scenes anew: what they show, and how it is drawn."""
    return compose(digits, draw_things(count, rng, held_out=held_out), rng)


def sentence(things: list[int]) -> list[int]:
    """The one sentence that says what stands where, in tokens: place, ink and digit of each."""
    said = [
        token
        for place, thing in zip(PLACES, things, strict=True)
        if thing != NOTHING
        for token in (place, ("light", "dark")[thing // 10], NAMES[thing % 10])
    ]
    return [TOKEN_OF[token] for token in ("<start>", *said, "<end>")]


def as_text(tokens: list[int]) -> str:
    """A sentence as one writes it."""
    words = [TOKENS[token] for token in tokens if token not in (START, END)]
    return ", ".join(" ".join(words[first : first + 3]) for first in range(0, len(words), 3))


def padded(rows: list[list[int]], fill: int = -1) -> Tensor:
    """Rows of tokens of any lengths as int64 ``[rows, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([own + [fill] * (longest - len(own)) for own in rows])


class Seer(torch.nn.Sequential):
    """Convolutions that make a feature map of a scene, ``[n, channels, 6, 6]``: peers see by it, and DETR begins so."""

    def __init__(self, channels: int):
        sizes = (1, channels // 2, channels, channels, channels)
        parts: list[torch.nn.Module] = []
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            conv = torch.nn.Conv2d(inputs, outputs, 3, padding=1, stride=2 if index in (1, 3) else 1, bias=False)
            parts += [conv, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
        super().__init__(*parts)


def start_larger(model: models.VisionTransformer) -> models.VisionTransformer:
    """Start a small Vision Transformer so that it learns in hundreds of steps, not in thousands.

    What a patch shows, and where it stands, are to weigh about as much as what the layers add to it; the weights that
    large ones start from are far smaller.
    """
    model.patch.reset_parameters()
    for table in (model.class_token, model.position):
        if table is not None:
            torch.nn.init.normal_(table.weight, std=0.5)
    return model


class Cells(torch.nn.Module):
    """What attention looks at: a token for each cell of such a map, which know of each other by an encoder layer."""

    def __init__(self, channels: int, embed_dim: int, num_heads: int):
        super().__init__()
        self.see, self.project = Seer(channels), torch.nn.Linear(channels, embed_dim)
        self.place = positions.Learned(36, embed_dim)
        torch.nn.init.normal_(self.place.weight, std=0.5)
        attention, forward = nn.MultiHeadAttention(embed_dim, num_heads), nn.FeedForward(embed_dim, 2 * embed_dim)
        self.among = nn.EncoderStack([nn.EncoderLayer(attention, forward)], final_norm=torch.nn.LayerNorm(embed_dim))

    def forward(self, images: Tensor) -> Tensor:
        """``[n, 36, embed_dim]``, row by row."""
        return self.among(self.project(self.see(images).flatten(2).mT) + self.place(range(36)))
