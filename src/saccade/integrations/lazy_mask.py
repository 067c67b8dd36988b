"""LazyMask: a rule that travels through other people's models as a tensor, and is never written out on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from saccade.masks import Mask

__all__ = ["LazyMask", "Placed"]

_SAME = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")


class Placed(NamedTuple):
    """A mask, and where the tokens of one call stand.

    Attributes:
        rule: who may attend to whom, read at positions.
        q_positions, kv_positions: where queries and keys stand, step 1.
    """

    rule: Mask
    q_positions: range
    kv_positions: range


class LazyMask(Tensor):
    """A bool tensor ``[batch, 1, q_len, kv_len]`` without memory that stands for a rule on positions.

    Handed on as it is, it costs nothing. Any operation on it, such as a slice, is done on the mask written out, and
    gives an ordinary tensor: slower, and never wrong.

    Args:
        placed: the rule, and where the tokens stand.
        batch: number of batch items.
        device: where the model computes.

    Cost: no memory. An operation costs batch × q_len × kv_len bytes.
    """

    placed: Placed

    @staticmethod
    def __new__(cls, placed: Placed, batch: int, device: torch.device) -> Self:
        shape = (batch, placed.rule.shape[1], len(placed.q_positions), len(placed.kv_positions))
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.placed = placed
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the last two out, too
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        del types
        if str(func) in _SAME:
            return cls(args[0].placed, args[0].shape[0], args[0].device)
        args, kwargs = tree_map(_written_out, (args, kwargs or {}))
        return func(*args, **kwargs)

    def written_out(self) -> Tensor:
        """The mask as an ordinary bool tensor."""
        rule, q, kv = self.placed
        positions = (torch.arange(span.start, span.stop, device=self.device) for span in (q, kv))
        q_index, kv_index = (x[:, None] if axis == 0 else x for axis, x in enumerate(positions))
        b = torch.arange(self.shape[0], device=self.device)[:, None, None, None]
        h = torch.arange(self.shape[1], device=self.device)[None, :, None, None]
        return rule.allows(b, h, q_index, kv_index).broadcast_to(self.shape).contiguous()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({self.placed.rule}, shape={list(self.shape)})"


def _written_out(x: object) -> object:
    return x.written_out() if isinstance(x, LazyMask) else x
