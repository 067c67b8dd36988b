"""SinkWindowCache: stores the first tokens (attention sinks) and a window of the last tokens, in constant memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade import masks
from saccade.caches.call_arguments import Call, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.ring_buffer import RingCache
from saccade.caches.state_tensors import Leaf
from saccade.matrix import AttentionMatrix
from saccade.positions import Rotary
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import unsupported, value_error
from saccade.support.numerics import any_true
from saccade.support.validation import check_int, check_type


class SinkWindowCache(RingCache):
    r"""A cache of the first ``sink_tokens`` tokens and the last ``window`` tokens. All others are forgotten.

    Without ``rotary``, tokens keep their positions, and the result equals dense attention with the layer's mask ``&
    masks.streaming(sink_tokens, window)``, for any causal mask, any split of the sequence into calls, and ragged
    batches. The distance from the query to the first tokens then grows without limit.

    With the layer's ``rotary``, positions are counted from the start of the cache, as if the sequence consisted only of
    the stored tokens. For each token, the result equals dense attention over these tokens at positions 0, 1, 2, ….
    However long the stream, no distance is larger than in a sequence of ``sink_tokens + window`` tokens. Distances
    within the window do not change, so only the first tokens are rotated again, to positions just before the window.

    Tokens that leave the window are lost, except for the first ones.

    Args:
        sink_tokens: number of positions to keep at the beginning, at least 0.
        window: number of tokens to keep at the end, including the newest, at least 1.
        rotary: the layer's rotary encoding, to count positions from the start of the cache; None to leave them
            unchanged.

    Raises:
        ValueError: a size is out of range, positions do not increase, or the batch size changes.
        UnsupportedError: a crop that would need tokens that are already forgotten. With ``rotary``, also a mask that
            depends on more than distances, positions other than 0, 1, 2, …, or a call beyond ``sink_tokens + window``
            with several tokens and a mechanism other than a softmax without a sink logit.

    Cost: memory for ``batch * kv_heads * (sink_tokens + window) * (head_dim + value_dim)`` elements, allocated by the
    first call, and 8 bytes for each slot of each item (or of all items together if they have the same positions). A
    step reads all stored tokens.

    Example:
        >>> from saccade import masks, mechanisms
        >>> softmax, cache = mechanisms.Softmax(), SinkWindowCache(2, 4)
        >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        >>> parts = [cache.attend(softmax, *(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(20)]
        >>> dense = softmax(q, k, mask=masks.streaming(2, 4)) @ v
        >>> torch.allclose(torch.cat(parts, 2), dense, atol=1e-5), cache.nbytes
        (True, 816)

    Reference: Xiao et al. 2024, arXiv:2309.17453, section 3.2 (StreamingLLM).
    """

    settings = ("sink_tokens", "window", "rotary")
    leaves: ClassVar[tuple[Leaf, ...]] = (
        *RingCache.leaves[:2],
        # With rotary, the first keys at their original positions. Their copies in the slots are rotated again.
        Leaf("sinks", "batch kv_heads sink_tokens head_dim", is_optional=True),
        *RingCache.leaves[2:],
    )
    equivalent_run = "the dense run with masks.streaming(sink_tokens, window)"

    def __init__(self, sink_tokens: int, window: int, *, rotary: Rotary | None = None):
        rule, hint = "be a saccade Rotary or None", "the layer's own, for instance mha.rotary"
        self.sink_tokens, self.window = check_int("sink_tokens", sink_tokens, 0), check_int("window", window)
        self.rotary = None if rotary is None else check_type("rotary", rotary, Rotary, rule, hint=hint)
        super().__init__(masks.streaming(self.sink_tokens, self.window), self.sink_tokens, self.window)

    def advance(self, call: Call) -> Tensor:
        if self.rotary is not None:
            self._check_inside(call, call.table)
        return super().advance(call)

    def _step_mask(self, call: Call, q_table: Tensor, table: Tensor) -> tuple[masks.Mask | None, Tensor, Tensor]:
        if self.rotary is None:
            return super()._step_mask(call, q_table, table)
        return call.mask, *self._rotate_sinks(self.rotary, q_table, table)

    def _unrotated_keys(self) -> Tensor:
        keys = self._state["keys"]
        return torch.cat([self._state["sinks"], keys[:, :, self.sink_tokens :]], 2) if "sinks" in self._state else keys

    def _attend_many(self, call: Call, table: Tensor) -> Tensor:
        """Attend with several tokens. Each of them sees the sinks and a separate window."""
        if self.rotary is None or not any_true(table >= self._slots):
            return super()._attend_many(call, table)
        keys, values, kv_positions = self._stored_and_new(call, table)
        self._traffic = Traffic(keys.nbytes + values.nbytes, call.key.nbytes + call.value.nbytes)
        near, first = masks.Causal() & masks.Window(self.window - 1, 0), masks.Prefix(max(1, self.sink_tokens))
        parts: list[tuple[Tensor, masks.Mask, GivenPositions]] = [
            (call.query, near & ~first if self.sink_tokens else near, call.positions)
        ]
        if self.sink_tokens:
            # Moving a key forward by n positions has the same effect as moving the query back by n.
            inside = table.clamp(max=self._slots - 1)
            parts.append((self.rotary(self.rotary.unrotate(call.query, table), inside), masks.Causal() & first, inside))
        outs, lses = [], []
        for query, visible, q_positions in parts:
            mask = visible if call.mask is None else visible & call.mask
            part = call.mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
            if not isinstance(part, AttentionMatrix) or not part.is_stochastic:
                reason = (
                    "beyond sink_tokens + window tokens, a call with several tokens "
                    "merges two softmaxes, and this is not a softmax"
                )
                hint = "pass one token per call, or use no rotary"
                raise unsupported(type(call.mechanism).__name__, [reason], hint=hint)
            outs.append(part.matmul(values, dropout_p=call.dropout_p))
            lses.append(part.lse)
        return _merge_softmaxes(outs, lses)

    def _new_leaves(self, key: Tensor, value: Tensor) -> dict[str, tuple[Tensor, int]]:
        leaves = super()._new_leaves(key, value)
        return leaves | {"sinks": (key, self.sink_tokens)} if self.rotary is not None and self.sink_tokens else leaves

    def _rotate_sinks(self, rotary: Rotary, q_table: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the sinks to just before the window. Return the positions of the query and slots in the cache."""
        shift = (q_table - (self._slots - 1)).clamp(min=0)  # [batch | 1, 1]; 0 for an item whose new token is padding
        first = torch.arange(table.shape[1], device=table.device) < self.sink_tokens
        inside = torch.where(first | (table < 0), table, table - shift)
        if self.sink_tokens:
            positions = torch.arange(self.sink_tokens, device=table.device)
            rotated = rotary(rotary.unrotate(self._state["sinks"], positions), positions + shift)
            self._state["keys"][:, :, : self.sink_tokens] = rotated
        return q_table - shift, inside

    def _check_inside(self, call: Call, table: Tensor) -> None:
        """Raise an error unless tokens can be renumbered by their place in the cache, as ``rotary`` requires."""
        reasons = []
        if call.mask is not None and not call.mask.is_relative:
            reasons.append(f"positions are counted inside the cache, and {call.mask} depends on more than distances")
        before = torch.as_tensor(self._tokens.after, device=table.device).expand(len(table))
        count = (table >= 0).cumsum(1) - 1 + before[:, None]
        if any_true((table >= 0) & (table != count)):
            reasons.append("positions are counted inside the cache, and the tokens are not at positions 0, 1, 2, …")
        if reasons:
            raise unsupported("rotary", reasons, hint="SinkWindowCache without rotary does not change positions")

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_new(query, key, value)
        if self.rotary is not None and self.rotary.head_dim != key.shape[3]:
            raise value_error("rotary", f"be made for head_dim {key.shape[3]}", self.rotary.head_dim)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        return super()._sizes(contents) | {"sink_tokens": self.sink_tokens}

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        if self.rotary is not None and self.rotary.head_dim != state["keys"].shape[3]:
            raise contents.misfit("rotary")
        if ("sinks" in state) != (self.rotary is not None and self.sink_tokens > 0):
            raise contents.misfit("tensor sinks")
        super()._check_restored(contents, state)


def _merge_softmaxes(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Merge the outputs of softmaxes over disjoint sets of keys (sinks and window) into one output."""
    lse = torch.stack(lses)
    total = lse.logsumexp(0)
    shares = (lse - total).nan_to_num(nan=0.0).exp() * ~total.isinf()
    return (shares[..., None] * torch.stack(outs)).sum(0).to(outs[0].dtype)
