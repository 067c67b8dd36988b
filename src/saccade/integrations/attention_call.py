"""AttentionCall: what a transformers model hands to its attention function, as the ingredients of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from saccade.attention import AttentionMatrix
from saccade.errors import unsupported
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.tensor_masks import both, rule_of_tensor
from saccade.masks import Causal, Full, Mask, Predicate, Window, from_key_padding_mask

__all__ = ["AttentionCall"]

# What models hand on that says nothing about who attends to whom: facts of the whole model, or said by the mask too.
_SAID_ELSEWHERE = frozenset(
    {
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)
_WAY_OUT = {
    "output_attentions": "saccade.record(model) gives the matrices of every layer without building them",
    "cu_seq_lens_q": "packed sequences are told apart by position_ids, without a cache",
    "cache": "paged caches have kernels of their own",
}


class AttentionCall(NamedTuple):
    """One call of a transformers attention function, read as the ingredients of a matrix.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        placed: who may attend to whom, and where the tokens stand.
        scale, softcap, bias, sink_logit: see `saccade.attention`.
    """

    query: Tensor
    key: Tensor
    placed: Placed
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    sink_logit: Tensor | None

    @classmethod
    def of(
        cls,
        where: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Any,
        facts: Mapping[str, Any],
        *,
        is_flash: bool = False,
    ) -> AttentionCall:
        """Read a call.

        Args:
            where: the user's function, for error messages.
            module: the attention layer.
            query, key: as the function gets them; key heads are not repeated.
            attention_mask: a `LazyMask`; a bool or float tensor that broadcasts to ``[batch, heads, q_len, kv_len]``;
                FlexAttention's BlockMask; or None, where a layer that is causal says so itself.
            facts: all other arguments that bear on the matrix.
            is_flash: whether padding and window come instead of a mask, as flash attention takes them.

        Raises:
            UnsupportedError: something that changes the matrix in a way that is not known here.
        """
        # The flag of the call comes before that of the layer; models leave it out where both agree.
        flag = facts.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if flag is None else flag)
        facts = {
            name: fact for name, fact in facts.items() if not (fact is None or fact is False or name == "is_causal")
        }
        scale, softcap = facts.pop("scaling", None), facts.pop("softcap", None)
        bias, sink = facts.pop("position_bias", None), facts.pop("s_aux", None)
        unknown = [name for name in facts if name not in _SAID_ELSEWHERE]
        if unknown:
            reasons = [f"the model hands on {name}, which is not known here" for name in unknown]
            hint = next((_WAY_OUT[name] for name in unknown if name in _WAY_OUT), "another attention implementation")
            raise unsupported(where, type(module).__name__, reasons, hint=hint)
        if query.shape[0] != key.shape[0]:  # learned queries, the same for all items
            query = query.expand(key.shape[0], -1, -1, -1)
        if is_flash:
            window, ids, added = facts.get("sliding_window"), facts.get("position_ids"), None
            lengths = query.shape[2], key.shape[2]
            placed = _placed_for_flash(where, *lengths, attention_mask, window, ids, is_causal=is_causal)
        else:
            placed, added = _placed(where, query, key, attention_mask, is_causal)
        if bias is not None:
            bias = bias[..., : key.shape[2]]
            added = bias if added is None else bias + added
        return cls(query, key, placed, scale, softcap, added, sink)

    def matrix(self, mask: Mask | None = None) -> AttentionMatrix:
        """The attention matrix of this call; its mask joined with another one."""
        rule, q, kv = self.placed
        rule = rule if mask is None else both(rule, mask)
        # A dense mask is read at positions too: it was made for these tokens.
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


def _placed(
    where: str, query: Tensor, key: Tensor, attention_mask: Any, is_causal: bool
) -> tuple[Placed, Tensor | None]:
    """The mask, and what it adds to the scores."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(attention_mask, LazyMask):
        placed = attention_mask.placed
        if (len(placed.q_positions), len(placed.kv_positions)) != (q_len, kv_len):
            reason = f"the mask was made for {list(attention_mask.shape[2:])}, and there are {[q_len, kv_len]}"
            raise unsupported(where, "a mask", [reason])
        return placed, None
    last = range(kv_len - q_len, kv_len)
    if attention_mask is None:
        if not (is_causal and q_len > 1):
            # Where queries stand says nothing to a rule that allows all; a mask that is joined may ask.
            return Placed(Full(), last if q_len <= kv_len else range(q_len), range(kv_len)), None
        # Without a mask, torch's flag lets the first query see the first key; so does the model that gave none.
        return Placed(Causal(), range(q_len), range(kv_len)), None
    if isinstance(attention_mask, BlockMask):
        return Placed(Predicate(attention_mask.mask_mod), range(q_len), range(kv_len)), None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        got = type(attention_mask).__name__
        got += f" of shape {list(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else ""
        raise unsupported(where, "a mask", [f"it is a {got}, which is not known here"])
    rule, added = rule_of_tensor(attention_mask[..., :kv_len], kv_len)
    return Placed(rule, last, range(kv_len)), added


def _placed_for_flash(
    where: str,
    q_len: int,
    kv_len: int,
    padding: Tensor | None,
    sliding_window: int | None,
    position_ids: Tensor | None,
    *,
    is_causal: bool,
) -> Placed:
    """The mask of a call of transformers' ``flash_attention_2`` and its like, which get padding and a window instead.

    Args:
        where: the user's function, for error messages.
        q_len, kv_len: lengths; the last query stands at the last key.
        padding: ``[batch, kv_len]``, True or 1 at tokens; None for no padding.
        sliding_window: how many keys back a query sees, itself included; None for all.
        position_ids: ``[batch | 1, q_len]``, which tell packed documents apart where there is no padding.
        is_causal: whether later keys are hidden.

    Raises:
        UnsupportedError: packed documents.
    """
    packed = padding is None and position_ids is not None and position_ids.dim() == 2 and q_len > 1
    if packed and position_ids is not None and bool((position_ids.diff(dim=1) != 1).any()):
        reason = "flash attention tells packed documents apart by kernels of its own"
        raise unsupported(where, "a packed batch", [reason], hint='set_attn_implementation("sdpa") to record it')
    rule: Mask = Causal() if is_causal else Full()
    if sliding_window is not None and kv_len > sliding_window:
        near = Window(sliding_window - 1, sliding_window - 1)
        rule = rule & near if is_causal else near
    if padding is not None:
        rule = both(rule, from_key_padding_mask(padding[:, -kv_len:] == 0))
    return Placed(rule, range(kv_len - q_len, kv_len), range(kv_len))
