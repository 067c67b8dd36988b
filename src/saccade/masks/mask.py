"""Mask: base class of masks. A mask defines, by position, which query may attend to which key."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from saccade import masks
from saccade.masks.mask_fields import size_of, written_out
from saccade.masks.plan_cache import plan_of
from saccade.plan import Box, Groups, Plan
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import kind, type_error, value_error

_LARGEST_PICTURE = 128


class Domain(NamedTuple):
    """The positions of queries and keys that a mask covers, as ranges with step 1; None for all positions.

    A mask built for 4 positions does not define a fifth. Attention over 5 keys therefore raises an error, because
    silently masking the fifth position would return rows of 0.
    """

    rows: range | None = None
    keys: range | None = None

    def both(self, other: Domain) -> Domain:
        """Return the domain of a mask ``a & b``: the positions that are in the domains of both masks."""
        return Domain(_intersection(self.rows, other.rows), _intersection(self.keys, other.keys))

    def either(self, other: Domain) -> Domain:
        """Return the domain of a mask ``a | b``: the smallest one that contains both, including any gap in between."""
        return Domain(_hull(self.rows, other.rows), _hull(self.keys, other.keys))

    def after(self, length: int) -> Domain:
        """Return the domain of a mask shifted by ``length`` positions, including these positions, which are masked."""
        return Domain(*(None if x is None else range(x.stop + length) for x in self))

    def times(self, size: int) -> Domain:
        """Convert a domain of block indices to a domain of positions, with ``size`` positions in a block."""
        return Domain(*(None if x is None else range(x.start * size, x.stop * size) for x in self))


EVERYWHERE = Domain()


class _NoArithmetic:
    """Mixin that raises errors with hints for masks in arithmetic or with ``and``, ``or``, ``not`` or ``len``."""

    def _refuse(self, other: object) -> NoReturn:
        hint = "combine masks with & (both), | (either) and ~ (not); pass terms that are added to scores as bias="
        raise type_error("a mask", "not be used in arithmetic", self, hint=hint)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse
    __rpow__ = _refuse

    def __bool__(self) -> NoReturn:
        hint = "combine masks with & (both), | (either) and ~ (not); `and`, `or` and `not` would ignore one of them"
        raise type_error("a mask", "not be used as true or false", self, hint=hint)

    def __len__(self) -> NoReturn:
        hint = (
            "mask.picture(n) draws it for n tokens, mask.density(n) is its share "
            "of visible pairs, mask.to_dense(n) is a tensor"
        )
        raise type_error(
            "a mask", "not be passed to len(): it is a rule on positions and has no length", self, hint=hint
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        hint = "mask.to_dense(n)[0, 0].numpy() is an array for n tokens"
        raise type_error("a mask", "not be an array: it is a rule on positions", self, hint=hint)


class Mask(_NoArithmetic, ABC):
    """Base class of masks. A mask defines by *position* which query may attend to which key: ``allows(b, h, q, kv)``.

    Masks are small immutable values that are combined with ``&``, ``|`` and ``~``. A module has a pattern, each call
    may pass a mask for its batch, and the two are joined by ``&``. A subclass must define `allows`. The other methods
    describe the structure of the mask, so that fewer pairs need to be computed. A mask without such a description is
    still exact.

    Any mask can be used as a ``mask_mod`` for FlexAttention: it can be called with ``(b, h, q, kv)``.
    """

    made_of: Any = ()
    """Tuple of the masks that this mask combines. They determine its shape, tensors and other properties."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of batch items and heads with separate masks; 1 means that all share one mask."""
        if not self.made_of:
            return 1, 1
        return max([part.shape[0] for part in self.made_of]), max([part.shape[1] for part in self.made_of])

    @property
    def is_value(self) -> bool:
        """Whether two equal masks always allow the same pairs, so that plans may be cached.

        By default, this is True only for frozen dataclasses, since other objects may change between two calls.
        """
        is_frozen = getattr(getattr(type(self), "__dataclass_params__", None), "frozen", False)
        return is_frozen and (not self.made_of or all(part.is_value for part in self.made_of))

    @property
    def calls_functions(self) -> bool:
        """Whether the mask calls a user's function, whose results may change between calls."""
        return bool(self.made_of) and any(part.calls_functions for part in self.made_of)

    @property
    def is_causal(self) -> bool:
        """Whether it is known that no query sees a later key. If False, layers with a cache check the mask."""
        return False

    @property
    def is_relative(self) -> bool:
        """Whether the mask is known to depend only on the distance between query and key."""
        return False

    @property
    def hides_keys_only(self) -> bool:
        """Whether it is known that the same keys are masked for all queries and heads of a batch item."""
        return False

    @property
    def is_fact_of_batch(self) -> bool:
        """Whether the mask may be valid for a single batch only, like a mask built from sequence lengths.

        By default, this is True if the mask distinguishes batch items, reads tensors or calls a function.
        """
        is_fact = self.shape[0] != 1 or self.calls_functions or bool(self.tensors())
        return is_fact or any(part.is_fact_of_batch for part in self.made_of)

    @property
    def domain(self) -> Domain:
        """Positions that the mask covers: all positions, unless the mask was built for a fixed number of positions."""
        return EVERYWHERE

    @abstractmethod
    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return whether each query position ``q`` may attend to each key position ``kv``.

        Args:
            b, h: int64 indices of batch items and heads.
            q, kv: int64 positions. All four tensors broadcast against each other.

        Returns:
            A bool tensor with the broadcast shape (or a shape that broadcasts to it).
        """

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        """Return two bounds for each group of rows: the keys visible to any row, and the keys visible to all rows.

        By default, these are all keys and no keys, which is correct for every mask.
        """
        return Bounds.unknown(keys)

    def partial(self, box: Box) -> bool | Hashable:
        """Return True or False if the mask is constant in a box. Otherwise, return a hashable key.

        The mask must allow the same pairs in all boxes with equal keys.
        """
        return (self if self.is_value else id(self), box)

    def cuts(self, batch: int, rows: range) -> Ints:
        """Return the positions where the mask suggests splitting a tile of ``rows``, for a batch item or for `ALL`."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(part.cuts(batch, rows) for part in self.made_of)])

    def terms(self) -> Sequence[tuple[int, Mask]]:
        """Return disjoint masks whose union is this mask, each with the stride between its rows and between its keys.

        A term with stride s allows only pairs whose distance is a multiple of s, so it can run on every s-th row and
        key.
        """
        return [(1, self)]

    def atoms(self) -> tuple[Mask, ...]:
        """Return the masks that this mask combines with ``&``, ``|`` and ``~``; only itself if it is not combined."""
        return (self,)

    def with_atoms(self, function: Callable[[Mask], Mask]) -> Mask:
        """Return the mask with ``function`` applied to each of its `atoms`."""
        return function(self)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the mask reads, so that autograd can detect changes before the backward pass."""
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
        """Return the mask as a bool tensor ``[batch, heads, q_len, kv_len]``.

        Args:
            q_len, kv_len: lengths; ``kv_len`` is ``q_len`` when None.
            batch, heads: numbers of batch items and heads; taken from the mask's `shape` when None.
            q_positions, kv_positions: a range, or int64 ``[len]`` or ``[batch, len]`` as a tensor or list; -1 marks
                padding. By default key j is at position j and query i at ``kv_len - q_len + i``.

        Cost: O(batch * heads * q_len * kv_len) memory; for figures and tests.

        Raises:
            ValueError: a length or size is not an int of at least 0, the mask is defined for a different number of
                batch items or heads, or positions have a different shape.
            TypeError: positions are neither a range nor ints.
        """
        batch, heads, q_len, kv_len = self._sizes(q_len, kv_len, batch, heads)
        q = written_out(q_positions, "q_positions", kv_len - q_len, q_len, batch)[:, None, :, None]
        kv = written_out(kv_positions, "kv_positions", 0, kv_len, batch)[:, None, None, :]
        b, h = (torch.arange(count, device="cpu") for count in (batch, heads))
        allowed = self.allows(b[:, None, None, None], h[None, :, None, None], q, kv)
        if q_positions is not None:
            allowed = allowed & (q >= 0)
        if kv_positions is not None:
            allowed = allowed & (kv >= 0)
        return allowed.broadcast_to(batch, heads, q_len, kv_len).contiguous()

    def plan(self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int = 1) -> Plan:
        """Return the plan of the mask for default positions: tiles that contain all allowed pairs.

        Raises the same errors as `to_dense`.

        Cost: see `saccade.plan.make`.
        """
        heads = max(size_of("heads", heads), self.shape[1])
        shape = self._sizes(q_len, kv_len, batch, None)
        return plan_of(self, (shape[0], heads, *shape[2:]), shape[3] - shape[2], 0)

    def count(
        self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> int:
        """Return the exact number of pairs that the mask allows at default positions, summed over items and heads.

        Cost: boxes in which the mask is constant are counted without evaluating it. Each distinct partial box is
            evaluated once.

        >>> from saccade.masks import Causal
        >>> Causal().count(4)
        10
        """
        shape = self._sizes(q_len, kv_len, batch, heads)
        first = shape[3] - shape[2]
        counted: dict[Hashable, int] = {}
        total = 0
        for tile in plan_of(self, shape, first, 0).tiles:
            copies = (tile.batch.stop - tile.batch.start) * shape[1]
            for strip in tile.columns:
                if strip.partial is True:
                    total += copies * tile.height * len(strip.keys)
                    continue
                if strip.partial not in counted:
                    allowed = tile.rule.allows(
                        torch.arange(tile.batch.start, tile.batch.stop, device="cpu")[:, None, None, None],
                        torch.arange(shape[1], device="cpu")[None, :, None, None],
                        torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step, device="cpu")[:, None] + first,
                        torch.arange(strip.keys.start, strip.keys.stop, strip.keys.step, device="cpu"),
                    )
                    cells = copies * tile.height * len(strip.keys)
                    counted[strip.partial] = int(allowed.sum()) * (cells // max(allowed.numel(), 1))
                total += counted[strip.partial]
        return total

    def density(
        self, q_len: int, kv_len: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> float:
        """Return the exact fraction of pairs that the mask allows at default positions; 0 if there are no pairs.

        Cost: the same as `count`.
        """
        pairs = math.prod(self._sizes(q_len, kv_len, batch, heads))
        return self.count(q_len, kv_len, batch=batch, heads=heads) / pairs if pairs else 0.0

    def picture(self, q_len: int = 8, kv_len: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """Return the mask as text, one line per query: ``1`` for keys that it may attend to, ``.`` for all others.

        Raises:
            ValueError: there are more than 128 rows or columns, or the batch item or head does not exist.
        """
        batch, head = size_of("batch", batch), size_of("head", head)
        for name, index, most in zip(("batch", "head"), (batch, head), self.shape, strict=True):
            if most > 1 and index >= most:
                raise value_error(name, f"be below {most}, the number in the mask's shape", index)
        items, heads = max(self.shape[0], batch + 1), max(self.shape[1], head + 1)
        shape = self._sizes(q_len, kv_len, items, heads)
        if max(shape[2:]) > _LARGEST_PICTURE:
            got = f"{shape[2]} and {shape[3]}"
            raise value_error("q_len and kv_len", f"be 0 to {_LARGEST_PICTURE}", got)
        rows = self.to_dense(q_len, kv_len, batch=items, heads=heads)
        return "\n".join(" ".join("1" if allowed else "." for allowed in row) for row in rows[batch, head].tolist())

    def after(self, length: int) -> Mask:
        """Return the mask shifted by ``length`` positions, for example to make room for class tokens.

        Position p is treated as p - length. The first ``length`` positions are outside the mask: they attend to nothing
        and are never visible. To make them visible, join another mask:
        ``Neighborhood(8, 8, 1).after(1) | Global([0])`` is a grid after a class token.

        >>> from saccade.masks import Causal, Global
        >>> print((Causal().after(1) | Global([0])).picture(4))
        1 1 1 1
        1 1 . .
        1 1 1 .
        1 1 1 1

        Raises:
            ValueError: ``length`` is not an int of at least 0.
        """
        length = size_of("length", length)
        return masks.After(self, length) if length else self

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return the result of `allows`, so that the mask can be passed to FlexAttention as a ``mask_mod``."""
        return self.allows(b, h, q, kv)

    def __and__(self, other: Mask) -> Mask:
        return masks.And((self, _other_mask(other, "&")))

    def __or__(self, other: Mask) -> Mask:
        return masks.Or((self, _other_mask(other, "|")))

    def __invert__(self) -> Mask:
        return masks.Not(self)

    def __pow__(self, layers: int) -> Mask:
        """Return the mask of all pairs connected through several layers with this mask: ``(I or mask) ** layers``.

        The identity ``I`` stands for the residual connection of each layer.

        >>> from saccade.masks import Causal, Global, Window
        >>> Window(3, 1) ** 4, (Window(3, 3) | Global([0])) ** 2
        (Window(left=12, right=4), Full())

        The result is exact at every length and computed in O(parts of the mask). `saccade.masks.receptive_field` lists
        the supported forms; other masks raise an `UnsupportedError`. If ``layers`` is not an int of at least 1, a
        ``ValueError`` is raised.
        """
        return masks.through_layers(self, layers)

    def __rand__(self, other: object) -> Mask:
        return masks.And((_other_mask(other, "&"), self))

    def __ror__(self, other: object) -> Mask:
        return masks.Or((_other_mask(other, "|"), self))

    def _sizes(self, q_len: object, kv_len: object, batch: object, heads: object) -> tuple[int, int, int, int]:
        """Validate the sizes of a dense mask. Replace None by the sizes in the `shape` of the mask, or by ``q_len``."""
        sizes: list[int] = []
        for name, size, most in (("batch", batch, self.shape[0]), ("heads", heads, self.shape[1])):
            sizes.append(most if size is None else size_of(name, size))
            if most > 1 and sizes[-1] > most:
                raise value_error(name, f"be at most {most}, the number in the mask's shape", size)
        rows = size_of("q_len", q_len)
        return sizes[0], sizes[1], rows, rows if kv_len is None else size_of("kv_len", kv_len)


def _other_mask(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "wrap a bool tensor as masks.Dense(tensor) and a function as masks.Predicate(function)"
    raise type_error(sign, "join two masks", kind(other), hint=hint)


def _intersection(one: range | None, other: range | None) -> range | None:
    if one is None or other is None:
        return other if one is None else one
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _hull(one: range | None, other: range | None) -> range | None:
    if one is None or other is None:
        return None
    return range(min(one.start, other.start), max(one.stop, other.stop))
