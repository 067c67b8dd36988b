"""Run Hugging Face transformers models on saccade's exact kernels, with any mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.integrations.attention_arguments import check_no_weights
from saccade.integrations.lazy_mask import LazyMask, mask_dtype
from saccade.integrations.mask_functions import dense_mask, placed_rule
from saccade.integrations.matrix_hooks import edited_matrix, report_product
from saccade.integrations.tensor_masks import joined
from saccade.integrations.traced_functions import MaskFunction, install_polyfills
from saccade.integrations.traced_mask import TracedMask, call_mask
from saccade.integrations.transformers_call import AttentionCall
from saccade.integrations.transformers_conversion import from_transformers
from saccade.masks import Full, Mask
from saccade.support.errors import kind, missing_extra, type_error, unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["MaskOfLayer", "from_transformers", "install"]

CALLED_AS = "install"  # the name in error messages

MaskOfLayer = Callable[[nn.Module], Mask | None]
"""A function that takes an attention module and returns the mask pattern of its layer, or None."""

# Parts of names to which transformers gives a special meaning, reserved for its own functions.
_RESERVED_PARTS = ("sdpa", "flash", "paged", "/", "|", ":", "@")
_RESERVED_NAMES = ("eager", "flex_attention")


def install(name: str = "saccade", *, mask: Mask | MaskOfLayer | None = None) -> str:
    """Register saccade's exact attention with transformers, for ``model.set_attn_implementation("saccade")``.

    The model keeps its pattern (causal, sliding window, bidirectional, packed documents, padding). The pattern reaches
    the kernel as a rule and is never expanded to a dense mask. Scale, softcap, sinks, position bias, grouped heads and
    dropout are supported. Other arguments that change attention, such as ``output_attentions=True``, raise an error;
    arguments that no attention function reads are ignored, as in transformers. Logits and gradients equal those of the
    eager implementation, except that a token that may attend to nothing (left padding) gets output 0, whereas eager
    returns the mean of all values. Models whose code reads the mask itself (GIT, Falcon) get transformers' float mask
    and run as in eager.

    Args:
        name: the name of the implementation. Several names may be registered, each with its own mask; registering a
            name again replaces its implementation.
        mask: a pattern that is combined with the model's own by ``&`` in every layer; or a function that takes the
            attention module and returns its mask, or None. Positions of the pattern start at the first token of each
            sequence, so that packed or left-padded sequences give the same results as each sequence alone. Sequences
            count as packed if the model's mask separates them, or if ``position_ids`` restart at 0, even with a cache.
            A mask that describes a specific batch (`Documents`, `Padding`, `PerItem`) applies to the full row. A model
            with cross-attention requires a function, because a single pattern would also apply between two sequences.

    Returns:
        The name, for ``set_attn_implementation`` or ``from_pretrained(..., attn_implementation=...)``.

    Raises:
        ImportError: transformers is not installed.
        TypeError: ``mask`` is neither a mask nor a function, or ``name`` is not a str.
        ValueError: the name has a special meaning in transformers.
        UnsupportedError: raised when the model runs, if its own code reads the model's mask and would ignore ``mask``.

    Cost: none. Each call to a layer costs the same as `saccade.attention`.

    Example:
        >>> from saccade import masks
        >>> install("saccade-near", mask=masks.Window(128, 0))
        'saccade-near'

    Reference: transformers' AttentionInterface and AttentionMaskInterface, version 5.14 or newer.
    """
    check(name, mask)
    mask_function = lazy_mask if mask is None else functools.partial(lazy_mask, has_pattern=True)
    return registered(name, Attention(name, mask), mask_function)


def registered(name: str, function: Callable[..., Any], mask_function: Callable[..., Any] | None = None) -> str:
    """Register an attention function and a mask function with transformers, and return the name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  imported when used
    except ImportError as error:
        raise missing_extra("transformers", "transformers") from error
    install_polyfills()
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lazy_mask if mask_function is None else mask_function)
    return name


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    has_pattern: bool = False,
    **kwargs: Any,
) -> LazyMask | TracedMask | Tensor | None:
    """Return a lazy mask instead of a dense tensor; the arguments are those of transformers' mask functions.

    In a traced program, the result is a `TracedMask`; or the dense mask, if the model's code reads the mask or has its
    own mask function. If the model's code reads the mask and every pair is allowed, the result is None, as in
    transformers.

    ``has_pattern`` says whether the attention function combines a pattern with the mask. Model code that reads the mask
    would ignore this pattern.
    """
    del kwargs  # transformers' conditions for omitting a causal mask; here, it is never omitted
    if mask_function is None:
        raise value_error("mask_function", "be given", None)
    dtype, refused, lengths = mask_dtype(config, dtype), "", (q_length, kv_length)
    traced = call_mask(mask_function, attention_mask, lengths, (q_offset, kv_offset))
    if has_pattern and dtype != torch.bool:
        refused = f"models of {kind(config)} read their mask themselves, so they would ignore the pattern of install()"
    if torch.compiler.is_compiling():
        if refused:
            raise unsupported("a compiled model", [refused], hint='set_attn_implementation("eager") for this model')
        if traced is not None and dtype == torch.bool:
            return TracedMask(traced, batch_size, device)
        if has_pattern:
            reason = "its mask is a user function, so the pattern of install() cannot know where texts start"
            raise unsupported("a compiled model", [reason])
        offsets = (q_offset, kv_offset)
        allowed = dense_mask(mask_function, attention_mask, lengths, offsets, batch_size, device, one_by_one=use_vmap)
        if dtype == torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    placed = placed_rule(
        mask_function,
        attention_mask,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        one_by_one=use_vmap,
    )
    if allow_is_bidirectional_skip and not has_pattern and dtype != torch.bool and isinstance(placed.rule, Full):
        return None
    return LazyMask(placed, batch_size, torch.device(device), dtype, refused, traced)


