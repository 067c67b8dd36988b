"""PerItem: a rule of its own for each batch item."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from saccade.masks.domain import Domain
from saccade.masks.mask import Mask
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, Spans, Universe
from saccade.support.argument_hints import answers_class
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type

__all__ = ["PerItem"]


@answers_class(rules="PerItem([Global([0]), Global([0, 7])]): one mask for each batch item")
@dataclasses.dataclass(frozen=True)
class PerItem(Mask):
    """Batch item b follows ``rules[b]``: other global tokens, another window for each.

    >>> from saccade.masks import Causal, Window
    >>> mask = PerItem([Causal(), Window(0, 0)])
    >>> print(mask.picture(3, batch=1))
    1 . .
    . 1 .
    . . 1

    Args:
        rules: a mask for each batch item, none of which tells items apart itself.

    Raises:
        TypeError: no list of masks.
        ValueError: none, or one that tells batch items apart.
    """

    rules: tuple[Mask, ...]
    is_fact_of_batch = True

    def __init__(self, rules: Iterable[Mask]):
        if isinstance(rules, Mask | Tensor | np.ndarray) or not isinstance(rules, Iterable):
            raise type_error("rules", "be a list of masks", kind(rules))
        own = tuple(check_type("rules", rule, Mask, "be a list of masks") for rule in rules)
        if not own or any(rule.shape[0] != 1 for rule in own):
            got = "none" if not own else f"one for {max(rule.shape[0] for rule in own)} items"
            raise value_error("rules", "be masks of one batch item each, at least one", got)
        object.__setattr__(self, "rules", own)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rules), max(rule.shape[1] for rule in self.rules)

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return self.rules

    @property
    def is_causal(self) -> bool:
        return all(rule.is_causal for rule in self.rules)

    @property
    def domain(self) -> Domain:
        return reduce(Domain.both, (rule.domain for rule in self.rules))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = self.rules[0].allows(b, h, q, kv)
        for item, rule in enumerate(self.rules[1:], 1):
            seen = torch.where(b == item, rule.allows(b, h, q, kv), seen)
        return seen

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        if len(self.rules) == 1:
            return self.rules[0].bounds(groups, keys)
        alike = groups._replace(batch=np.full_like(groups.batch, ALL))
        each = [rule.bounds(alike, keys) for rule in self.rules]
        if (groups.batch == ALL).any():  # what some item needs, and what all of them have
            needed = reduce(lambda one, other: one.either(other, keys), each).needed
            return Bounds(needed, reduce(lambda one, other: one.both(other, keys), each).sure)
        nothing = Spans.nothing(keys)
        found = Bounds(nothing, nothing)
        for item, own in enumerate(each):
            is_own = groups.batch == item
            part = Bounds(own.needed.where(is_own, nothing), own.sure.where(is_own, nothing))
            found = found.either(part, keys)
        return found

    def residual(self, box: Box) -> bool | Hashable:
        if len(self.rules) == 1:
            return self.rules[0].residual(box)
        if box.batch == ALL:
            return "each item", box
        inner = self.rules[box.batch].residual(box._replace(batch=ALL))
        return inner if isinstance(inner, bool) else (box.batch, inner)

    def cuts(self, batch: int, rows: range) -> Ints:
        of = self.rules if batch == ALL else (self.rules[batch if len(self.rules) > 1 else 0],)
        return np.concatenate([np.asarray(rule.cuts(ALL, rows), dtype=np.int64) for rule in of])

    def __repr__(self) -> str:
        return f"PerItem([{', '.join(map(str, self.rules))}])"
