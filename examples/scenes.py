"""Scenes of handwritten digits, dark or light, two to four of them in a square of four cells, with descriptions.

A digit of any writer is anywhere in its cell. A sentence describes everything else of a scene:
``top left dark seven, bottom left light three``. Every tenth such sentence is held out, and so are the
images of 500 digits: nothing of what a scene of the test shows was seen in training, neither its digits nor all of
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

SIDE, CELL, CANVAS = 8, 12, 24  # sides of a digit, of a cell and of a scene, in pixels
CELLS = 4  # as PLACES
LIGHT = 0.5  # the ink of a light digit; that of a dark one is 1
NOTHING = 20  # an empty cell; light digits are below 10, dark ones from 10 on

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PLACES = ["top left", "top right", "bottom left", "bottom right"]
TOKENS = ["<start>", "<end>", *PLACES, "light", "dark", *NAMES]
TOKEN_OF = {token: index for index, token in enumerate(TOKENS)}
START, END = TOKEN_OF["<start>"], TOKEN_OF["<end>"]
LONGEST = 13  # four places, inks and digits, and the end


class Digits(NamedTuple):
    """Single digits: images ``[n, 8, 8]`` between 0 and 1, and their classes."""

    images: np.ndarray
    labels: np.ndarray

    def flat(self) -> np.ndarray:
        """Return ``[n, 64]``, for classifiers."""
        return self.images.reshape(len(self.images), -1)


class Scenes(NamedTuple):
    """Scenes and their objects.

    Attributes:
        images: ``[n, 1, 24, 24]``, paper 0, ink up to 1.
        things: int64 ``[n, 4]``, the object of each cell: a digit, plus 10 if it is dark, or `NOTHING`.
        boxes: float ``[n, 4, 4]``, around the ink of each: x and y of the centre, width and height, as fractions of 24.
        which: int64 ``[n, 4]``, index of the digit's image; -1 for an empty cell.
    """

    images: Tensor
    things: Tensor
    boxes: Tensor
    which: Tensor

    def first(self, count: int) -> Scenes:
        """Return the first n scenes."""
        return Scenes(*(own[:count] for own in self))

    def sentences(self) -> list[list[int]]:
        """Return the description of each scene in tokens, including start and end."""
        return [sentence(own) for own in self.things.tolist()]


@functools.cache
def load(train_digits: int = 1297) -> tuple[Digits, Digits]:
    """Load scikit-learn's digits for training and for testing, without common images."""
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
    """Return whether a scene is in the test set: every tenth, scattered by a product; bool ``[n]``."""
    return things @ 21 ** np.arange(CELLS) * 7919 % 9973 % 10 == 0


def draw_things(count: int, rng: np.random.Generator, *, held_out: bool) -> np.ndarray:
    """Draw two, three or four objects, equally often, in any cells: ``[count, 4]``, held out or not."""
    found = np.empty((0, CELLS), np.int64)
    while len(found) < count:
        drawn = rng.integers(0, NOTHING, (count, CELLS))
        place = rng.random((count, CELLS)).argsort(1)
        drawn[place >= rng.integers(2, CELLS + 1, (count, 1))] = NOTHING
        found = np.concatenate([found, drawn[is_held_out(drawn) == held_out]])
    return found[:count]


def compose(digits: Digits, things: np.ndarray, rng: np.random.Generator) -> Scenes:
    """Draw each object with a digit of a random writer, at a random position in its cell."""
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
    """Draw new scenes: their objects and their images."""
    return compose(digits, draw_things(count, rng, held_out=held_out), rng)


def sentence(things: list[int]) -> list[int]:
    """Return the one sentence that describes a scene, in tokens: position, ink and digit of each object."""
    said = [
        token
        for place, thing in zip(PLACES, things, strict=True)
        if thing != NOTHING
        for token in (place, ("light", "dark")[thing // 10], NAMES[thing % 10])
    ]
    return [TOKEN_OF[token] for token in ("<start>", *said, "<end>")]


def as_text(tokens: list[int]) -> str:
    """Return a sentence in normal spelling."""
    words = [TOKENS[token] for token in tokens if token not in (START, END)]
    return ", ".join(" ".join(words[first : first + 3]) for first in range(0, len(words), 3))


def padded(rows: list[list[int]], fill: int = -1) -> Tensor:
    """Return rows of tokens of any lengths as int64 ``[rows, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([own + [fill] * (longest - len(own)) for own in rows])


class Seer(torch.nn.Sequential):
    """Convolutions from a scene to a feature map, ``[n, channels, 6, 6]``, for baselines and for DETR."""

    def __init__(self, channels: int):
        sizes = (1, channels // 2, channels, channels, channels)
        parts: list[torch.nn.Module] = []
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            conv = torch.nn.Conv2d(inputs, outputs, 3, padding=1, stride=2 if index in (1, 3) else 1, bias=False)
            parts += [conv, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
        super().__init__(*parts)


def start_larger(model: models.VisionTransformer) -> models.VisionTransformer:
    """Initialize a small Vision Transformer so that it learns in hundreds of steps, not in thousands.

    Patch and position vectors should have about the size of the layers' outputs; the initial weights of large
    models are far smaller.
    """
    model.patch.reset_parameters()
    for table in (model.class_token, model.position):
        if table is not None:
            torch.nn.init.normal_(table.weight, std=0.5)
    return model


class Cells(torch.nn.Module):
    """An encoder layer over the cells of such a map."""

    def __init__(self, channels: int, embed_dim: int, num_heads: int):
        super().__init__()
        self.see, self.project = Seer(channels), torch.nn.Linear(channels, embed_dim)
        self.place = positions.Learned(36, embed_dim)
        torch.nn.init.normal_(self.place.weight, std=0.5)
        attention, forward = nn.MultiHeadAttention(embed_dim, num_heads), nn.FeedForward(embed_dim, 2 * embed_dim)
        self.among = nn.EncoderStack([nn.EncoderLayer(attention, forward)], final_norm=torch.nn.LayerNorm(embed_dim))

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[n, 36, embed_dim]``, row by row."""
        return self.among(self.project(self.see(images).flatten(2).mT) + self.place(range(36)))
