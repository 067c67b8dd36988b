"""Classes that make third-party attention modules run on saccade, with object identity and signature unchanged."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engine.nested import Nested, check_dense, is_nested
from saccade.integrations.cross_attention import are_bitwise_equal
from saccade.integrations.lazy_weights import weights_of
from saccade.integrations.mha_inputs import projected, rule_of, with_added_keys
from saccade.integrations.replacement_base import StandIn
from saccade.integrations.tensor_masks import both, rule_of_tensor
from saccade.masks import Causal, Full, Mask
from saccade.masks.convert.as_mask import from_causal_bias
from saccade.mechanisms import Softmax
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_holds_values, is_causal_bias

CALLED_AS = "nn.MultiheadAttention"  # the name in error messages

_FUSED = ("qkv", "proj", "num_heads")  # timm's names for the parts of its attention modules


class TorchAttention(StandIn):
    """An ``nn.MultiheadAttention`` that runs on saccade with the same parameters, flags and signature.

    The mask applies to self-attention only: calls whose query and key are the same tensor or have equal values.

    Attributes:
        is_cross: whether the module is cross-attention; None while unknown.
        is_named: whether the mask was specified for this module by name, so that it applies to every call.

    Cost: the same as for the mechanism. If ``need_weights`` is True, weights are materialised, up to a limit.
    """

    is_cross: bool | None = None
    is_named: bool = False

    def set_up(self) -> None:
        """Add a hook that makes torch's encoder layers call this module instead of their fused code."""
        self.register_forward_pre_hook(keep_in_python)

    def merge_masks(self, *_: Any) -> Any:
        """Raise an error: torch's encoder layer calls this method only if its fused code will bypass this module."""
        reason = "its fused code bypasses the replaced attention, and the hook that prevents this was removed"
        hint = "torch.backends.mha.set_fastpath_enabled(False)"
        raise unsupported("nn.TransformerEncoderLayer", [reason], hint=hint)

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
        """Run like ``nn.MultiheadAttention``, with the same layouts and masks (True means *ignore*)."""
        _check_out_proj(self.out_proj)
        if is_causal and attn_mask is None:
            reason = "is_causal only describes attn_mask, and attn_mask is missing"
            raise unsupported("is_causal=True", [reason], hint="replace_attention(model, mask=masks.Causal())")
        if is_nested(query, key, value):
            _check_nested(self, attn_mask, key_padding_mask)
            return self._of_nested(query, key, value, need_weights, average_attn_weights)
        is_single = query.dim() == 2
        x = [
            tensor[None] if is_single else tensor if self.batch_first else tensor.transpose(0, 1)
            for tensor in (query, key, value)
        ]
        is_self = self.mask is not None and self._is_self(x[0], x[0] if key is query else x[1])
        q, k, v = projected(self, *x)
        assert v is not None  # values were passed
        kv_len = x[1].shape[1]
        num_added = k.shape[2] - kv_len
        q_len, patterns = q.shape[2], [self.mask] if self.mask is not None and is_self else []
        if is_causal_bias(attn_mask):
            patterns.append(from_causal_bias(attn_mask, q_len, kv_len, "attn_mask"))
            attn_mask = None
        rule, bias = rule_of(attn_mask, key_padding_mask, (*q.shape[:3], k.shape[2]))
        for pattern in patterns:
            rule = both(with_added_keys(pattern, q_len, kv_len, num_added), rule)
        out, matrix = self.attend(q, k, v, rule, bias, self.dropout)
        out = self.out_proj(out)
        out = out[0] if is_single else out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        sources = (q, k, *self.mechanism.parameters(), *rule.tensors(), *(() if bias is None else (bias,)))
        return out, weights_of(matrix, average_attn_weights, out.dtype, sources, is_single=is_single)

    def _of_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``nn.MultiheadAttention`` on nested tensors ``[batch, len, width]`` as one packed sequence."""
        if is_tracing():  # a compiled graph cannot read lengths
            outside: Any = torch.compiler.disable(self._of_nested)
            return outside(query, key, value, need_weights, average_attn_weights)
        items = Nested.of(query, key, value, axis=0)
        is_alike = self.mask is not None and (self.is_named or items.q_lengths == items.kv_lengths)
        is_self = is_alike and self._is_self(items.query, items.query if key is query else items.key)
        q, k, v = projected(self, *items[:3])
        assert v is not None  # values were passed
        rule = items.mask(self.mask if is_self else None, self.num_heads)
        out, matrix = self.attend(q, k, v, rule, None, self.dropout, **items.positions)
        out = items.unpacked(self.out_proj(out))
        if not need_weights:
            return out, None
        sources = (q, k, *self.mechanism.parameters(), *rule.tensors())
        return out, weights_of(matrix, average_attn_weights, out.dtype, sources, items=items)

    def _is_self(self, query: Tensor, key: Tensor) -> bool:
        """Return whether a call is self-attention, and store the answer if it determines the kind of the module.

        Once the module is known to be self-attention, query and key may differ, as in an audit that changes only the
        query.

        Args:
            query, key: ``[batch, len, width]``.

        Raises:
            UnsupportedError: the kind of the module is unknown, and the tensors have equal lengths but unequal values.
        """
        if self.is_named:
            return True
        if self.is_cross or query.shape[1] != key.shape[1]:
            return False
        if query is key or self.is_cross is False:
            return True
        if are_bitwise_equal(query, key):
            # Constant inputs, as in a dry run on zeros, do not reveal the kind of the module.
            is_constant = query.numel() == 0 or bool((query == query.flatten()[0]).all())
            self.is_cross = None if is_constant else False
            return True
        reason = "query and key have the same length but differ, so this may be self-attention or cross-attention"
        hint = "replace_attention(..., cross_attention=[names of modules]); [] means that there is none"
        raise unsupported(f"mask={self.mask}", [reason], hint=hint)


class FusedAttention(StandIn):
    """A self-attention module with a single ``qkv`` projection, like timm's, that runs on saccade.

    It has the attributes ``qkv``, ``proj`` and ``num_heads``, and optionally ``q_norm``, ``k_norm``, ``attn_drop``,
    ``norm``, ``proj_drop`` and ``scale``.
    """

    def set_up(self) -> None:
        """Pass the scale of the timm-style module on to the mechanism."""
        scale = getattr(self, "scale", None)
        if isinstance(self.mechanism, Softmax) and self.mechanism.scale is None and isinstance(scale, float | int):
            self.mechanism.scale = float(scale)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Run self-attention on ``x [batch, len, width]``; the mask is bool (True = may attend) or additive."""
        check_dense(x=x)
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
            return from_causal_bias(attn_mask, length, length, "attn_mask"), None
        check_holds_values("attn_mask", attn_mask)
        return rule_of_tensor(_with_four_axes(attn_mask), length)

    def _part(self, name: str, x: Tensor) -> Tensor:
        part = getattr(self, name, None)
        out: Tensor = x if part is None else part(x)
        return out


