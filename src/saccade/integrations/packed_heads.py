"""Unpack query heads that transformers' "sdpa" attention packs into the rows of the key head that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.integrations.redirected_call import Attend
from saccade.integrations.sdpa_matrix import run_sdpa, sdpa_arguments


def is_packed(inputs: list[Tensor], module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an SDPA call passes the query heads of a single token as if they were several queries.

    transformers does this in decoding steps with grouped heads and a mask.

    Args:
        inputs: the tensors that the running module was called with.
        module: the running module.
        args, kwargs: the arguments of the call.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    arguments = sdpa_arguments(args, kwargs)
    query, key = arguments["query"], arguments["key"]
    if not isinstance(groups, int) or groups < 2 or query.dim() != 4 or query.shape[2] != groups:
        return False
    if query.shape[1] != key.shape[1] or arguments.get("enable_gqa"):
        return False
    states = next((x for x in inputs if x.is_floating_point() and x.dim() == 3), None)
    return states is not None and states.shape[1] == 1


def run_packed(args: tuple[Any, ...], kwargs: Mapping[str, Any], attend: Attend) -> Tensor | None:
    """Unpack an SDPA call into one query for each query head, and evaluate it using ``attend``.

    Returns:
        The packed output, ``[batch, kv_heads, groups, value_dim]``; None if ``attend`` returns None.
    """
    arguments = sdpa_arguments(args, kwargs)
    query, mask = arguments["query"], arguments.get("attn_mask")
    batch, kv_heads, groups, width = query.shape
    arguments["query"] = query.reshape(batch, kv_heads * groups, 1, width)
    if mask is not None and mask.dim() == 4 and (mask.shape[1] > 1 or mask.shape[2] > 1):
        mask = mask.expand(-1, kv_heads, groups, -1)
        arguments["attn_mask"] = mask.reshape(mask.shape[0], kv_heads * groups, 1, -1)
    out = run_sdpa((), arguments | {"enable_gqa": True}, attend)
    return None if out is None else out.reshape(batch, kv_heads, groups, -1)
