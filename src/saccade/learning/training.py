"""Training of one learner on one task, and its accuracy."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F

from saccade.learning.learner import Learner
from saccade.learning.mixers import Mixer
from saccade.learning.task_presets import Question
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number
from saccade.tasks import IGNORED, Recall

SOLVED = 0.99
"""The share of right answers from which a task counts as learned."""


class Settings(NamedTuple):
    """The settings of all runs of a comparison.

    Args:
        steps: most steps; a run stops early if its accuracy on fresh sequences reaches `SOLVED`.
        batch_size: sequences per step.
        texts: number of training sequences.
        fresh: number of sequences for the accuracy.
        learning_rate: highest rate; it rises over a tenth of the steps, then decays to 0 as a cosine.
        ask_every: steps between two measurements of the accuracy.
        width, num_layers: sizes of the models.
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
    """The outcome of a run.

    Args:
        accuracy: share of right answers in fresh sequences.
        steps: number of steps.
        seconds: processor time.
        parameters: number of the model's parameters.
    """

    accuracy: float
    steps: int
    seconds: float
    parameters: int


def train(mixer: Mixer, question: Question, seed: int, settings: Settings = DEFAULT) -> Outcome:
    """Train a learner on a task.

    Args:
        mixer: its mixer of tokens.
        question: the task.
        seed: seed of weights, sequences and their order; the same for all mixers.
        settings: sizes and lengths.

    Raises:
        ValueError: a mixer that attends to later tokens for a task whose sequences contain the answers; a setting below
            1, or a rate that is not above 0.
    """
    for name, value in settings._asdict().items():
        if name == "learning_rate":
            check_number(f"settings.{name}", value, above=0)
        else:
            check_int(f"settings.{name}", value)
    if mixer.sees_later and not question.hides_answers:
        hint = "it would read them"
        raise value_error("mixer", "see no later tokens where answers stand among them", "one", hint=hint)
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
