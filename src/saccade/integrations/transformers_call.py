"""AttentionCall: a call through transformers' attention interface, converted to the inputs of an attention matrix."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from saccade.integrations.attention_arguments import ENDS, check_ends, check_supported
from saccade.integrations.lazy_mask import LazyMask, Placed, dense_at
from saccade.integrations.packed_patterns import with_pattern
from saccade.integrations.tensor_masks import both, mask_of_tensor
from saccade.integrations.traced_mask import CAUSAL, FULL, CallMask, TracedMask
from saccade.masks import Causal, Full, Mask, Predicate, Window, from_key_padding_mask
from saccade.matrix import AttentionMatrix
from saccade.support.errors import unsupported


class AttentionCall(NamedTuple):
    """A call to a transformers attention function, converted to the inputs of an attention matrix.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        placed: the mask rule and the token positions; in a traced program, a mask that is read at run time.
        scale, softcap, bias, sink_logit: see `saccade.attention`.
        position_ids: int ``[batch, q_len]``, the position of each token in its sequence; None if the model passes none.
    """

    query: Tensor
    key: Tensor
    placed: Placed | CallMask
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    sink_logit: Tensor | None
    position_ids: Tensor | None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Any,
        options: Mapping[str, Any],
        *,
        is_flash: bool = False,
    ) -> AttentionCall:
        """Convert the arguments of a transformers attention function.

        Args:
            module: the attention layer.
            query, key: as passed to the function, before key heads are repeated.
            attention_mask: a `LazyMask`; a bool or float tensor that broadcasts to ``[batch, heads, q_len, kv_len]``;
                FlexAttention's BlockMask; or None, in which case ``is_causal`` of the call or layer applies.
            options: the other keyword arguments. Unknown ones are ignored, as in transformers' own functions, unless
                the model's own attention function reads them.
            is_flash: whether the call passes padding and a window instead of a mask, as for flash attention.

        Raises:
            UnsupportedError: an argument changes the matrix in an unsupported way.
        """
        # The flag of the call overrides that of the layer; models omit it where both agree.
        flag, is_traced = options.get("is_causal"), torch.compiler.is_compiling()
        is_causal = bool(getattr(module, "is_causal", True) if flag is None else flag)
        options = {name: x for name, x in options.items() if not (x is None or x is False or name == "is_causal")}
        ends = {name: options.pop(name) for name in ENDS if name in options}
        check_supported(module, options)
        if query.shape[0] != key.shape[0]:  # learned queries, shared by all batch items
            query = query.expand(key.shape[0], -1, -1, -1)
        placed: Placed | CallMask
        lengths = query.shape[2], key.shape[2]
        if is_flash:
            window, ids, added = options.get("sliding_window"), options.get("position_ids"), None
            placed = _placed_for_flash(*lengths, attention_mask, window, ids, is_causal=is_causal)
        elif is_traced:
            traced, added = _traced(query, key, attention_mask, is_causal)
            placed = traced.with_ends(tuple(ends.values()))
        else:
            placed, added = _placed(query, key, attention_mask, is_causal)
        if isinstance(placed, Placed):
            check_ends(module, ends, placed)
        if "indices" in options:
            placed = placed.restricted(_selected(options["indices"], *lengths))
        if "block_indices" in options:
            size = getattr(getattr(module, "indexer", None), "block_size", 1)
            placed = placed.restricted(_in_selected_blocks(options["block_indices"], *lengths, query.shape[1], size))
        bias = options.get("position_bias")
        if bias is not None:
            bias = bias[..., : key.shape[2]]
            added = bias if added is None else bias + added
        scale, softcap, sink = options.get("scaling"), options.get("softcap"), options.get("s_aux")
        return cls(query, key, placed, scale, softcap, added, sink, options.get("position_ids"))

    def matrix(self, mask: Mask | None = None) -> AttentionMatrix:
        """Return the attention matrix of the call, restricted by a pattern whose positions restart in each sequence."""
        placed, q, kv = self.placed, None, None
        rule: Mask
        if isinstance(placed, CallMask):
            rule = placed.with_pattern(mask, self.position_ids)
        else:
            rule, q, kv = placed[:3]
            if mask is not None:
                rule = with_pattern(placed, mask, self.position_ids)
        return AttentionMatrix(
            self.query,
            self.key,
            rule,
            scale=self.scale,
            softcap=self.softcap,
            bias=self.bias,
            sink_logit=self.sink_logit,
            q_positions=q,
            kv_positions=kv,
        )


def uses_attention_interface(module: nn.Module) -> bool:
    """Return whether a module's source file gets its attention function from transformers' interface."""
    return hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")


def _placed(query: Tensor, key: Tensor, attention_mask: Any, is_causal: bool) -> tuple[Placed, Tensor | None]:
    """Convert ``attention_mask`` of a transformers call to a mask rule with positions, and a score bias."""
    q_len, kv_len = query.shape[2], key.shape[2]
    # A rule that allows every pair ignores query positions, but a pattern combined with it may depend on them.
    q, kv = range(kv_len - q_len, kv_len) if q_len <= kv_len else range(q_len), range(kv_len)
    if isinstance(attention_mask, LazyMask) and not attention_mask.may_contain_bias:
        placed = attention_mask.placed
        if (len(placed.q_positions), len(placed.kv_positions)) == (q_len, kv_len):
            return placed, None
        if isinstance(placed.rule, Full):  # the mask was made for an encoder, with different lengths than this call
            return Placed(Full(), q, kv), None
        reason = f"the mask was made for {list(attention_mask.shape[2:])}, but the call has {[q_len, kv_len]}"
        raise unsupported("a mask", [reason])
    if attention_mask is None:
        if not (is_causal and q_len > 1):
            return Placed(Full(), q, kv), None
        # Without a mask, torch's flag aligns the first query with the first key, and so does the model.
        return Placed(Causal(), range(q_len), kv), None
    if isinstance(attention_mask, BlockMask):
        return Placed(Predicate(attention_mask.mask_mod), range(q_len), kv), None
    _check_mask(attention_mask)
    allowed, added = mask_of_tensor(attention_mask[..., :kv_len])
    rule = Full() if allowed is None else dense_at(allowed.expand(*allowed.shape[:-1], kv_len), q, kv)
    return Placed(rule, q, kv), added


def _traced(query: Tensor, key: Tensor, attention_mask: Any, is_causal: bool) -> tuple[CallMask, Tensor | None]:
    """Convert ``attention_mask`` of a transformers call in a traced program to a mask and a score bias."""
    if isinstance(attention_mask, TracedMask):
        return attention_mask.mask, None
    if isinstance(attention_mask, LazyMask) and attention_mask.traced is not None:
        return cast("CallMask", attention_mask.traced), None
    if attention_mask is None:
        return (CallMask(CAUSAL, 0) if is_causal and query.shape[2] > 1 else CallMask(FULL)), None
    _check_mask(attention_mask)
    allowed, added = mask_of_tensor(attention_mask[..., : key.shape[2]])
    assert allowed is not None  # while tracing, values cannot be read
    return CallMask(FULL, allowed=(allowed,)), added


def _check_mask(attention_mask: Any) -> None:
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        got = type(attention_mask).__name__
        got += f" of shape {list(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else ""
        raise unsupported("a mask", [f"it is a {got}, which is not supported here"])


def _selected(indices: Tensor, q_len: int, kv_len: int) -> Tensor:
    """Convert the key indices of an indexer (DeepSeek-V3.2) to a mask, bool ``[batch, 1, q_len, kv_len]``.

    Args:
        indices: int ``[batch, q_len, selected]``, the indices of the selected keys.
        q_len, kv_len: numbers of queries and keys.
    """
    if indices.dim() != 3 or indices.shape[1] != q_len:
        reason = f"its indices have shape {list(indices.shape)}, not [batch, {q_len}, selected]"
        raise unsupported("an indexer", [reason])
    is_selected = torch.zeros(len(indices), q_len, kv_len, dtype=torch.bool, device=indices.device)
    return is_selected.scatter(2, indices.long(), True)[:, None]


def _in_selected_blocks(indices: Tensor, q_len: int, kv_len: int, heads: int, size: int) -> Tensor:
    """Convert selected key blocks (MiniMax-M3) to a mask, bool ``[batch, heads, q_len, kv_len]``.

    Args:
        indices: int ``[batch, key heads, q_len, selected]``, the indices of the selected blocks, -1 for unused entries.
        q_len, kv_len: numbers of queries and keys.
        heads: number of query heads; query heads that share a key head also share the selected blocks.
        size: number of keys in a block.
    """
    if indices.dim() != 4 or indices.shape[2] != q_len or heads % indices.shape[1]:
        reason = f"its block_indices have shape {list(indices.shape)}, not [batch, key heads, {q_len}, selected]"
        raise unsupported("an indexer", [reason])
    count = -(-kv_len // size)
    is_selected = torch.zeros(*indices.shape[:3], count + 1, dtype=torch.bool, device=indices.device)
    is_selected = is_selected.scatter(3, indices.long().masked_fill(indices < 0, count), True)[..., :count]
    return is_selected.repeat_interleave(size, 3)[..., :kv_len].repeat_interleave(heads // indices.shape[1], 1)


def _placed_for_flash(
    q_len: int,
    kv_len: int,
    padding: Tensor | None,
    sliding_window: int | None,
    position_ids: Tensor | None,
    *,
    is_causal: bool,
) -> Placed:
    """Build the mask of a call to ``flash_attention_2`` or a similar function, from its padding and window.

    Args:
        q_len, kv_len: numbers of queries and keys; the last query has the position of the last key.
        padding: ``[batch, kv_len]``, True or 1 at tokens; None for no padding.
        sliding_window: number of most recent keys that a query sees, including its own key; None for all keys.
        position_ids: ``[batch | 1, q_len]``; they separate packed documents if there is no padding.
        is_causal: whether later keys are masked.

    Raises:
        UnsupportedError: the call contains packed documents.
    """
    packed = padding is None and position_ids is not None and position_ids.dim() == 2 and q_len > 1
    if packed and position_ids is not None and bool((position_ids.diff(dim=1) != 1).any()):
        reason = "flash attention separates packed documents by its own kernels"
        raise unsupported("a packed batch", [reason], hint='set_attn_implementation("sdpa") to record it')
    rule: Mask = Causal() if is_causal else Full()
    if sliding_window is not None and kv_len > sliding_window:
        near = Window(sliding_window - 1, sliding_window - 1)
        rule = rule & near if is_causal else near
    if padding is not None:
        rule = both(rule, from_key_padding_mask(padding[:, -kv_len:] == 0))
    return Placed(rule, range(kv_len - q_len, kv_len), range(kv_len))
