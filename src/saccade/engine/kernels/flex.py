"""FlexAttention, compiled for a GPU, with a BlockMask made from what the mask knows about itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saccade.engine.dropout import Dropped
from saccade.engine.ingredients import Ingredients
from saccade.engine.kernels.kernel import NO_FORWARD_DERIVATIVES, Kernel
from saccade.engine.memory import Cost, Held
from saccade.transforms import has_forward_derivatives

__all__ = ["Flex"]

_NARROWEST = 16  # head width that torch compiles
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Flex(Kernel):
    """Exact attention by torch's FlexAttention: blocks of pairs that no row needs are left out.

    It is made for GPUs; on a CPU torch has no gradients for it, and no lse.

    Cost: time grows with the blocks of 128 × 128 pairs that the mask needs; memory beside inputs and outputs is that of
    the list of blocks. The first call for a mask, a kind of bias and a dtype compiles, which takes seconds.

    Reference: Dong et al. 2024, arXiv:2412.05496.
    """

    name = "flex"
    devices: tuple[str, ...] = ("cuda",)

    def reasons(self, given: Ingredients, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        why = []
        if given.device.type not in self.devices:
            why.append(f"it runs on {' and '.join(self.devices)}, not on {given.device.type}")
        if given.query.dtype not in _DTYPES:
            why.append(f"it has no {str(given.query.dtype).removeprefix('torch.')}")
        if 0 in given.shape or given.query.shape[3] < _NARROWEST:
            why.append(f"it takes heads at least {_NARROWEST} wide, and no empty inputs")
        if dropout_p > 0.0:
            why.append("it has no dropout")
        if given.tile_function is not None:
            why.append("it has dot products only, and maps that end in one")
        if given.modification is not None:
            why.append("it calls no function of scores")
        if given.rule.asks_functions:
            why.append("it compiles masks, and a user's function may not compile")
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        return tuple(why)

    def cost(self, given: Ingredients, value_dim: int, dropout_p: float) -> Cost:
        """The pairs of the plan, and the lists of blocks."""
        batch, heads, q_len, kv_len = given.shape
        results = batch * heads * q_len * (value_dim * given.query.dtype.itemsize + 4)
        blocks = 8 * batch * (q_len // 128 + 1) * (kv_len // 128 + 1)
        return Cost(len(given.plan), self.pairs(given), Held(results + blocks, results))

    def forward(self, given: Ingredients, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415  imports a compiler

        from saccade.engine.kernels.block_mask import blocks_of  # noqa: PLC0415  likewise

        rule, shape, origin = given.rule, given.shape, given.origin
        blocks = None if given.plan.is_full else blocks_of(rule, shape, origin, given.device)
        out, aux = self.function()(
            given.query,
            given.key,
            value,
            score_mod=_modified(given),
            block_mask=blocks,
            scale=given.scale,
            enable_gqa=given.query.shape[1] != given.key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse

    def function(self) -> Any:
        """FlexAttention as it is to be called."""
        return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415  imports a compiler

    return torch.compile(flex_attention)


def _modified(given: Ingredients) -> Any:
    """What happens to a scaled score before the mask, as FlexAttention asks for it: softcap, then bias."""
    softcap, bias = given.softcap, given.bias
    if softcap is None and bias is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias.at(b, h, q, kv)

    return modified
