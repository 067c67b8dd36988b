"""Run saccade's exact kernels, with any mask, inside the models of Hugging Face transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.integrations.attention_arguments import check_no_weights
from saccade.integrations.attention_call import AttentionCall
from saccade.integrations.lazy_mask import LazyMask, mask_dtype
from saccade.integrations.mask_functions import MaskFunction, place
from saccade.integrations.run_matrices import report_matrix
from saccade.integrations.transformers_layers import from_transformers
from saccade.masks import Full, Mask
from saccade.support.errors import kind, missing_extra, type_error, unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["MaskOfLayer", "from_transformers", "install"]

CALLED_AS = "install"  # in errors

MaskOfLayer = Callable[[nn.Module], Mask | None]
"""A function from the attention module to the pattern of this layer."""

# Parts of names that transformers interprets, and that only its own functions support.
_TAKEN = ("sdpa", "flash", "paged", "/", "|", ":", "@")
_OWN_NAMES = ("eager", "flex_attention")


def install(name: str = "saccade", *, mask: Mask | MaskOfLayer | None = None) -> str:
    """Register saccade's exact attention with transformers: then ``model.set_attn_implementation("saccade")``.

    The model keeps its pattern (causal, sliding window, bidirectional, packed documents, padding), which reaches the
    kernel as a rule and is never written out. Scale, softcap, sinks, position bias, grouped heads and dropout are
    supported. Other arguments that change attention raise, such as ``output_attentions=True``; arguments that no
    attention function reads are ignored, as transformers ignores them. Logits and gradients equal those of the eager
    implementation. A token that may attend to nothing (padding on the left) gets 0 where eager gives it the mean of
    all values. Code that reads the mask itself (GIT, Falcon) gets the float mask of transformers, and runs as in eager.

    Args:
        name: the name of the implementation. Several names may be registered, each with its mask; registering a name
            again replaces its implementation.
        mask: a pattern that is joined with the model's by ``&`` in every layer; or a function that takes the
            attention module and returns its mask, or None. The pattern counts from the first token of each text, so
            that packed texts, and texts padded on the left, give what each gives alone. Texts are packed where the
            model's mask keeps them apart, or where ``position_ids`` restart at 0, with a cache too. A mask of one
            batch (`Documents`, `Padding`, `PerItem`) counts on the whole row. A model with cross-attention needs the
            function: one pattern would apply between two texts, too.

    Returns:
        The name, for ``set_attn_implementation`` or ``from_pretrained(..., attn_implementation=...)``.

    Raises:
        ImportError: transformers is not installed.
        TypeError: ``mask`` is neither a mask nor a function, or ``name`` is no str.
        ValueError: a name with a special meaning in transformers.
        UnsupportedError: when the model runs, if its code reads the mask itself, which would lack ``mask``.

    Cost: nothing. Each call of a layer costs what `saccade.attention` does.

    Example:
        >>> from saccade import masks
        >>> install("saccade-near", mask=masks.Window(128, 0))
        'saccade-near'

    Reference: transformers' AttentionInterface and AttentionMaskInterface, version 5.14 or newer.
    """
    check(name, mask)
    mask_function = lazy_mask if mask is None else functools.partial(lazy_mask, has_pattern=True)
    return registered(name, Attention(name, mask), mask_function)


def registered(
    name: str, function: Callable[..., Any], mask_function: Callable[..., LazyMask | None] | None = None
) -> str:
    """Register an attention function and a mask function with transformers, and return the name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  imported when used
    except ImportError as error:
        raise missing_extra("transformers", "transformers") from error
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
) -> LazyMask | None:
    """Return the rule instead of a tensor; the arguments are those of transformers' mask functions.

    Like them, it returns None for a mask that hides nothing, for code that reads its mask.

    ``has_pattern``: the attention function joins a pattern with the mask, so code that reads the mask would miss it.
    """
    del kwargs  # conditions for leaving out a causal mask, which is never done here
    if mask_function is None:
        raise value_error("mask_function", "be given", None)
    placed = place(
        mask_function,
        attention_mask,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        one_by_one=use_vmap,
    )
    dtype, refused = mask_dtype(config, dtype), ""
    if allow_is_bidirectional_skip and not has_pattern and dtype != torch.bool and isinstance(placed.rule, Full):
        return None
    if has_pattern and dtype != torch.bool:
        refused = f"models of {kind(config)} read their mask themselves, and would miss the pattern of install()"
    return LazyMask(placed, batch_size, torch.device(device), dtype, refused)


class Attention:
    """The attention function, as transformers calls it."""

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
        matrix = call.matrix(self._mask_of(module))
        report_matrix(matrix)
        out = matrix.matmul(value, dropout_p=float(dropout))
        return out.transpose(1, 2).contiguous(), None

    def _mask_of(self, module: nn.Module) -> Mask | None:
        if self._mask is None or isinstance(self._mask, Mask):
            config = getattr(module, "config", None)
            if self._mask is not None and getattr(config, "is_encoder_decoder", False):
                reason = "the model has cross-attention, for which one mask for all layers is not meant"
                hint = "install(mask=function), a function from the attention module to its mask or None"
                raise unsupported(f"{self._mask}", [reason], hint=hint)
            return self._mask
        return check_type("mask", self._mask(module), (Mask, type(None)), "return a saccade mask or None")


def check(name: str, mask: object) -> None:
    """Raise unless these are a valid name of an implementation and a valid mask argument."""
    check_type("name", name, str, "be a str")
    taken = [part for part in _TAKEN if part in name]
    if taken or name in _OWN_NAMES or not name:
        rule = f"be new, and without {', '.join(_TAKEN)}"
        hint = "transformers treats such names as its own functions"
        raise value_error("name", rule, repr(name), hint=hint)
    if mask is not None and not isinstance(mask, Mask) and (isinstance(mask, type | Tensor) or not callable(mask)):
        rule = "be a saccade mask, a function of the attention module, or None"
        raise type_error("mask", rule, kind(mask))
