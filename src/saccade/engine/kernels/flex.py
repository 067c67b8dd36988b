"""Flex: FlexAttention, compiled for a GPU, with a BlockMask built from the bounds of the mask."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request, Verdict, disabled_reasons, reasons_unless_dot_product
from saccade.engine.memory_accounting import Cost, MemoryUse
from saccade.support.torch_modes import is_transformed, unobserved

_NARROWEST = 16  # smallest head width that torch compiles
_FEW_PAIRS = 1 << 25  # estimated, not measured: from this number on, a thousand calls repay the compilation
_MOST_KINDS = 64  # cached graphs; beyond this number, torch would run the definition, which takes n² memory
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Flex(Kernel):
    """Exact attention with torch's FlexAttention, which skips blocks without visible pairs.

    It is meant for GPUs: on a CPU, torch provides neither its gradients nor its lse.

    Cost: time grows with the number of 128 × 128 blocks that the mask needs. Beyond inputs and outputs, memory is
    needed for the list of blocks. The first call for each mask, kind of bias and dtype compiles, which takes seconds.

    Reference: Dong et al. 2024, arXiv:2412.05496.
    """

    name = "flex"
    is_checked = True
    has_second_derivatives = False
    supports_masked_rows = False
    devices: tuple[str, ...] = ("cuda",)

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why FlexAttention does not support these inputs, or why ``impl="auto"`` should skip it."""
        why = []
        if inputs.device.type not in self.devices:
            why.append(f"it runs on {' and '.join(self.devices)}, not on {inputs.device.type}")
            if request.impl == "auto":
                return Verdict(tuple(why))
        if inputs.query.dtype not in _DTYPES:
            why.append(f"it has no {str(inputs.query.dtype).removeprefix('torch.')}")
        if 0 in inputs.shape or inputs.query.shape[3] < _NARROWEST:
            why.append(f"it needs heads at least {_NARROWEST} wide, and no empty inputs")
        if request.dropout_p > 0.0:
            why.append("it has no dropout")
        why += reasons_unless_dot_product(inputs)
        if inputs.rule.calls_functions:
            why.append("it compiles masks, and a user's function may not compile")
        if is_transformed():
            why.append("it is not run inside transforms of torch.func")
        should_skip = disabled_reasons(inputs)
        if not inputs.rule.is_value:
            should_skip += ("its mask is not hashable, so its compiled form could not be reused",)
        elif inputs.plan.pairs < _FEW_PAIRS:
            should_skip += (
                f"{inputs.plan.pairs:,} pairs are too few to repay compiling (at least {_FEW_PAIRS:,} are needed)",
            )
        return Verdict(tuple(why), should_skip)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of FlexAttention: the number of pairs, and the bytes of results and block lists."""
        batch, heads, q_len, kv_len = inputs.shape
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + 4)
        blocks = 8 * batch * (q_len // 128 + 1) * (kv_len // 128 + 1)
        return Cost(len(inputs.plan), self.pairs(inputs), MemoryUse(results + blocks, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Run FlexAttention and return its output and lse."""
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415  imports a compiler

        width = value.shape[3]
        value = value if width >= _NARROWEST else F.pad(value, (0, _NARROWEST - width))
        out, aux = self.function()(
            inputs.query,
            inputs.key,
            value,
            score_mod=_score_mod(inputs),
            block_mask=_cached_block_mask(inputs),
            scale=None if inputs.scale == inputs.query.shape[3] ** -0.5 else 1.0,
            enable_gqa=inputs.query.shape[1] != inputs.key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return out if out.shape[3] == width else out[..., :width], aux.lse

    def function(self) -> Any:
        """Return the compiled FlexAttention function."""
        return _compiled_flex()


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415  imports a compiler

    def ours(*tensors: Any, **options: Any) -> Any:
        # Torch counts graphs per function: once a user's flex_attention has reached the limit, torch runs it
        # uncompiled in every torch.compile of it, with n² memory.
        return flex_attention(*tensors, **options)

    options: dict[str, Any] = {"fullgraph": True}  # in one graph, or an error
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:  # torch 2.11
        return _with_recompile_limit(torch.compile(ours, **options))
    return torch.compile(ours, **options | {"recompile_limit": _MOST_KINDS})


def _with_recompile_limit(compiled: Any) -> Any:
    """Wrap compiled FlexAttention so that it runs with recompile limit `_MOST_KINDS`; torch 2.11 has no such option."""
    from torch._dynamo import config  # noqa: PLC0415  imports a compiler

    def called(*tensors: Any, **options: Any) -> Any:
        with config.patch(recompile_limit=_MOST_KINDS):
            return compiled(*tensors, **options)

    return called


def _cached_block_mask(inputs: AttentionInputs) -> Any:
    """Return FlexAttention's BlockMask for the inputs, cached with the plan."""
    from saccade.engine.kernels.block_mask import blocks_of  # noqa: PLC0415  imports a compiler

    key, memo = ("blocks of flex", inputs.device), inputs.plan.memo
    if key not in memo:
        with unobserved():
            memo[key] = blocks_of(inputs.rule, inputs.shape, inputs.origin, inputs.device)
    return memo[key]


def _score_mod(inputs: AttentionInputs) -> Any:
    """Return the ``score_mod`` for FlexAttention, which applies scale, softcap and bias, in this order.

    Scale and softcap are passed as tensors. As Python numbers, they would become constants, so each value would need a
    separate graph, and a changed softcap would not compile at all.
    """
    bias, device = inputs.bias, inputs.device
    is_default = inputs.scale == inputs.query.shape[3] ** -0.5
    scale = None if is_default else torch.full((), inputs.scale, device=device)
    softcap = None if inputs.softcap is None else torch.full((), inputs.softcap, device=device)
    if scale is None and softcap is None and bias is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if scale is not None:
            score = scale * score
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias.at(b, h, q, kv)

    return modified
