"""PerItem: a mask composed of a separate mask for each batch item."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type


@argument_hints(rules="PerItem([Global([0]), Global([0, 7])]): one mask for each batch item")
@dataclasses.dataclass(frozen=True)
class PerItem(Mask):
    """A separate mask for each batch item: ``rules[b]`` for item b, for example with different global tokens.

    >>> from saccade.masks import Causal, Window
    >>> mask = PerItem([Causal(), Window(0, 0)])
    >>> print(mask.picture(3, batch=1))
    1 . .
    . 1 .
    . . 1

    Args:
        rules: one mask for each batch item; a rule must not distinguish batch items itself.

    Raises:
        TypeError: ``rules`` is not a list of masks.
        ValueError: the list is empty, or a mask distinguishes batch items.
    """

    rules: tuple[Mask, ...]
    is_fact_of_batch = True

    def __init__(self, rules: Iterable[Mask]):
        if isinstance(rules, Mask | Tensor | np.ndarray) or not isinstance(rules, Iterable):
            raise type_error("rules", "be a list of masks", kind(rules))
        checked = tuple(check_type("rules", rule, Mask, "be a list of masks") for rule in rules)
        if not checked or any(rule.shape[0] != 1 for rule in checked):
            got = "none" if not checked else f"one for {max(rule.shape[0] for rule in checked)} items"
            raise value_error("rules", "be masks of one batch item each, at least one", got)
        object.__setattr__(self, "rules", checked)

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
        allowed = self.rules[0].allows(b, h, q, kv)
        for item, rule in enumerate(self.rules[1:], 1):
            allowed = torch.where(b == item, rule.allows(b, h, q, kv), allowed)
        return allowed

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        if len(self.rules) == 1:
            return self.rules[0].bounds(groups, keys)
        alike = groups._replace(batch=np.full_like(groups.batch, ALL))
        each = [rule.bounds(alike, keys) for rule in self.rules]
        if (groups.batch == ALL).any():  # keys visible in any item, and keys visible in all items
            any_row = reduce(lambda one, other: one.either(other, keys), each).any_row
            return Bounds(any_row, reduce(lambda one, other: one.both(other, keys), each).all_rows)
        nothing = Spans.nothing(keys)
        joined = Bounds(nothing, nothing)
        for item, bounds in enumerate(each):
            is_item = groups.batch == item
            part = Bounds(bounds.any_row.where(is_item, nothing), bounds.all_rows.where(is_item, nothing))
            joined = joined.either(part, keys)
        return joined

    def partial(self, box: Box) -> bool | Hashable:
        if len(self.rules) == 1:
            return self.rules[0].partial(box)
        if box.batch == ALL:
            return "each item", box
        inner = self.rules[box.batch].partial(box._replace(batch=ALL))
        return inner if isinstance(inner, bool) else (box.batch, inner)

    def cuts(self, batch: int, rows: range) -> Ints:
        rules = self.rules if batch == ALL else (self.rules[batch if len(self.rules) > 1 else 0],)
        return np.concatenate([np.asarray(rule.cuts(ALL, rows), dtype=np.int64) for rule in rules])

    def __repr__(self) -> str:
        return f"PerItem([{', '.join(map(str, self.rules))}])"
