"""A needle test: a query and many keys, of which only a few adjacent ones, the needle, have high scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.support.errors import value_error
from saccade.support.validation import check_number
from saccade.tasks.recall import task_generator


class Needle(NamedTuple):
    """A query, keys, values, and the position of the keys with high scores (the needle).

    Args:
        query: ``[examples, 1, 1, head_dim]``.
        key: ``[examples, 1, kv_len, head_dim]``.
        value: ``[examples, 1, kv_len, head_dim]``, random.
        start: position of the first key of the needle, int64 ``[examples]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor


def needle(examples: int, kv_len: int, head_dim: int, *, needle_len: int, strength: float, seed: int) -> Needle:
    """Generate a needle test: Gaussian queries and keys, with ``needle_len`` adjacent keys shifted towards the query.

    The scores (``query @ key / sqrt(head_dim)``) of the other keys have a standard deviation of about 1; those of the
    needle are higher by ``strength``.

    Args:
        examples: number of queries.
        kv_len: number of keys.
        head_dim: width of a head.
        needle_len: number of adjacent keys with high scores, starting at a random position.
        strength: difference between the scores of the needle and those of other keys.
        seed: seed of the random generator.

    Raises:
        ValueError: ``needle_len`` is larger than ``kv_len``, or a size is below 1.

    Example:
        >>> query, key, _, start = needle(1, 100, 16, needle_len=2, strength=20.0, seed=0)
        >>> scores = (query @ key.mT)[0, 0, 0]
        >>> sorted(scores.topk(2).indices.tolist()) == [int(start), int(start) + 1]
        True
    """
    random = task_generator(seed, examples=examples, kv_len=kv_len, head_dim=head_dim, needle_len=needle_len)
    if needle_len > kv_len:
        raise value_error("needle_len", f"be at most kv_len {kv_len}", needle_len)
    strength = check_number("strength", strength)
    query = torch.randn(examples, 1, 1, head_dim, generator=random)
    key, value = (torch.randn(examples, 1, kv_len, head_dim, generator=random) for _ in range(2))
    start = torch.randint(kv_len - needle_len + 1, (examples,), generator=random)
    index = torch.arange(kv_len)
    is_needle = (index >= start[:, None]) & (index < start[:, None] + needle_len)
    shift = strength * head_dim**0.5 * query / query.square().sum(-1, keepdim=True)
    return Needle(query, key + is_needle[:, None, :, None] * shift, value, start)