class Attention:
    """Saccade's attention as a function with the signature that transformers expects."""

    def __init__(self, name: str, mask: Mask | MaskOfLayer | None):
        self.__name__, self._mask = name, mask

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        check_no_weights(module, kwargs)
        call = AttentionCall.of(module, query, key, attention_mask, kwargs)
        pattern = self._mask_of(module)
        matrix = edited_matrix(module, lambda more: call.matrix(joined(pattern, more)))
        out = matrix.matmul(value, dropout_p=float(dropout))
        report_product(matrix, value, out, float(dropout))
        return out.transpose(1, 2).contiguous(), None

    def _mask_of(self, module: nn.Module) -> Mask | None:
        if self._mask is None or isinstance(self._mask, Mask):
            config = getattr(module, "config", None)
            if self._mask is not None and getattr(config, "is_encoder_decoder", False):
                reason = "the model has cross-attention, which one mask for all layers cannot describe"
                hint = "install(mask=function), a function from the attention module to its mask or None"
                raise unsupported(f"{self._mask}", [reason], hint=hint)
            return self._mask
        return check_type("mask", self._mask(module), (Mask, type(None)), "return a saccade mask or None")


def check(name: str, mask: object) -> None:
    """Raise an error unless ``name`` and ``mask`` are valid arguments of `install`."""
    check_type("name", name, str, "be a str")
    taken = [part for part in _RESERVED_PARTS if part in name]
    if taken or name in _RESERVED_NAMES or not name:
        rule = f"be a new name without {', '.join(_RESERVED_PARTS)}"
        hint = "transformers reserves such names for its own functions"
        raise value_error("name", rule, repr(name), hint=hint)
    if mask is not None and not isinstance(mask, Mask) and (isinstance(mask, type | Tensor) or not callable(mask)):
        rule = "be a saccade mask, a function of the attention module, or None"
        raise type_error("mask", rule, kind(mask))
