"""Nested tensors as packed sequences: one sequence contains all items, which a mask separates.

Both of torch's layouts, jagged and strided, are supported. Axis legend: items B · tokens of all items T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.positions.positioned_mask import check_domain
from saccade.masks import Documents, Full, Mask, Predicate, as_mask
from saccade.positions import Bias
from saccade.scores import Modified, Score
from saccade.support.errors import unsupported, value_error


def is_nested(*tensors: object) -> bool:
    """Return whether any of the arguments is a nested tensor."""
    for x in tensors:  # noqa: SIM110  a generator would cost one call per tensor
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


def check_dense(**tensors: object) -> None:
    """Raise an error for nested tensors, in functions that support only dense tensors.

    Raises:
        UnsupportedError: one of the tensors is nested.
    """
    for name, x in tensors.items():
        if is_nested(x):
            reason = f"{name} is a nested tensor, but only dense tensors are supported here"
            hint = "saccade.attention and MultiHeadAttention take nested tensors; saccade.pack(x.unbind()) packs one"
            raise unsupported("a nested tensor", [reason], hint=hint)


def check_nested(mask: object, bias: object, score: object, **others: object) -> None:
    """Raise an error for arguments that cannot be combined with nested tensors, because items have different lengths.

    Raises:
        UnsupportedError: the mask or the bias is a tensor, the score is a function, or one of ``others`` is not None.
    """
    reasons = [f"{name}= cannot be combined with nested tensors" for name, x in others.items() if x is not None]
    if isinstance(mask, Tensor):
        reasons.append("mask= is a tensor, but each item has its own matrix; use a rule on positions")
    if bias is not None and not isinstance(bias, Bias):
        reasons.append("bias= is a tensor, but each item has its own matrix; use a positions.Bias")
    if isinstance(score, Modified) or (callable(score) and not isinstance(score, Score)):
        reasons.append("score= is a function of items and positions, which packing changes")
    if reasons:
        raise unsupported("a nested tensor", reasons, hint="torch.nested.to_padded_tensor(x, 0.0) is a dense tensor")


class Nested(NamedTuple):
    """The nested query, key and value of one call to attention, each packed into a single sequence.

    Attributes:
        query, key, value: all items concatenated into one batch item.
        q_lengths, kv_lengths: number of tokens in each item.
        like: the original nested query.
        axis: token axis of an item, 0 or 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    like: Tensor
    axis: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, axis: int) -> Nested:
        """Pack the nested tensors of one call to attention.

        Args:
            query, key, value: nested tensors with items ``[len, width]`` or ``[heads, len, head_dim]``.
            axis: token axis of an item, 0 or 1.

        Raises:
            ValueError: only some of the tensors are nested, or their items do not match.
        """
        tensors = {"query": query, "key": key, "value": value}
        packed: dict[str, Tensor] = {}
        lengths: dict[str, tuple[int, ...]] = {}
        for name, x in tensors.items():
            if not is_nested(x):
                raise value_error(name, "be nested, because another input is", "a dense tensor")
            packed[name], lengths[name] = (
                (packed["key"], lengths["key"]) if name == "value" and value is key else _packed(name, x, axis)
            )
        if len(lengths["query"]) != len(lengths["key"]) or lengths["key"] != lengths["value"]:
            got = f"{len(lengths['query'])}, {len(lengths['key'])} and {len(lengths['value'])} items"
            rule = "contain the same number of items, with equal lengths of key and value in each"
            raise value_error("query, key and value", rule, got)
        return cls(packed["query"], packed["key"], packed["value"], lengths["query"], lengths["key"], query, axis)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of nested items, and the largest numbers of queries and keys in an item."""
        return len(self.q_lengths), max(self.q_lengths, default=0), max(self.kv_lengths, default=0)

    def mask(self, mask: object, heads: int) -> Mask:
        """Return the mask for the packed sequence, which applies the user's mask to each nested item separately.

        Args:
            mask: anything that `as_mask` accepts, except a tensor.
            heads: number of heads of the matrix.
        """
        batch, q_len, kv_len = self.shape
        rule = as_mask(mask, (batch, heads, q_len, kv_len))
        for lengths in set(zip(self.q_lengths, self.kv_lengths, strict=True)):
            if all(lengths):
                check_domain(rule, None, None, *lengths)
        if isinstance(rule, Full):
            return Documents(self._blocks)
        is_alike = rule.shape[0] == 1 and not rule.calls_functions
        if is_alike and self._blocks == self.kv_lengths:
            return Documents(self._blocks, rule)
        return Documents(self._blocks) & Predicate(_Packed(rule, self._table()))

    @property
    def positions(self) -> dict[str, Tensor]:
        """Position arguments of attention over the packed sequence, int64 ``[T]`` each; empty if defaults apply."""
        if self.q_lengths == self.kv_lengths:
            return {}
        device, longest = self.query.device, self._blocks
        # In an item's block, the last query is aligned with the last key, so that distances are those of the item.
        lengths = {"q_positions": self.q_lengths, "kv_positions": self.kv_lengths}
        return {name: _at_end(item_lengths, longest).to(device) for name, item_lengths in lengths.items()}

    def item_positions(self) -> tuple[Tensor, Tensor]:
        """Return the query and key positions within nested items, int64 ``[T]``. The last query is at the last key."""
        pairs = (self.q_lengths, self.kv_lengths)
        each = [
            torch.cat([torch.arange(block - n, block) for n, block in zip(lengths, self._blocks, strict=True)])
            for lengths in pairs
        ]
        return each[0].to(self.query.device), each[1].to(self.query.device)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Convert a result for the packed queries to a nested tensor in the query's layout.

        Args:
            packed: ``[1, T, ...]``, or ``[1, heads, T, ...]`` if ``axis`` is 1.
        """
        tokens = packed[0]
        if self.like.layout != torch.jagged:
            return torch.nested.as_nested_tensor(list(tokens.split(self.q_lengths, self.axis)))
        like: Any = self.like
        is_whole = like.lengths() is None  # no gaps between the items
        offsets = like.offsets() if is_whole else torch.tensor((0, *self.q_lengths), device=tokens.device).cumsum(0)
        nested = torch.nested.nested_tensor_from_jagged(tokens.movedim(self.axis, 0), offsets)
        return nested.transpose(1, 2) if self.axis else nested

    @property
    def _blocks(self) -> tuple[int, ...]:
        """Number of positions that each nested item occupies in the packed sequence."""
        return tuple(map(max, self.q_lengths, self.kv_lengths))

    def _table(self) -> Tensor:
        """Return the nested item at each packed position, and the position of its first key, int64 ``[2, len]``."""
        rows, start = [], 0
        for item, (block, kv_len) in enumerate(zip(self._blocks, self.kv_lengths, strict=True)):
            rows.append(torch.tensor([[item], [start + block - kv_len]]).expand(2, block))
            start += block
        return torch.cat(rows, 1).to(self.query.device)