def _check_nested(module: Any, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
    """Raise an error if a call on nested tensors uses options that require a single matrix for all items."""
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    reasons = [
        f"{name}= cannot be combined with nested tensors, whose items have a matrix each"
        for name, x in masks.items()
        if x is not None
    ]
    if module.bias_k is not None or module.add_zero_attn:
        reasons.append("the layer adds its own keys (add_bias_kv, add_zero_attn)")
    if reasons:
        raise unsupported("a nested tensor", reasons, hint="x.to_padded_tensor(0.0) makes it dense")


def _check_out_proj(layer: Any) -> None:
    """Raise an error if an adapter, such as peft's, wraps ``out_proj``: torch reads only its weight and bias."""
    if type(layer).forward is nn.Linear.forward or not hasattr(layer, "weight"):
        return
    has_more = len([*layer.parameters()]) > 1 + (layer.bias is not None)
    if has_more and not (getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False)):
        reason = "nn.MultiheadAttention reads the weight of out_proj without calling it, so torch ignores the adapter"
        hint = "adapt the whole module, as with peft's target_modules=['self_attn'], or exclude 'out_proj'"
        raise unsupported(f"an adapter on out_proj ({type(layer).__name__})", [reason], hint=hint)


def keep_in_python(module: nn.Module, args: Any) -> None:
    """Do nothing; only the presence of this hook matters, see `TorchAttention.set_up`."""


def is_fused(module: nn.Module) -> bool:
    """Return whether a module has the parts of a timm-style attention module, and takes a single required argument."""
    if not all(hasattr(module, name) for name in _FUSED) or not isinstance(module.num_heads, int):
        return False
    parameters = inspect.signature(type(module).forward).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    return len(needed) == 2 and isinstance(module.qkv, nn.Linear) and isinstance(module.proj, nn.Linear)


def _with_four_axes(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
