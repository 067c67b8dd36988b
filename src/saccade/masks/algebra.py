"""The algebra of masks: And, Or and Not combine masks, and After shifts a mask."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field, items_of
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type


class _Formula(Mask):
    """Base class of masks that combine other masks with ``&``, ``|`` and ``~``."""

    @property
    def is_relative(self) -> bool:
        return all(part.is_relative for part in self.made_of)

    @property
    def hides_keys_only(self) -> bool:
        return all(part.hides_keys_only for part in self.made_of)

    def atoms(self) -> tuple[Mask, ...]:
        return tuple(atom for part in self.made_of for atom in part.atoms())


@dataclasses.dataclass(frozen=True)
class _Joined(_Formula):
    """Base class of the masks ``a & b`` and ``a | b``. Nested combinations with the same operator are flattened."""

    parts: tuple[Mask, ...]
    _shape: ClassVar[tuple[int, int]]  # shape of the joined masks, stored because each call reads it several times
    _needs_all: ClassVar[bool]  # True for And, which allows a pair if all parts do; False for Or

    def __post_init__(self) -> None:
        flat: list[Mask] = []
        for part in _masks(self.parts):
            flat += part.parts if type(part) is type(self) and isinstance(part, _Joined) else [part]
        object.__setattr__(self, "parts", tuple(flat))
        if torch.compiler.is_compiling():  # comparing sizes would specialise them; the operator joins the masks again
            return
        object.__setattr__(self, "_shape", self._joined_shape())

    def _joined_shape(self) -> tuple[int, int]:
        """Return the numbers of batch items and heads of the joined masks. Raise an error if they do not match."""
        shapes = [part.shape for part in self.parts if part.shape != (1, 1)]
        for axis, name in enumerate(("batch items", "heads")) if len(shapes) > 1 else ():
            sizes = [shape[axis] for shape in shapes if shape[axis] != 1]
            if any(size != sizes[0] for size in sizes):
                rule = f"have the same number of {name} (or 1)"
                raise value_error("joined masks", rule, sorted(set(sizes)))
        batch, heads = zip(*shapes, strict=True) if shapes else ((1,), (1,))
        return max(batch), max(heads)

    @property
    def shape(self) -> tuple[int, int]:
        stored: tuple[int, int] | None = self.__dict__.get("_shape")  # not stored while tracing
        return self._joined_shape() if stored is None else stored

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return self.parts

    @property
    def is_causal(self) -> bool:
        return (any if self._needs_all else all)(part.is_causal for part in self.parts)

    @property
    def domain(self) -> Domain:
        return reduce(Domain.both if self._needs_all else Domain.either, [part.domain for part in self.parts])

    def with_atoms(self, function: Callable[[Mask], Mask]) -> Mask:
        return type(self)(tuple(part.with_atoms(function) for part in self.parts))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = self.parts[0].allows(b, h, q, kv)
        for part in self.parts[1:]:
            other = part.allows(b, h, q, kv)
            allowed = allowed & other if self._needs_all else allowed | other
        return allowed

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        bounds = self.parts[0].bounds(groups, keys)
        for part in self.parts[1:]:
            other = part.bounds(groups, keys)
            bounds = bounds.both(other, keys) if self._needs_all else bounds.either(other, keys)
        return bounds

    def partial(self, box: Box) -> bool | Hashable:
        keys = []
        for part in self.parts:
            partial = part.partial(box)
            if not isinstance(partial, bool):
                keys.append(partial)
            elif partial is not self._needs_all:
                return partial
        if not keys:
            return self._needs_all
        return keys[0] if len(keys) == 1 else (self._sign, *keys)

    def __repr__(self) -> str:
        return f" {self._sign} ".join(f"({part})" if isinstance(part, _Joined) else str(part) for part in self.parts)

    @property
    def _sign(self) -> str:
        return "&" if self._needs_all else "|"


class And(_Joined):
    """The intersection of masks, ``a & b``: the pairs that all joined masks allow."""

    _needs_all = True

    def terms(self) -> Sequence[tuple[int, Mask]]:
        lists = [part.terms() for part in self.parts]
        if all(step == 1 for step, _ in itertools.chain(*lists)):
            return [(1, self)]
        # (a | b) & c = (a & c) | (b & c); the terms of (a | b) are disjoint, so their intersections with c are too.
        return [
            (math.lcm(*(step for step, _ in chosen)), And(tuple(term for _, term in chosen)))
            for chosen in itertools.product(*lists)
        ]


class Or(_Joined):
    """The union of masks, ``a | b``: the pairs that at least one of the joined masks allows."""

    _needs_all = False

    def terms(self) -> Sequence[tuple[int, Mask]]:
        by_step: dict[int, list[Mask]] = {}
        for step, term in itertools.chain(*(part.terms() for part in self.parts)):
            by_step.setdefault(step, []).append(term)
        if set(by_step) == {1}:
            return [(1, self)]
        # a | b = a | (b & ~a), so that every pair belongs to a single term.
        disjoint: list[tuple[int, Mask]] = []
        before: list[Mask] = []
        for step, members in sorted(by_step.items(), key=lambda item: item[0]):
            joined = members[0] if len(members) == 1 else Or(tuple(members))
            disjoint.append((step, And((joined, *(~term for term in before))) if before else joined))
            before.append(joined)
        return disjoint


@dataclasses.dataclass(frozen=True)
class Not(_Formula):
    """The complement of a mask, ``~a``: the pairs that mask ``a`` does not allow."""

    part: Mask

    def __post_init__(self) -> None:
        check_type("part", self.part, Mask, "be a mask")

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.part,)

    @property
    def domain(self) -> Domain:
        return self.part.domain

    def with_atoms(self, function: Callable[[Mask], Mask]) -> Mask:
        return Not(self.part.with_atoms(function))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ~self.part.allows(b, h, q, kv)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return self.part.bounds(groups, keys).inverted(keys)

    def partial(self, box: Box) -> bool | Hashable:
        partial = self.part.partial(box)
        return not partial if isinstance(partial, bool) else ("~", partial)

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Joined) else f"~{self.part}"


@dataclasses.dataclass(frozen=True)
class After(Mask):
    """A mask shifted by ``length`` positions, ``mask.after(length)``; the positions before it are fully masked."""

    rule: Mask
    length: int

    def __post_init__(self) -> None:
        check_type("rule", self.rule, Mask, "be a mask")
        check_field(self, "length", 0, bits=SIZE_BITS)
        if isinstance(self.rule, After):
            object.__setattr__(self, "length", self.length + self.rule.length)
            object.__setattr__(self, "rule", self.rule.rule)

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.rule,)

    @property
    def is_causal(self) -> bool:
        return self.rule.is_causal

    @property
    def domain(self) -> Domain:
        return self.rule.domain.after(self.length)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        here = (q >= self.length) & (kv >= self.length)
        return here & self.rule.allows(b, h, q - self.length, kv - self.length)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        first, last = groups.first - self.length, groups.last - self.length
        some = last >= 0
        # Skip the rows before position `length`, and start at the first later row on the group's stride.
        start = np.where(some, np.maximum(first, first % groups.step), 0)
        some = some & (start <= last)
        shifted = KeyDomain(*(np.maximum(edge - self.length, 0) for edge in keys))
        inner = self.rule.bounds(Groups(groups.batch, start, np.where(some, last, start), groups.step), shifted)
        offset = np.full_like(first, self.length)
        nothing = Spans.nothing(keys)
        any_row = inner.any_row.shifted(offset, keys).where(some, nothing)
        every = some & (first >= 0)
        if inner.is_exact and bool((every == some).all()):
            return Bounds.exactly(any_row)
        return Bounds(any_row, inner.all_rows.shifted(offset, keys).where(every, nothing))

    def partial(self, box: Box) -> bool | Hashable:
        if box.rows[-1] < self.length or box.keys[-1] < self.length:
            return False
        if box.rows[0] < self.length or box.keys[0] < self.length:
            return super().partial(box)
        rows, keys = (range(x.start - self.length, x.stop - self.length, x.step) for x in (box.rows, box.keys))
        return self.rule.partial(Box(box.batch, rows, keys))

    def cuts(self, batch: int, rows: range) -> Ints:
        shifted = range(max(rows.start - self.length, 0), max(rows.stop - self.length, 0))
        return np.append(self.rule.cuts(batch, shifted), 0) + self.length

    def terms(self) -> Sequence[tuple[int, Mask]]:
        terms = self.rule.terms()
        if all(step == 1 for step, _ in terms):
            return [(1, self)]
        return [(step, After(term, self.length)) for step, term in terms]

    def __repr__(self) -> str:
        text = f"({self.rule})" if isinstance(self.rule, _Joined | Not) else str(self.rule)
        return f"{text}.after({self.length})"


def _masks(parts: object) -> tuple[Mask, ...]:
    rule = "be masks, at least one, in a tuple"
    checked = parts if isinstance(parts, tuple) else tuple(items_of("parts", parts, rule))
    for part in checked:
        if Mask not in type(part).__mro__:  # isinstance is five times slower for abstract classes
            raise type_error("parts", rule, f"{kind(part)} among them")
    if not checked:
        raise value_error("parts", rule, "none")
    return checked
