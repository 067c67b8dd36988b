"""What flash attention makes of its arguments: it gets padding and a window instead of a mask."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import unsupported
from saccade.integrations.lazy_mask import Placed
from saccade.integrations.tensor_masks import both
from saccade.masks import Causal, Full, Mask, Window, from_key_padding_mask

__all__ = ["place_for_flash"]


def place_for_flash(
    where: str,
    q_len: int,
    kv_len: int,
    padding: Tensor | None,
    sliding_window: int | None,
    position_ids: Tensor | None,
    *,
    is_causal: bool,
) -> Placed:
    """The mask of a call of transformers' ``flash_attention_2`` and its like.

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
