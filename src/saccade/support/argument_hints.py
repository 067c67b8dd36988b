"""Argument hints: helpful errors for calls with wrong arguments, such as the argument names of another library.

Python's message names the unexpected keyword, but does not suggest the intended one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from saccade.support.errors import type_error

F = TypeVar("F", bound=Callable[..., Any])

_CAUSAL = "mask=masks.Causal(), or masks.Causal() & another mask"
_WINDOW = (
    "mask=masks.Window(left, right), or masks.from_sliding_window(...) for the values of transformers or FlashAttention"
)
_WEIGHTS = "AttentionMatrix(query, key, ...) gives the weights lazily; saccade.record(model) records those of a model"
_PACKED = "saccade.pack(list of tensors), or mask=masks.from_cu_seqlens(cu_seqlens, masks.Causal())"
_LAYOUT = "batch comes first: attention takes [batch, heads, len, head_dim], layers [batch, len, embed_dim]"
_GROUPS = "omit it: key and value may have fewer heads than the query if their number divides the query's"

FOREIGN_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    "attn_mask": "mask= takes a bool tensor, True = may attend; pass terms that are added to scores as bias=",
    "attention_mask": "mask=masks.from_attention_mask(attention_mask)",
    "key_padding_mask": "mask=masks.from_key_padding_mask(key_padding_mask); here True = may attend",
    "src_key_padding_mask": "mask=masks.from_key_padding_mask(...); here True = may attend",
    "src_mask": "mask=; here True = may attend",
    "tgt_mask": "mask=; here True = may attend",
    "memory_mask": "encoded_mask=; here True = may attend",
    "memory_key_padding_mask": "encoded_mask=masks.from_key_padding_mask(...); here True = may attend",
    "attn_bias": "bias=",
    "dropout": "dropout_p=",
    "attention_dropout": "dropout_p=",
    **dict.fromkeys(("enable_gqa", "num_key_value_groups"), _GROUPS),
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions", "return_attention"), _WEIGHTS),
    **dict.fromkeys(("batch_first", "layout"), _LAYOUT),
    **dict.fromkeys(("window_size", "sliding_window", "window"), _WINDOW),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "max_seqlen_q", "max_seqlen_k"), _PACKED),
    **dict.fromkeys(("softmax_scale", "scaling", "temperature"), "scale=, the factor of the scores"),
    **dict.fromkeys(("logits_soft_cap", "soft_cap", "softcapping"), "softcap="),
    **dict.fromkeys(("sinks", "s_aux", "attention_sink"), "sink_logit=, or masks.streaming(sinks, window) for tokens"),
    "alibi_slopes": "bias=positions.ALiBi(heads)",
    "score_mod": "score= takes a function (score, b, h, q, kv) -> score directly",
    "block_mask": "mask=masks.from_block_mask(block_mask)",
    "mask_mod": "mask= takes a function (b, h, q, kv) -> bool directly",
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_aux"), "attention_with_lse(...)"),
    **dict.fromkeys(
        ("position_ids", "positions_q"), "positions= in layers, q_positions= and kv_positions= in attention"
    ),
    **dict.fromkeys(("past_key_value", "past_key_values", "use_cache", "layer_past"), "cache=, from saccade.caches"),
    **dict.fromkeys(("device", "dtype"), "move a layer like any module: layer.to(device, dtype)"),
    **dict.fromkeys(("hidden_size", "d_model", "embedding_dim", "dim"), "embed_dim="),
    **dict.fromkeys(("nhead", "num_attention_heads", "n_heads", "heads"), "num_heads="),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), "num_kv_heads="),
    **dict.fromkeys(("kv_lora_rank", "compress_dim"), "latent_dim="),
    "q_lora_rank": "query_latent_dim=",
    "qk_rope_head_dim": "rotary_dim=, a part of head_dim=",
    "qk_nope_head_dim": "head_dim=, which is qk_nope_head_dim + qk_rope_head_dim",
    "v_head_dim": "value_dim=",
    "inv_freq": "scaling=positions.Frequencies(inv_freq)",
    "projection_matrix": "directions=",
    **dict.fromkeys(("dim_feedforward", "intermediate_size", "ffn_dim"), "hidden_dim="),
    **dict.fromkeys(("kdim", "vdim"), "context_dim=, one width for keys and values"),
    "add_bias_kv": "not supported; saccade.replace_attention(model) preserves such a module's weights and outputs",
    "add_zero_attn": "mechanism=mechanisms.Softmax(sink_logit=num_heads), which is the same with a trainable logit",
    "bias_k": "not supported; saccade.replace_attention(model) preserves such a module's weights and outputs",
    "bias": "projection_bias= in layers; a term added to the scores is bias= of attention or a mechanism",
    "training": "dropout_p=p if training else 0.0; layers follow train() and eval()",
    **dict.fromkeys(("seq_len", "n", "length", "size"), "masks are rules on positions and have no length"),
}


def argument_hints(foreign_names: Mapping[str, str] | None = None, /, **hints: str) -> Callable[[F], F]:
    """Decorate a function or a class so that calls with wrong arguments raise an error with a hint.

    A function on a hot path takes ``**unknown`` instead and raises `unexpected_argument`, which adds no stack frame.

    Args:
        foreign_names: hints for the argument names of other libraries, by name; `FOREIGN_NAMES` if None.
        hints: further hints by argument name, for required arguments and for arguments specific to this function.
    """
    known_hints = {**(FOREIGN_NAMES if foreign_names is None else foreign_names), **hints}

    def decorate(target: F) -> F:
        if isinstance(target, type):
            setattr(target, "__init__", _with_hints(target.__dict__["__init__"], known_hints, hints))  # noqa: B010  mypy
            return target
        return cast("F", _with_hints(target, known_hints, hints))

    return decorate


def _with_hints(
    function: Callable[..., Any], hints: Mapping[str, str], of_missing: Mapping[str, str]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # raised inside the function
            refusal = _call_error(_name_of(function), inspect.signature(function), args, kwargs, hints, of_missing)
            if refusal is None:
                raise
            raise refusal from None

    return call


def unexpected_argument(unknown: Mapping[str, object], function: Callable[..., Any]) -> TypeError:
    """Return the error, with a hint, for the first keyword argument that ``function`` does not know."""
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    return _error_of_name(_name_of(function), next(iter(unknown)), parameters, FOREIGN_NAMES)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for an error message; for ``__init__`` and ``forward``, the name of the class."""
    name = function.__qualname__.rpartition("<locals>.")[2]
    return name.removesuffix(".__init__").removesuffix(".forward")


