"""Modules that stand in for other people's attention: their weights under their names, called as theirs were called."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

from torch import Tensor, nn

from saccade.arguments import check_holds_values, is_causal_bias
from saccade.errors import unsupported
from saccade.integrations.tensor_masks import both, rule_of_tensor
from saccade.integrations.torch_calls import projected, rule_of, with_added_keys
from saccade.masks import Causal, Full, Mask
from saccade.masks.causal_bias import from_causal_bias
from saccade.matrix import DENSE_LIMIT, Matrix
from saccade.mechanisms import Mechanism, Softmax

__all__ = ["FusedAttention", "TorchAttention", "is_fused"]

_FUSED = ("qkv", "proj", "num_heads")  # as timm names the parts of its attentions


class _StandIn(nn.Module):
    """Weights of another module, a mechanism, and a pattern for self-attention."""

    def __getattr__(self, name: str) -> Any:  # parts of the other module
        return super().__getattr__(name)

    def __init__(self, module: nn.Module, mask: Mask | None, mechanism: Mechanism | None):
        super().__init__()
        _take_over(self, module)
        self.mask = mask
        self.mechanism = Softmax() if mechanism is None else copy.deepcopy(mechanism)
        like = next(module.parameters())
        self.mechanism.to(like.device, like.dtype)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: Mask, bias: Tensor | None, dropout_p: float
    ) -> tuple[Tensor, Matrix]:
        """Output ``[batch, len, width]``, and the matrix that made it."""
        joined = None if isinstance(rule, Full) else rule
        reasons = self.mechanism.reasons(joined) if joined is not None else ()
        if reasons:
            raise unsupported("replace_attention", type(self.mechanism).__name__, reasons)
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        matrix: Matrix = mechanism(query, key, mask=joined)
        out = matrix.matmul(value, dropout_p=dropout_p if self.training else 0.0)
        return out.transpose(1, 2).flatten(2), matrix

    def extra_repr(self) -> str:
        return f"mask={self.mask}"


class TorchAttention(_StandIn):
    """Stands in for an ``nn.MultiheadAttention``: the same weights and flags, called in the same way.

    A pattern holds for self-attention, ``query is key``; cross-attention sees all.

    Args:
        module: whose weights these are; its parameters themselves, not copies.
        mask: a pattern, joined with the masks of each call by ``&``.
        mechanism: which matrix; `saccade.mechanisms.Softmax` when None. It is copied.

    Cost: that of the mechanism. Weights are built where ``need_weights`` asks for them, up to a limit.
    """

    _NAMES = ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn")

    def __init__(self, module: nn.MultiheadAttention, mask: Mask | None = None, mechanism: Mechanism | None = None):
        super().__init__(module, mask, mechanism)
        for name in self._NAMES:
            setattr(self, name, getattr(module, name))
        for name in ("bias_k", "bias_v"):
            if name not in self._parameters:  # torch has a plain None there
                self.register_parameter(name, None)
        self._qkv_same_embed_dim = False  # torch's layers then call us, instead of compiled code that knows our weights

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``: in its layouts, with its masks, where True means *ignore*."""
        if is_causal and attn_mask is None:
            reason = "is_causal is a hint about attn_mask, which is not given"
            raise unsupported(
                "nn.MultiheadAttention", "is_causal=True", [reason], hint="mask=masks.Causal() is a pattern"
            )
        is_self, is_single = query is key, query.dim() == 2
        x = [
            own[None] if is_single else own if self.batch_first else own.transpose(0, 1) for own in (query, key, value)
        ]
        q, k, v = projected(self, *x)
        assert v is not None  # it was asked for
        kv_len = x[1].shape[1]
        num_added = k.shape[2] - kv_len
        rule, bias = rule_of(attn_mask, key_padding_mask, (*q.shape[:3], k.shape[2]), num_added)
        if is_self and self.mask is not None:
            rule = both(with_added_keys(self.mask, q.shape[2], kv_len, num_added), rule)
        out, matrix = self.attend(q, k, v, rule, bias, self.dropout)
        out = self.out_proj(out)
        out = out[0] if is_single else out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        if math.prod(matrix.shape) > DENSE_LIMIT:
            reason = f"{math.prod(matrix.shape):,} weights are asked for"
            hint = "need_weights=False; saccade.record(model) keeps matrices without building them"
            raise unsupported("nn.MultiheadAttention", "need_weights=True", [reason], hint=hint)
        weights = matrix.to_dense().to(out.dtype)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights[0] if is_single else weights


class FusedAttention(_StandIn):
    """Stands in for a self-attention with one projection ``qkv``, as timm's vision transformers have.

    Args:
        module: with ``qkv``, ``proj`` and ``num_heads``; also with ``q_norm``, ``k_norm``, ``attn_drop``, ``norm`` and
            ``proj_drop``.
        mask: a pattern.
        mechanism: which matrix; `saccade.mechanisms.Softmax` when None. It is copied.
    """

    def __init__(self, module: nn.Module, mask: Mask | None = None, mechanism: Mechanism | None = None):
        super().__init__(module, mask, mechanism)
        self.num_heads = module.num_heads
        if isinstance(self.mechanism, Softmax) and self.mechanism.scale is None:
            scale = getattr(module, "scale", None)
            self.mechanism.scale = float(scale) if isinstance(scale, float | int) else None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``x [batch, len, width]``; a bool mask with True = may attend, or float terms; and whether it is causal."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self._part("q_norm", q), self._part("k_norm", k)
        rule, bias = self._rule_of(attn_mask, k.shape[2])
        for pattern in (self.mask, Causal() if is_causal else None):
            rule = rule if pattern is None else both(pattern, rule)
        dropped = getattr(self, "attn_drop", None)
        out, _ = self.attend(q, k, v, rule, bias, getattr(dropped, "p", 0.0))
        return self._part("proj_drop", self.proj(self._part("norm", out)))

    def _rule_of(self, attn_mask: Tensor | None, length: int) -> tuple[Mask, Tensor | None]:
        if attn_mask is None:
            return Full(), None
        if is_causal_bias(attn_mask):
            return from_causal_bias(attn_mask, length, length, "attention", "attn_mask"), None
        check_holds_values("attention", "attn_mask", attn_mask)
        return rule_of_tensor(_four(attn_mask), length)

    def _part(self, name: str, x: Tensor) -> Tensor:
        part = getattr(self, name, None)
        made: Tensor = x if part is None else part(x)
        return made


def is_fused(module: nn.Module) -> bool:
    """Whether a module has the parts of a timm-style attention, and is called with one tensor."""
    if not all(hasattr(module, name) for name in _FUSED) or not isinstance(module.num_heads, int):
        return False
    needed = [
        own
        for own in inspect.signature(type(module).forward).parameters.values()
        if own.default is inspect.Parameter.empty
    ]
    return len(needed) == 2 and isinstance(module.qkv, nn.Linear) and isinstance(module.proj, nn.Linear)


def _take_over(own: nn.Module, module: nn.Module) -> None:
    """The parameters, parts and hooks of a module, under their names."""
    for name, parameter in module._parameters.items():
        own.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        own.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, part in module._modules.items():
        own.add_module(name, part)
    # All hooks and what is known of each, in the same dicts: who registered one can remove it. Those before loading are
    # bound to the module itself.
    hooks = {name: kept for name, kept in module.__dict__.items() if "_hook" in name}
    own.__dict__.update(hooks | {"_load_state_dict_pre_hooks": own._load_state_dict_pre_hooks})
    own.train(module.training)


def _four(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
