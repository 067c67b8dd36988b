"""Mask: a rule that says who may attend to whom, and the algebra of such rules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from saccade import plan as plans
from saccade.errors import type_error, value_error
from saccade.masks.arguments import SIZE_BITS, check_int, check_readable, kind, listed
from saccade.plan import Box, Groups, Plan
from saccade.row_plan import RowsAhead
from saccade.spans import Bounds, Ints, Spans, Universe

__all__ = ["After", "And", "Mask", "Not", "Or"]

_LARGEST_PICTURE = 128


class Mask(ABC):
    """Who may attend to whom, as a rule on *positions*: ``allows(b, h, q, kv)`` is its definition.

    Masks are small frozen values. They combine with ``&``, ``|`` and ``~``; a module owns a pattern, a call brings
    the facts of its batch, and the two are joined with ``&``. A subclass must define `allows`; the other methods
    only say what the rule knows about itself, so that far fewer pairs need to be looked at. A rule that says
    nothing is still exact.

    Any mask is also a ``mask_mod`` for FlexAttention: it can be called with ``(b, h, q, kv)``.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the rule tells apart; 1 means that all are alike."""
        return (1, 1)

    @property
    def is_value(self) -> bool:
        """True if two equal masks always allow the same pairs, so that plans may be kept.

        By default, of a frozen dataclass: anything else may change between two calls.
        """
        parameters = getattr(type(self), "__dataclass_params__", None)
        return parameters is not None and parameters.frozen

    @property
    def asks_functions(self) -> bool:
        """True if the rule calls a function, whose answers may change with what the function reads."""
        return False

    @abstractmethod
    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """True where query position ``q`` may attend to key position ``kv``.

        Args:
            b, h: int64 indices of batch items and heads.
            q, kv: int64 positions. All four broadcast against each other.

        Returns:
            bool, of the broadcast shape (or one that broadcasts to it).
        """

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        """Keys that some row of each group needs, and keys that all its rows have; default: (everything, nothing)."""
        del groups
        return Bounds.unknown(keys)

    def residual(self, box: Box) -> bool | Hashable:
        """True or False where the rule is constant on a box; else a key such that equal keys mean equal contents."""
        return (self if self.is_value else id(self), box)

    def cuts(self, batch: int, rows: range) -> Ints:
        """Positions before which a group of ``rows`` would like to end, for one batch item or `ALL`; in any order."""
        del batch, rows
        return np.zeros(0, dtype=np.int64)

    def terms(self) -> Sequence[tuple[int, Mask]]:
        """Disjoint rules that make up this one, each with the step of its rows and keys.

        A step of s says that the term allows pairs at distances that s divides, and no others, so that it can be
        run on every s-th row and key.
        """
        return [(1, self)]

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that the rule reads, so that autograd can notice if they change before the backward pass."""
        return ()

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> Tensor:
        """The rule written out: bool ``[batch, heads, q_len, kv_len]``.

        Args:
            q_len, kv_len: lengths; ``kv_len`` is ``q_len`` when None.
            batch, heads: sizes; what the rule tells apart when None.
            q_positions, kv_positions: int64 ``[len]`` or ``[batch, len]``; -1 means that no token stands here.
                By default key j stands at j and query i at ``kv_len - q_len + i``.

        Cost: O(batch * heads * q_len * kv_len) memory; for looking and for tests.

        Raises:
            ValueError: a length or size that is no int of at least 0, more batch items or heads than the rule tells
                apart, or positions of another shape.
            TypeError: positions that are no int tensor.
        """
        where = "Mask.to_dense"
        q_len, kv_len = _lengths(where, q_len, kv_len)
        batch = self._size(where, "batch", batch, 0)
        heads = self._size(where, "heads", heads, 1)
        _check_positions(where, "q_positions", q_positions, batch, q_len)
        _check_positions(where, "kv_positions", kv_positions, batch, kv_len)
        q = torch.arange(kv_len - q_len, kv_len) if q_positions is None else q_positions
        kv = torch.arange(kv_len) if kv_positions is None else kv_positions
        allowed = self.allows(
            torch.arange(batch)[:, None, None, None],
            torch.arange(heads)[None, :, None, None],
            q.reshape(*q.shape[:-1], 1, q_len, 1),
            kv.reshape(*kv.shape[:-1], 1, 1, kv_len),
        )
        if q_positions is not None:
            allowed = allowed & (q.reshape(*q.shape[:-1], 1, q_len, 1) >= 0)
        if kv_positions is not None:
            allowed = allowed & (kv.reshape(*kv.shape[:-1], 1, 1, kv_len) >= 0)
        return allowed.broadcast_to(batch, heads, q_len, kv_len).contiguous()

    def plan(self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int = 1) -> Plan:
        """The tiles that hold all allowed pairs, for default positions. Cost: see `saccade.plan.make`.

        Raises:
            ValueError: a length or size that is no int of at least 0, or more batch items than the rule tells apart.
        """
        where = "Mask.plan"
        q_len, kv_len = _lengths(where, q_len, kv_len)
        batch = self._size(where, "batch", batch, 0)
        shape = (batch, max(_size(where, "heads", heads), self.shape[1]), q_len, kv_len)
        return plan_of(self, shape, kv_len - q_len, 0)

    def density(
        self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> float:
        """Share of pairs that are allowed, exactly, for default positions; 0 where there are no pairs.

        Cost: what the plan is sure of is counted without looking; of the rest each distinct piece is looked at once.

        Raises:
            ValueError: a length or size that is no int of at least 0, or more batch items or heads than the rule
                tells apart.
        """
        where = "Mask.density"
        q_len, kv_len = _lengths(where, q_len, kv_len)
        shape = (self._size(where, "batch", batch, 0), self._size(where, "heads", heads, 1), q_len, kv_len)
        counted: dict[Hashable, int] = {}
        total = 0
        for tile in plan_of(self, shape, kv_len - q_len, 0).tiles:
            copies = (tile.batch.stop - tile.batch.start) * shape[1]
            for strip in tile.columns:
                if strip.residual is True:
                    total += copies * tile.height * len(strip.keys)
                    continue
                if strip.residual not in counted:
                    allowed = tile.rule.allows(
                        torch.arange(tile.batch.start, tile.batch.stop)[:, None, None, None],
                        torch.arange(shape[1])[None, :, None, None],
                        torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step)[:, None] + kv_len - q_len,
                        torch.arange(strip.keys.start, strip.keys.stop, strip.keys.step),
                    )
                    cells = copies * tile.height * len(strip.keys)
                    counted[strip.residual] = int(allowed.sum()) * (cells // max(allowed.numel(), 1))
                total += counted[strip.residual]
        return total / math.prod(shape) if 0 not in shape else 0.0

    def picture(self, q_len: int = 8, kv_len: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """The matrix as text, a row per query: ``1`` may attend, ``.`` may not. At most 128 rows and columns.

        Raises:
            ValueError: more rows or columns, or a batch item or head that is not there.
        """
        where = "Mask.picture"
        q_len, kv_len = _lengths(where, q_len, kv_len)
        if not (q_len <= _LARGEST_PICTURE and kv_len <= _LARGEST_PICTURE):
            rule = f"be 0 to {_LARGEST_PICTURE}"
            raise value_error(where, "q_len and kv_len", rule, f"{q_len} and {kv_len}")
        batch, head = _size(where, "batch", batch), _size(where, "head", head)
        for name, index, most in zip(("batch", "head"), (batch, head), self.shape, strict=True):
            if most > 1 and index >= most:
                raise value_error(where, name, f"be below {most}, since the mask tells {most} apart", index)
        rows = self.to_dense(q_len, kv_len, batch=max(self.shape[0], batch + 1), heads=max(self.shape[1], head + 1))
        return "\n".join(" ".join("1" if seen else "." for seen in row) for row in rows[batch, head].tolist())

    def after(self, length: int) -> Mask:
        """The rule behind ``length`` other positions, such as class or text tokens: position p counts as p - length.

        The first ``length`` positions are outside of the rule: they see nothing and are not seen. Join it with a rule
        for them: ``Neighborhood(8, 8, 1).after(1) | Global([0])`` is a grid behind a class token.

        >>> from saccade.masks import Causal, Global
        >>> print((Causal().after(1) | Global([0])).picture(4))
        1 1 1 1
        1 1 . .
        1 1 1 .
        1 1 1 1

        Raises:
            ValueError: no int of at least 0.
        """
        check_int("Mask.after", "length", length, 0, bits=SIZE_BITS)
        return After(self, length) if length else self

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Same as `allows`."""
        return self.allows(b, h, q, kv)

    def __and__(self, other: Mask) -> Mask:
        return And((self, _checked(other, "&")))

    def __or__(self, other: Mask) -> Mask:
        return Or((self, _checked(other, "|")))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: object) -> Mask:
        return And((_checked(other, "&"), self))

    def __ror__(self, other: object) -> Mask:
        return Or((_checked(other, "|"), self))

    def _size(self, where: str, name: str, size: object, axis: int) -> int:
        """How many batch items or heads there are: as many as the rule tells apart when None."""
        most = self.shape[axis]
        size = most if size is None else _size(where, name, size)
        if most > 1 and size > most:
            raise value_error(where, name, f"be at most {most}, since the mask tells {most} apart", size)
        return size


@dataclasses.dataclass(frozen=True)
class _Joined(Mask):
    """Several rules as one; nested joints of the same kind are flattened."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        flat: list[Mask] = []
        for part in _masks(type(self).__name__, self.parts):
            flat += part.parts if type(part) is type(self) and isinstance(part, _Joined) else [part]
        object.__setattr__(self, "parts", tuple(flat))
        for axis, name in enumerate(("batch items", "heads")):
            sizes = {part.shape[axis] for part in flat} - {1}
            if len(sizes) > 1:
                rule = f"tell apart the same number of {name} (or none)"
                raise value_error("masks", "masks that are joined", rule, sorted(sizes))

    @property
    def shape(self) -> tuple[int, int]:
        return (max(part.shape[0] for part in self.parts), max(part.shape[1] for part in self.parts))

    @property
    def is_value(self) -> bool:
        return all(part.is_value for part in self.parts)

    @property
    def asks_functions(self) -> bool:
        return any(part.asks_functions for part in self.parts)

    def cuts(self, batch: int, rows: range) -> Ints:
        return np.concatenate([part.cuts(batch, rows) for part in self.parts])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def _joined_residual(self, box: Box, absorbing: bool, sign: str) -> bool | Hashable:
        keys = []
        for part in self.parts:
            residual = part.residual(box)
            if residual is absorbing:
                return absorbing
            if not isinstance(residual, bool):
                keys.append(residual)
        if not keys:
            return not absorbing
        return keys[0] if len(keys) == 1 else (sign, *keys)

    def _text(self, sign: str) -> str:
        return f" {sign} ".join(f"({part})" if isinstance(part, _Joined) else str(part) for part in self.parts)


class And(_Joined):
    """Pairs that every part allows; written ``a & b``."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = self.parts[0].allows(b, h, q, kv)
        for part in self.parts[1:]:
            allowed = allowed & part.allows(b, h, q, kv)
        return allowed

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        bounds = self.parts[0].bounds(groups, keys)
        for part in self.parts[1:]:
            bounds = bounds.both(part.bounds(groups, keys), keys)
        return bounds

    def residual(self, box: Box) -> bool | Hashable:
        return self._joined_residual(box, False, "&")

    def terms(self) -> Sequence[tuple[int, Mask]]:
        lists = [part.terms() for part in self.parts]
        if all(step == 1 for step, _ in itertools.chain(*lists)):
            return [(1, self)]
        # (a | b) & c = (a & c) | (b & c); terms of one part are disjoint, so the products are too.
        return [
            (math.lcm(*(step for step, _ in chosen)), And(tuple(term for _, term in chosen)))
            for chosen in itertools.product(*lists)
        ]

    def __repr__(self) -> str:
        return self._text("&")


class Or(_Joined):
    """Pairs that some part allows; written ``a | b``."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = self.parts[0].allows(b, h, q, kv)
        for part in self.parts[1:]:
            allowed = allowed | part.allows(b, h, q, kv)
        return allowed

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        bounds = self.parts[0].bounds(groups, keys)
        for part in self.parts[1:]:
            bounds = bounds.either(part.bounds(groups, keys), keys)
        return bounds

    def residual(self, box: Box) -> bool | Hashable:
        return self._joined_residual(box, True, "|")

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

    def __repr__(self) -> str:
        return self._text("|")


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """Pairs that the other rule does not allow; written ``~a``."""

    part: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.part, Mask):
            raise type_error("Not", "part", "be a mask", kind(self.part))

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.shape

    @property
    def is_value(self) -> bool:
        return self.part.is_value

    @property
    def asks_functions(self) -> bool:
        return self.part.asks_functions

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ~self.part.allows(b, h, q, kv)

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        return self.part.bounds(groups, keys).inverted(keys)

    def residual(self, box: Box) -> bool | Hashable:
        residual = self.part.residual(box)
        return not residual if isinstance(residual, bool) else ("~", residual)

    def cuts(self, batch: int, rows: range) -> Ints:
        return self.part.cuts(batch, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.part.tensors()

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
        if not isinstance(self.rule, Mask):
            raise type_error("After", "rule", "be a mask", kind(self.rule))
        check_int("After", "length", self.length, 0, bits=SIZE_BITS)
        if isinstance(self.rule, After):
            object.__setattr__(self, "length", self.length + self.rule.length)
            object.__setattr__(self, "rule", self.rule.rule)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rule.shape

    @property
    def is_value(self) -> bool:
        return self.rule.is_value

    @property
    def asks_functions(self) -> bool:
        return self.rule.asks_functions

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

    def tensors(self) -> tuple[Tensor, ...]:
        return self.rule.tensors()

    def __repr__(self) -> str:
        text = f"({self.rule})" if isinstance(self.rule, _Joined | Not) else str(self.rule)
        return f"{text}.after({self.length})"


def _checked(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "wrap a bool tensor as masks.Dense(tensor) and a function as masks.Predicate(function)"
    raise type_error("masks", sign, "join two masks", kind(other), hint=hint)


def _masks(where: str, parts: object) -> tuple[Mask, ...]:
    rule = "be masks, at least one, in a tuple"
    given = parts if isinstance(parts, tuple) else tuple(listed(where, "parts", parts, rule))
    for part in given:
        if not isinstance(part, Mask):
            raise type_error(where, "parts", rule, f"{kind(part)} among them")
    if not given:
        raise value_error(where, "parts", rule, "none")
    return given


def _lengths(where: str, q_len: object, kv_len: object) -> tuple[int, int]:
    rows = _size(where, "q_len", q_len)
    return rows, rows if kv_len is None else _size(where, "kv_len", kv_len)


def _size(where: str, name: str, size: object) -> int:
    """A length or number that is accepted: also an integer of NumPy, or a symbol while a program is traced."""
    if isinstance(size, np.integer):
        size = int(size)
    if not isinstance(size, torch.SymInt):
        check_int(where, name, size, 0, bits=SIZE_BITS)
    return size  # type: ignore[return-value]


def _check_positions(where: str, name: str, positions: object, batch: int, length: int) -> None:
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise type_error(where, name, "be an int64 tensor or None", kind(positions))
    check_readable(where, name, positions)
    if positions.dtype not in (torch.int64, torch.int32):
        raise type_error(where, name, "be an int64 tensor or None", str(positions.dtype).removeprefix("torch."))
    shape = tuple(positions.shape)
    if shape not in ((length,), (1, length), (batch, length)):
        raise value_error(where, name, f"have shape [{length}] or [{batch}, {length}]", list(shape))


def plan_of(
    mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """The plan of a mask, kept for the next call if the mask is a value."""
    make: Callable[..., Plan] = _kept_plan if mask.is_value else _new_plan
    if torch.compiler.is_compiling():  # index arithmetic in NumPy is run, not traced
        make = torch.compiler.disable(make)
    return make(mask, shape, q_first, kv_first, whole_rows)


@lru_cache(maxsize=16)
def _kept_rows(mask: Mask, first: int, kv_first: int) -> RowsAhead:
    return RowsAhead(mask, first, kv_first)


def _new_plan(mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool) -> Plan:
    return plans.make(mask, shape, q_first=q_first, kv_first=kv_first, whole_rows=whole_rows)


@lru_cache(maxsize=256)
def _kept_plan(mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool) -> Plan:
    batch, heads, q_len, kv_len = shape
    is_last_row = q_len == 1 and kv_len > 1 and q_first == kv_first + kv_len - 1
    if is_last_row and batch and heads and mask.shape[0] == 1 and not whole_rows:
        rows = _kept_rows(mask, max(kv_first, RowsAhead.start_of(q_first)), kv_first)
        return rows.plan(q_first, shape)
    return _new_plan(mask, shape, q_first, kv_first, whole_rows)
