"""ListOps: nested lists of digits, each with an operation, and their results."""

from __future__ import annotations

import random

import torch

from saccade.support.errors import value_error
from saccade.tasks.recall import IGNORED, Recall, task_generator

_OPERATIONS = ("max", "min", "median", "sum")
_OPEN = {name: 11 + index for index, name in enumerate(_OPERATIONS)}  # an opening bracket with its operation
_CLOSE, _ASK = 15, 16
_NESTED = 1 / 3  # probability that a list item is itself a list
_SHORTEST = 8


def listops(examples: int, length: int, *, depth: int, seed: int) -> Recall:
    """Generate ListOps sequences: nested lists of digits, each with an operation; the model must predict the result.

    Tokens 1 to 10 are the digits 0 to 9. Tokens 11 to 14 open a list whose operation is max, min, median (the lower of
    the two middle digits if there are two) or sum modulo 10, and token 15 closes the list. Token 16 asks for the
    result. Token 0 pads the rest of the sequence.

    Args:
        examples: number of sequences.
        length: maximum number of tokens in a sequence, at least 8.
        depth: depth of nesting; 1 for flat lists.
        seed: seed of the random generator.

    Raises:
        ValueError: ``length`` is below 8, or another size is below 1.

    Example:
        >>> task = listops(1, 16, depth=2, seed=3)
        >>> task.tokens.tolist(), task.targets.max().item()
        ([[12, 10, 10, 11, 5, 9, 4, 4, 8, 15, 15, 16, 0, 0, 0, 0]], 9)

    Reference: Nangia and Bowman 2018, arXiv:1804.06028; Tay et al. 2020, arXiv:2011.04006, section 2.2.1.
    """
    task_generator(seed, examples=examples, length=length, depth=depth)
    if length < _SHORTEST:
        raise value_error("length", f"be at least {_SHORTEST}, a list of 5 digits and the question", length)
    draw = random.Random(seed)
    tokens = torch.zeros(examples, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row in range(examples):
        listed, answer = _list(depth, draw)
        while len(listed) + 1 > length:
            listed, answer = _list(depth, draw)
        tokens[row, : len(listed) + 1] = torch.tensor([*listed, _ASK])
        targets[row, len(listed)] = 1 + answer
    return Recall(tokens, targets, length)


def _list(depth: int, draw: random.Random) -> tuple[list[int], int]:
    """Generate a nested list for ListOps; return its tokens and the result of its operation."""
    operation = draw.choice(_OPERATIONS)
    tokens, results = [_OPEN[operation]], []
    for _ in range(draw.randint(2, 5)):
        inner, result = _list(depth - 1, draw) if depth > 1 and draw.random() < _NESTED else _digit(draw.randrange(10))
        tokens += inner
        results.append(result)
    return [*tokens, _CLOSE], _result(operation, sorted(results))


def _digit(digit: int) -> tuple[list[int], int]:
    return [1 + digit], digit


def _result(operation: str, digits: list[int]) -> int:
    if operation == "sum":
        return sum(digits) % 10
    return digits[{"max": -1, "min": 0, "median": (len(digits) - 1) // 2}[operation]]
