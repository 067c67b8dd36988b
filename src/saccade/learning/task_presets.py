"""Task presets, with sizes that small models can learn on one core in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from saccade.tasks import Recall, induction, listops, mqar, passkey, selective_copying


class Question(NamedTuple):
    """A task preset: a task with fixed sizes.

    Args:
        make: function of a number of examples and a seed that generates the examples.
        vocab_size: number of tokens in the vocabulary.
        length: number of tokens in a sequence.
        hides_answers: whether sequences do not contain the answers, so that models may attend to later tokens.
    """

    make: Callable[[int, int], Recall]
    vocab_size: int
    length: int
    hides_answers: bool = True


QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {
        "MQAR": Question(lambda n, seed: mqar(n, 64, 8, vocab_size=128, seed=seed).without_answers(), 128, 64),
        "induction": Question(lambda n, seed: induction(n, 32, copied=8, vocab_size=32, seed=seed), 32, 32, False),
        "selective copying": Question(
            lambda n, seed: selective_copying(n, 32, copied=4, vocab_size=10, seed=seed), 10, 32
        ),
        "ListOps": Question(lambda n, seed: listops(n, 32, depth=3, seed=seed), 17, 32),
        "passkey": Question(lambda n, seed: passkey(n, 64, key_len=2, vocab_size=64, seed=seed), 64, 64, False),
    }
)
"""The presets by name, no larger than Zoology's smallest recall task (64 tokens, 8 pairs)."""
