"""Masks of transformers models in compiled and exported programs; their tensors are read only when attention runs.

A traced program must be valid for any padding, packed sequences and position in a static cache. So the program receives
the arguments of the model's mask function as tensors, and the attention operator builds the mask from them with the
same functions as in eager mode.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.integrations.lazy_mask import Placed, dense_at
from saccade.integrations.mask_functions import dense_mask, placed_rule
from saccade.integrations.packed_patterns import with_pattern
from saccade.integrations.tensor_masks import both
from saccade.integrations.traced_functions import MaskFunction, MaskFunctionData
from saccade.masks import Full, Mask
from saccade.masks.convert.deferred_masks import AtOrigin, Pairs, Shape, Unread
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "attention"  # the name in error messages


@dataclasses.dataclass(frozen=True, eq=False)
class CallMask(Unread):
    """The mask of one attention call of a transformers model in a traced program.

    Args:
        function: the model's mask function.
        q_offset: position of the first query, an int or a tensor with one element; None aligns the last query with the
            last key.
        kv_offset: position of the first key.
        lengths: numbers of queries and keys for which the mask was built; None if they are those of the call.
        is_token: bool ``[batch, tokens]``, False at padding; None without padding.
        allowed: bool tensors ``[batch | 1, heads | 1, q_len | 1, kv_len | 1]`` that further restrict the allowed pairs.
        pattern: the layer's pattern, which counts positions from the start of each sequence; None if there is none.
        position_ids: int ``[batch, q_len]``, the position of each token in its sequence; None if unknown.
        ends: boundaries of packed sequences, as the model passes them to other kernels; the mask must have them too.
    """

    function: MaskFunctionData
    q_offset: int | Tensor | None = None
    kv_offset: int = 0
    lengths: tuple[int, int] | None = None
    is_token: Tensor | None = None
    allowed: tuple[Tensor, ...] = ()
    pattern: Mask | None = None
    position_ids: Tensor | None = None
    ends: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        fields = (self.q_offset, self.is_token, *self.allowed, self.position_ids, *self.ends)
        return tuple(x for x in fields if isinstance(x, Tensor))

    def restricted(self, allowed: Tensor) -> CallMask:
        """Return the mask restricted to pairs that are True in ``allowed``."""
        return _with(self, allowed=(*self.allowed, allowed))

    def with_ends(self, ends: tuple[Tensor, ...]) -> CallMask:
        """Return a copy of the mask that raises an error, when read, unless it separates sequences at ``ends``."""
        return _with(self, ends=ends) if ends else self

    def with_pattern(self, pattern: Mask | None, position_ids: Tensor | None) -> CallMask:
        """Return the mask combined with a layer's pattern."""
        return self if pattern is None else _with(self, pattern=pattern, position_ids=position_ids)

    def read(self, shape: Shape) -> AtOrigin:
        placed = self._placed(*shape[2:])
        q, kv = placed.q_positions, placed.kv_positions
        for allowed in self.allowed:
            dense = dense_at(allowed.expand(*allowed.shape[:-1], len(kv)), q, kv)
            placed = placed._replace(rule=both(placed.rule, dense))
        texts = placed.texts or ((len(kv),),)
        if any(texts != (tuple(end.diff().tolist()),) for end in self.ends):
            reason = "the model passes cu_seq_lens, but its mask does not separate these texts"
            raise unsupported("a packed batch", [reason], hint="pass position_ids that restart with each text")
        rule = placed.rule
        if self.pattern is not None:
            rule = with_pattern(placed, self.pattern, self.position_ids)
        return AtOrigin(rule, (q.start, kv.start))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if self.pattern is not None and not self.pattern.is_relative:
            reason = f"{self.pattern} counts from the start of each text, which is known only at run time"
            raise unsupported("a dense mask", [reason])
        allowed = self.function.function()(b, h, q, kv)
        if self.is_token is not None:
            allowed = allowed & self.is_token[b, kv]
        return allowed if self.pattern is None else allowed & self.pattern.allows(b, h, q, kv)

    def at_indices(self, pairs: Pairs, shape: Shape) -> Tensor:
        first = shape[3] - shape[2] if self.q_offset is None else self.q_offset
        allowed = self.allows(pairs.b, pairs.h, pairs.q + first, pairs.kv + self.kv_offset)
        for other in self.allowed:
            allowed = allowed & other
        return allowed

    def _placed(self, q_len: int, kv_len: int) -> Placed:
        function = self.function.function()
        last = max(kv_len - q_len, 0)  # position of the first query, if the last query is aligned with the last key
        start = last if self.q_offset is None else int(self.q_offset)
        lengths = self.lengths or (q_len, kv_len)
        placed = placed_rule(
            function,
            self.is_token,
            q_length=lengths[0],
            kv_length=lengths[1],
            q_offset=start,
            kv_offset=self.kv_offset,
        )
        if lengths == (q_len, kv_len):
            return placed
        if not isinstance(placed.rule, Full):
            reason = f"the mask was made for {list(lengths)}, but the call has {[q_len, kv_len]}"
            raise unsupported("a mask", [reason])
        # The mask was made for an encoder, with other lengths than this call.
        return Placed(Full(), range(last, last + q_len), range(kv_len))


def _with(mask: CallMask, **changes: Any) -> CallMask:
    fields = {field: getattr(mask, field) for field in _FIELDS}
    return CallMask(**{**fields, **changes})


_FIELDS = tuple(field.name for field in dataclasses.fields(CallMask))

FULL = MaskFunctionData("bidirectional_mask_function")
CAUSAL = MaskFunctionData("causal_mask_function")


def call_mask(
    function: MaskFunction,
    attention_mask: Tensor | None,
    lengths: tuple[int, int],
    offsets: tuple[int | Tensor, int],
) -> CallMask | None:
    """Return the mask of a call for a traced program, or None if the mask function is not transformers' own.

    Args:
        function: the model's mask function.
        attention_mask: ``[batch, tokens]``, True or 1 at tokens; None for no padding.
        lengths: numbers of queries and keys.
        offsets: positions of the first query and of the first key.
    """
    known = MaskFunctionData.of(function)
    if known is None:
        return None
    start = offsets[0]
    if isinstance(start, Tensor):  # a static cache updates its token count in place, before attention runs
        start = start.clone()
    elif not is_tracing():  # so that a function that receives the mask is compiled once for all positions
        start = torch.tensor(start)
    is_token = None if attention_mask is None else attention_mask.bool()
    if is_token is not None and not is_tracing():  # one length for all calls with a static cache
        is_token = F.pad(is_token, (0, max(lengths[1] + offsets[1] - is_token.shape[1], 0)))
    return CallMask(known, start, offsets[1], lengths, is_token)


class TracedMask:
    """A mask in a traced program, which the model's code passes on to its attention.

    Any operation on it runs on the dense mask.

    Args:
        mask: the mask.
        batch: number of batch items.
        device: the device of the model.
    """

    def __init__(self, mask: CallMask, batch: int, device: torch.device | str):
        self.mask, self.batch, self.on = mask, batch, device

    def dense(self) -> Tensor:
        """Return the allowed pairs, bool ``[batch, 1, q_len, kv_len]``."""
        mask = self.mask
        assert mask.lengths is not None
        assert mask.q_offset is not None
        offsets = (mask.q_offset, mask.kv_offset)
        return dense_mask(mask.function.function(), mask.is_token, mask.lengths, offsets, self.batch, self.on)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)
