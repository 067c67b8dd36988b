"""The two attention functions of transformers that run on any device: eager and sdpa."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.peer import Library, Peer, imported

__all__ = ["TRANSFORMERS", "attend"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None, eager: bool
) -> Tensor:
    """Call the function as a layer of Llama does, with the mask that transformers makes for it.

    An eager mask is 0 and the most negative number of the dtype; for sdpa it is a bool mask.
    """
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = query.shape[1] // key.shape[1], False
    scaling = query.shape[3] ** -0.5 if scale is None else scale
    if eager:
        function = imported("transformers.models.llama.modeling_llama").eager_attention_forward
        least = torch.finfo(query.dtype).min
        passed = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, least)
    else:
        function, passed = imported("transformers.integrations.sdpa_attention").sdpa_attention_forward, mask
    out, _ = function(module.eval(), query, key, value, passed, scaling=scaling, dropout=0.0)
    return out.transpose(1, 2)


TRANSFORMERS = Library(
    "transformers",
    "transformers",
    (
        # Its softmax is always float32.
        Peer(
            "eager_attention_forward",
            partial(attend, eager=True),
            gqa=True,
            dtype=torch.float32,
            left_out=("gradcheck",),
        ),
        Peer("sdpa_attention_forward", partial(attend, eager=False), gqa=True),
    ),
)
