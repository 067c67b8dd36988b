"""Train a learner (a small language model built around a token mixer) on one task, and measure its accuracy."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.learning.mixers import Mixer, ShortConvolution
from saccade.learning.task_presets import Question
from saccade.nn import FeedForward
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number
from saccade.tasks import IGNORED, Recall

SOLVED = 0.99
"""The share of correct answers at which a task counts as learned."""


class Settings(NamedTuple):
    """The settings of all training runs of a comparison.

    Args:
        steps: maximum number of steps; a run stops early if its accuracy on fresh sequences reaches `SOLVED`.
        batch_size: number of sequences in each step.
        texts: number of training sequences.
        fresh: number of fresh sequences to measure the accuracy on.
        learning_rate: peak learning rate. It rises linearly over the first tenth of the steps, then decays to 0 along a
            cosine.
        ask_every: number of steps between two measurements of the accuracy.
        width, num_layers: width and number of layers of the models.
    """

    steps: int = 600
    batch_size: int = 32
    texts: int = 8192
    fresh: int = 256
    learning_rate: float = 3e-3
    ask_every: int = 50
    width: int = 64
    num_layers: int = 2


DEFAULT = Settings()


class Outcome(NamedTuple):
    """The outcome of a training run.

    Args:
        accuracy: share of correct answers on fresh sequences.
        steps: number of training steps.
        seconds: processor time of the run.
        parameters: number of parameters of the model.
    """

    accuracy: float
    steps: int
    seconds: float
    parameters: int


def train(mixer: Mixer, question: Question, seed: int, settings: Settings = DEFAULT) -> Outcome:
    """Train a learner on a task, and return its accuracy and cost.

    Args:
        mixer: the learner's token mixer.
        question: the task.
        seed: seed of weights, sequences and their order; use the same for all mixers.
        settings: settings of the run.

    Raises:
        ValueError: the mixer attends to later tokens and the task's sequences contain the answers, a setting is below
            1, or the learning rate is not above 0.
    """
    for name, value in settings._asdict().items():
        if name == "learning_rate":
            check_number(f"settings.{name}", value, above=0)
        else:
            check_int(f"settings.{name}", value)
    if mixer.sees_later and not question.hides_answers:
        hint = "it would read the answers"
        raise value_error(
            "mixer", "not attend to later tokens in a task whose texts contain the answers", "one that does", hint=hint
        )
    began = time.process_time()
    training, fresh = question.make(settings.texts, 2 * seed), question.make(settings.fresh, 2 * seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"width": settings.width, "num_layers": settings.num_layers}
        model = Learner(mixer, question.vocab_size, question.length, **sizes)
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
        for step in range(1, settings.steps + 1):
            batch = torch.randint(settings.texts, (settings.batch_size,), generator=order)
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, settings)
            _step(model, optimizer, training, batch)
            if step % settings.ask_every == 0 and _accuracy(model, fresh) >= SOLVED:
                break
    parameters = sum(x.numel() for x in model.parameters())
    return Outcome(_accuracy(model, fresh), step, time.process_time() - began, parameters)


def _step(model: Learner, optimizer: torch.optim.Optimizer, task: Recall, batch: torch.Tensor) -> None:
    targets = task.targets[batch]
    asked = targets != IGNORED
    optimizer.zero_grad()
    F.cross_entropy(model(task.tokens[batch], asked), targets[asked]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def _accuracy(model: Learner, task: Recall) -> float:
    model.eval()
    accuracy = task.accuracy(model(task.tokens))
    model.train()
    return accuracy


def _rate(step: int, settings: Settings) -> float:
    warm_up = max(1, settings.steps // 10)
    if step <= warm_up:
        return settings.learning_rate * step / warm_up
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (settings.steps - warm_up)))


_LAYER_SIZE = 12  # parameters of a layer divided by its squared width: 4 for attention, 8 for the feed-forward network


class Learner(nn.Module):
    """A small language model whose layers have a short convolution, a mixer and a feed-forward network.

    The width of the feed-forward networks depends on the mixer, so that all learners of the same width have the same
    number of parameters, to within half a percent.

    Args:
        mixer: builds the mixer of each layer.
        vocab_size: number of tokens in the vocabulary.
        length: number of tokens in a sequence.
        width: width of the token embeddings.
        num_layers: number of layers.

    Raises:
        ValueError: the mixer has too many parameters.
    """

    def __init__(self, mixer: Mixer, vocab_size: int, length: int, *, width: int = 64, num_layers: int = 2):
        super().__init__()
        check_int("num_layers", num_layers)
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(mixer.make(width, length, i), width) for i in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor, asked: Tensor | None = None) -> Tensor:
        """Return the learner's logits for tokens ``[batch, length]``.

        Args:
            tokens: sequences no longer than ``length``.
            asked: bool ``[batch, length]``, True for the tokens whose logits are computed; all tokens if None.

        Returns:
            ``[batch, length, vocab_size]``, or ``[selected tokens, vocab_size]``.
        """
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x if asked is None else x[asked]))


class _Layer(nn.Module):
    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        size, limit = sum(x.numel() for x in mixer.parameters()), _LAYER_SIZE * width**2
        hidden = (limit - size) // (2 * width)
        if hidden < 1:
            raise value_error("mixer", f"have fewer than {limit} parameters", size)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.convolution = ShortConvolution(width, 4)
        self.mixer = mixer
        self.feed_forward = FeedForward(width, hidden, projection_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.convolution(self.norms[0](x)))
        return x + self.feed_forward(self.norms[1](x))