class _Packed:
    """A mask on positions within nested items, evaluated at positions in the packed sequence."""

    def __init__(self, rule: Mask, table: Tensor):
        self.rule, self.table = rule, table

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        item, first = self.table.to(q.device)[:, q.clamp(0, self.table.shape[1] - 1)]
        return self.rule.allows(item, h, q - first, kv - first)


def _packed(name: str, x: Tensor, axis: int) -> tuple[Tensor, tuple[int, ...]]:
    items = x.unbind()
    words = "[len, width]" if axis == 0 else "[heads, len, head_dim]"
    if not items:
        raise value_error(name, "contain at least one item", "none")
    shapes = [tuple(item.shape) for item in items]
    if any(len(shape) != axis + 2 for shape in shapes) or len({s[:axis] + s[axis + 1 :] for s in shapes}) > 1:
        rule = f"be a nested tensor of items {words} that differ in length only"
        raise value_error(name, rule, f"items {', '.join(map(str, map(list, shapes[:3])))}")
    return torch.cat(items, axis)[None], tuple(shape[axis] for shape in shapes)


def _at_end(lengths: tuple[int, ...], blocks: tuple[int, ...]) -> Tensor:
    """Return the packed positions of all tokens of nested items, aligned with the end of each item's block."""
    ends = torch.tensor(blocks).cumsum(0).tolist()
    return torch.cat([torch.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)])