class ArgumentHints:
    """Mixin that adds argument hints to the ``__init__`` of every subclass."""

    def __init_subclass__(cls, hints: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            argument_hints(**(hints or {}))(cls)


def _call_error(
    function: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hints: Mapping[str, str],
    of_missing: Mapping[str, str],
) -> TypeError | None:
    """Return the error for an unknown name, a surplus positional value or missing values; None if there is none."""
    known = [name for name in signature.parameters if name != "self"]
    for name in kwargs:
        if name not in known:
            return _error_of_name(function, name, known, hints)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [name for name in known if signature.parameters[name].kind is plain]
    count = len(args) - ("self" in signature.parameters)
    if count > len(positional):
        rule = f"be at most {len(positional)}" if positional else "be none"
        hint = hints.get("more") or f"by name: {', '.join(f'{name}=' for name in known[len(positional) :])}"
        return type_error(
            "positional arguments", rule, count, hint=hint if known or "more" in hints else None, where=function
        )
    missing = [name for name in known[count:] if name not in kwargs and _is_required(signature.parameters[name])]
    if not missing:
        return None
    of_first = next((of_missing[name] for name in missing if name in of_missing), None)
    names = " and ".join([", ".join(missing[:-1]), missing[-1]] if len(missing) > 1 else missing)
    return type_error(names, "be given", "nothing", hint=of_first, where=function)


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return parameter.default is parameter.empty and parameter.kind in kinds


def _error_of_name(function: str, name: str, known: Sequence[str], hints: Mapping[str, str]) -> TypeError:
    hint = hints.get(name)
    is_name = hint is not None and hint.endswith("=") and hint[:-1].isidentifier()
    if hint is None or (is_name and hint[:-1] not in known):
        hint = f"its parameters are {', '.join(known)}" if known else None
    return type_error("an argument", "be one of its parameters", f"{name}=", hint=hint, where=function)
