"""Mask: a rule that says who may attend to whom, and what every such rule can be asked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade import masks
from saccade.masks.domain import EVERYWHERE, Domain
from saccade.masks.no_arithmetic import NoArithmetic
from saccade.masks.plan_cache import plan_of
from saccade.masks.validation import size_of, written_out
from saccade.plan import Box, Groups, Plan
from saccade.plan.key_ranges import Bounds, Ints, Universe
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import kind, type_error, value_error

__all__ = ["Mask"]

_LARGEST_PICTURE = 128


class Mask(NoArithmetic, ABC):
    """Who may attend to whom, as a rule on *positions*: ``allows(b, h, q, kv)`` is its definition.

    Masks are small frozen values. They combine with ``&``, ``|`` and ``~``; a module owns a pattern, a call brings
    the facts of its batch, and the two are joined with ``&``. A subclass must define `allows`; the other methods
    only say what the rule knows about itself, so that far fewer pairs need to be looked at. A rule that says
    nothing is still exact.

    Any mask is also a ``mask_mod`` for FlexAttention: it can be called with ``(b, h, q, kv)``.
    """

    made_of: Any = ()
    """The masks that this one is made of, a tuple; a class that has some says so by a property of this name.

    What it knows of batch items, heads and tensors then follows from theirs.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the rule tells apart; 1 means that all are alike."""
        if not self.made_of:
            return 1, 1
        return max([part.shape[0] for part in self.made_of]), max([part.shape[1] for part in self.made_of])

    @property
    def is_value(self) -> bool:
        """True if two equal masks always allow the same pairs, so that plans may be kept.

        By default, of a frozen dataclass: anything else may change between two calls.
        """
        is_frozen = getattr(getattr(type(self), "__dataclass_params__", None), "frozen", False)
        return is_frozen and (not self.made_of or all(part.is_value for part in self.made_of))

    @property
    def asks_functions(self) -> bool:
        """True if the rule calls a function, whose answers may change with what the function reads."""
        return bool(self.made_of) and any(part.asks_functions for part in self.made_of)

    @property
    def is_causal(self) -> bool:
        """True if the rule surely lets no query see a key behind it. Layers with a cache ask others more closely."""
        return False

    @property
    def is_relative(self) -> bool:
        """True if the rule surely reads nothing but how far a key stands from the query."""
        return False

    @property
    def hides_keys_only(self) -> bool:
        """True if the rule surely hides the same keys from every query and head of an item, and nothing else."""
        return False

    @property
    def is_fact_of_batch(self) -> bool:
        """True if the rule may hold for one batch alone; a mask whose numbers are lengths of texts says so itself.

        By default, if it tells batch items apart, reads tensors or calls a function.
        """
        is_own = self.shape[0] != 1 or self.asks_functions or bool(self.tensors())
        return is_own or any(part.is_fact_of_batch for part in self.made_of)

    @property
    def domain(self) -> Domain:
        """The positions that the rule covers: all, unless it was made for a number of them."""
        return EVERYWHERE

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
        return Bounds.unknown(keys)

    def residual(self, box: Box) -> bool | Hashable:
        """True or False where the rule is constant on a box; else a key such that equal keys mean equal contents."""
        return (self if self.is_value else id(self), box)

    def cuts(self, batch: int, rows: range) -> Ints:
        """Positions before which a group of ``rows`` would like to end, for one batch item or `ALL`; in any order."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(part.cuts(batch, rows) for part in self.made_of)])

    def terms(self) -> Sequence[tuple[int, Mask]]:
        """Disjoint rules that make up this one, each with the step of its rows and keys.

        A step of s says that the term allows pairs at distances that s divides, and no others, so that it can be
        run on every s-th row and key.
        """
        return [(1, self)]

    def atoms(self) -> tuple[Mask, ...]:
        """The rules that ``&``, ``|`` and ``~`` join here: this one itself, if it is not made by them."""
        return (self,)

    def with_atoms(self, function: Callable[[Mask], Mask]) -> Mask:
        """The same with ``function`` made of each of its `atoms`."""
        return function(self)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that the rule reads, so that autograd can notice if they change before the backward pass."""
        return tuple([tensor for part in self.made_of for tensor in part.tensors()]) if self.made_of else ()

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Tensor:
        """The rule written out: bool ``[batch, heads, q_len, kv_len]``.

        Args:
            q_len, kv_len: lengths; ``kv_len`` is ``q_len`` when None.
            batch, heads: sizes; what the rule tells apart when None.
            q_positions, kv_positions: a range, or int64 ``[len]`` or ``[batch, len]``, also as lists; -1 means that no
                token stands here. By default key j stands at j and query i at ``kv_len - q_len + i``.

        Cost: O(batch * heads * q_len * kv_len) memory; for looking and for tests.

        Raises:
            ValueError: a length or size that is no int of at least 0, more batch items or heads than the rule tells
                apart, or positions of another shape.
            TypeError: positions that are neither a range nor an int tensor.
        """
        batch, heads, q_len, kv_len = self._sizes(q_len, kv_len, batch, heads)
        q = written_out(q_positions, "q_positions", kv_len - q_len, q_len, batch)[:, None, :, None]
        kv = written_out(kv_positions, "kv_positions", 0, kv_len, batch)[:, None, None, :]
        b, h = (torch.arange(count, device="cpu") for count in (batch, heads))
        allowed = self.allows(b[:, None, None, None], h[None, :, None, None], q, kv)
        for given, own in ((q_positions, q), (kv_positions, kv)):
            if given is not None:
                allowed = allowed & (own >= 0)
        return allowed.broadcast_to(batch, heads, q_len, kv_len).contiguous()

    def plan(self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int = 1) -> Plan:
        """The tiles that hold all allowed pairs, for default positions; refuses what `to_dense` refuses.

        Cost: see `saccade.plan.make`.
        """
        heads = max(size_of("heads", heads), self.shape[1])
        shape = self._sizes(q_len, kv_len, batch, None)
        return plan_of(self, (shape[0], heads, *shape[2:]), shape[3] - shape[2], 0)

    def density(
        self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> float:
        """Share of pairs that are allowed, exactly, for default positions; 0 where there are no pairs.

        Cost: what the plan is sure of is counted without looking; of the rest each distinct piece is looked at once.
        """
        shape = self._sizes(q_len, kv_len, batch, heads)
        first = shape[3] - shape[2]
        counted: dict[Hashable, int] = {}
        total = 0
        for tile in plan_of(self, shape, first, 0).tiles:
            copies = (tile.batch.stop - tile.batch.start) * shape[1]
            for strip in tile.columns:
                if strip.residual is True:
                    total += copies * tile.height * len(strip.keys)
                    continue
                if strip.residual not in counted:
                    allowed = tile.rule.allows(
                        torch.arange(tile.batch.start, tile.batch.stop, device="cpu")[:, None, None, None],
                        torch.arange(shape[1], device="cpu")[None, :, None, None],
                        torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step, device="cpu")[:, None] + first,
                        torch.arange(strip.keys.start, strip.keys.stop, strip.keys.step, device="cpu"),
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
        batch, head = size_of("batch", batch), size_of("head", head)
        for name, index, most in zip(("batch", "head"), (batch, head), self.shape, strict=True):
            if most > 1 and index >= most:
                raise value_error(name, f"be below {most}, since the mask tells {most} apart", index)
        items, heads = max(self.shape[0], batch + 1), max(self.shape[1], head + 1)
        shape = self._sizes(q_len, kv_len, items, heads)
        if max(shape[2:]) > _LARGEST_PICTURE:
            got = f"{shape[2]} and {shape[3]}"
            raise value_error("q_len and kv_len", f"be 0 to {_LARGEST_PICTURE}", got)
        rows = self.to_dense(q_len, kv_len, batch=items, heads=heads)
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
        length = size_of("length", length)
        return masks.After(self, length) if length else self

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Same as `allows`."""
        return self.allows(b, h, q, kv)

    def __and__(self, other: Mask) -> Mask:
        return masks.And((self, _checked(other, "&")))

    def __or__(self, other: Mask) -> Mask:
        return masks.Or((self, _checked(other, "|")))

    def __invert__(self) -> Mask:
        return masks.Not(self)

    def __pow__(self, layers: int) -> Mask:
        """Who may reach whom through ``layers`` layers of this rule, each with a residual: ``(I or rule) ** layers``.

        >>> from saccade.masks import Causal, Global, Window
        >>> Window(3, 1) ** 4, (Window(3, 3) | Global([0])) ** 2
        (Window(left=12, right=4), Full())

        Exact at every length, in O(parts of the rule): `saccade.masks.receptive_field` lists the forms. A rule
        without one raises `UnsupportedError`, and ``layers`` that is no int of at least 1 a ``ValueError``.
        """
        return masks.through_layers(self, layers)

    def __rand__(self, other: object) -> Mask:
        return masks.And((_checked(other, "&"), self))

    def __ror__(self, other: object) -> Mask:
        return masks.Or((_checked(other, "|"), self))

    def _sizes(self, q_len: object, kv_len: object, batch: object, heads: object) -> tuple[int, int, int, int]:
        """Checked sizes; None for as many items and heads as the rule tells apart, and as many keys as queries."""
        told: list[int] = []
        for name, size, most in (("batch", batch, self.shape[0]), ("heads", heads, self.shape[1])):
            told.append(most if size is None else size_of(name, size))
            if most > 1 and told[-1] > most:
                raise value_error(name, f"be at most {most}, since the mask tells {most} apart", size)
        rows = size_of("q_len", q_len)
        return told[0], told[1], rows, rows if kv_len is None else size_of("kv_len", kv_len)


def _checked(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "wrap a bool tensor as masks.Dense(tensor) and a function as masks.Predicate(function)"
    raise type_error(sign, "join two masks", kind(other), hint=hint)
