"""The algebra of masks: And, Or and Not join rules, After moves one; what they know follows from their parts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import ClassVar

import numpy as np
from torch import Tensor

from saccade.masks.domain import Domain
from saccade.masks.mask import Mask
from saccade.masks.validation import SIZE_BITS, check_field, items_of
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, Spans, Universe
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type

__all__ = ["After", "And", "Not", "Or"]


class _Formula(Mask):
    """A rule made of others by ``&``, ``|`` and ``~``."""

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
    """Several rules as one; nested joints of the same kind are flattened."""

    parts: tuple[Mask, ...]
    _shape: ClassVar[tuple[int, int]]  # of the parts: asked for several times in a call
    _needs_all: ClassVar[bool]  # And does, to allow a pair; to Or one part is enough

    def __post_init__(self) -> None:
        flat: list[Mask] = []
        for part in _masks(self.parts):
            flat += part.parts if type(part) is type(self) and isinstance(part, _Joined) else [part]
        object.__setattr__(self, "parts", tuple(flat))
        told = [part.shape for part in flat if part.shape != (1, 1)]
        for axis, name in enumerate(("batch items", "heads")) if len(told) > 1 else ():
            # Compared one by one: a set would fix sizes that are symbols while a program is traced.
            sizes = [shape[axis] for shape in told if shape[axis] != 1]
            if any(size != sizes[0] for size in sizes):
                rule = f"tell apart the same number of {name} (or none)"
                raise value_error("masks that are joined", rule, sorted(set(sizes)))
        batch, heads = zip(*told, strict=True) if told else ((1,), (1,))
        object.__setattr__(self, "_shape", (max(batch), max(heads)))

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

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

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        bounds = self.parts[0].bounds(groups, keys)
        for part in self.parts[1:]:
            other = part.bounds(groups, keys)
            bounds = bounds.both(other, keys) if self._needs_all else bounds.either(other, keys)
        return bounds

    def residual(self, box: Box) -> bool | Hashable:
        keys = []
        for part in self.parts:
            residual = part.residual(box)
            if not isinstance(residual, bool):
                keys.append(residual)
            elif residual is not self._needs_all:
                return residual
        if not keys:
            return self._needs_all
        return keys[0] if len(keys) == 1 else (self._sign, *keys)

    def __repr__(self) -> str:
        return f" {self._sign} ".join(f"({part})" if isinstance(part, _Joined) else str(part) for part in self.parts)

    @property
    def _sign(self) -> str:
        return "&" if self._needs_all else "|"


class And(_Joined):
    """Pairs that every part allows; written ``a & b``."""

    _needs_all = True

    def terms(self) -> Sequence[tuple[int, Mask]]:
        lists = [part.terms() for part in self.parts]
        if all(step == 1 for step, _ in itertools.chain(*lists)):
            return [(1, self)]
        # (a | b) & c = (a & c) | (b & c); terms of one part are disjoint, so the products are too.
        return [
            (math.lcm(*(step for step, _ in chosen)), And(tuple(term for _, term in chosen)))
            for chosen in itertools.product(*lists)
        ]


class Or(_Joined):
    """Pairs that some part allows; written ``a | b``."""

    _needs_all = False

    def terms(self) -> Sequence[tuple[int, Mask]]:
        by_step: dict[int, list[Mask]] = {}
        for step, term in itertools.chain(*(part.terms() for part in self.parts)):
            by_step.setdefault(step, []).append(term)
        if set(by_step) == {1}:
            return [(1, self)]
        # a | b = a | (b & ~a): which term a pair belongs to is decided pair by pair.
        disjoint: list[tuple[int, Mask]] = []
        before: list[Mask] = []
        for step, members in sorted(by_step.items(), key=lambda item: item[0]):
            own = members[0] if len(members) == 1 else Or(tuple(members))
            disjoint.append((step, And((own, *(~term for term in before))) if before else own))
            before.append(own)
        return disjoint


@dataclasses.dataclass(frozen=True)
class Not(_Formula):
    """Pairs that the other rule does not allow; written ``~a``."""

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

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        return self.part.bounds(groups, keys).inverted(keys)

    def residual(self, box: Box) -> bool | Hashable:
        residual = self.part.residual(box)
        return not residual if isinstance(residual, bool) else ("~", residual)

    def __invert__(self) -> Mask:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, _Joined) else f"~{self.part}"


@dataclasses.dataclass(frozen=True)
class After(Mask):
    """A rule behind ``length`` other positions, which see nothing and are not seen; written ``rule.after(length)``."""

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

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        first, last = groups.first - self.length, groups.last - self.length
        some = last >= 0
        # Rows before the rule begins are left out: the first of the others is the first that is a step away.
        start = np.where(some, np.maximum(first, first % groups.step), 0)
        some = some & (start <= last)
        own = Universe(*(np.maximum(edge - self.length, 0) for edge in keys))
        inner = self.rule.bounds(Groups(groups.batch, start, np.where(some, last, start), groups.step), own)
        offset = np.full_like(first, self.length)
        nothing = Spans.nothing(keys)
        needed = inner.needed.shifted(offset, keys).where(some, nothing)
        every = some & (first >= 0)
        if inner.is_exact and bool((every == some).all()):
            return Bounds.exactly(needed)
        return Bounds(needed, inner.sure.shifted(offset, keys).where(every, nothing))

    def residual(self, box: Box) -> bool | Hashable:
        if box.rows[-1] < self.length or box.keys[-1] < self.length:
            return False
        if box.rows[0] < self.length or box.keys[0] < self.length:
            return super().residual(box)
        rows, keys = (range(x.start - self.length, x.stop - self.length, x.step) for x in (box.rows, box.keys))
        return self.rule.residual(Box(box.batch, rows, keys))

    def cuts(self, batch: int, rows: range) -> Ints:
        own = range(max(rows.start - self.length, 0), max(rows.stop - self.length, 0))
        return np.append(self.rule.cuts(batch, own), 0) + self.length

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
    given = parts if isinstance(parts, tuple) else tuple(items_of("parts", parts, rule))
    for part in given:
        if Mask not in type(part).__mro__:  # isinstance takes five times as long for a class that is abstract
            raise type_error("parts", rule, f"{kind(part)} among them")
    if not given:
        raise value_error("parts", rule, "none")
    return given
