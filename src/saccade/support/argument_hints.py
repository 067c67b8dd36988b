"""Calls that do not fit a signature, answered in our words: what others call an argument, and what is missing.

Python's own sentence says that a keyword is unexpected, and not which one was meant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from saccade.support.errors import type_error

__all__ = ["WORDS", "AnswersCalls", "answers", "answers_class", "unknown"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_CAUSAL = "mask=masks.Causal(), or masks.Causal() & another mask"
_WINDOW = (
    "mask=masks.Window(left, right), or masks.from_sliding_window(...) of what transformers or FlashAttention takes"
)
_WEIGHTS = "AttentionMatrix(query, key, ...) is the weights, lazily; saccade.record(model) keeps those of a model"
_PACKED = "saccade.pack(list of tensors), or mask=masks.from_cu_seqlens(cu_seqlens, masks.Causal())"
_LAYOUT = "batch comes first: attention takes [batch, heads, len, head_dim], layers [batch, len, embed_dim]"
_GROUPS = "leave it out: key and value may have fewer heads than the query, as long as the numbers divide"

WORDS: Mapping[str, str] = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    "attn_mask": "mask= takes a bool tensor, True = may attend; what is added to scores goes to bias=",
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
    "score_mod": "score= takes a function (score, b, h, q, kv) -> score as it is",
    "block_mask": "mask=masks.from_block_mask(block_mask)",
    "mask_mod": "mask= takes a function (b, h, q, kv) -> bool as it is",
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_aux"), "attention_with_lse(...)"),
    **dict.fromkeys(
        ("position_ids", "positions_q"), "positions= in layers, q_positions= and kv_positions= in attention"
    ),
    **dict.fromkeys(("past_key_value", "past_key_values", "use_cache", "layer_past"), "cache=, from saccade.caches"),
    **dict.fromkeys(("device", "dtype"), "layers are moved like any module: layer.to(device, dtype)"),
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
    "add_bias_kv": "there is none; saccade.replace_attention(model) keeps such a module's weights and outputs",
    "add_zero_attn": "mechanism=mechanisms.Softmax(sink_logit=num_heads), which is the same with a trainable logit",
    "bias_k": "there is none; saccade.replace_attention(model) keeps such a module's weights and outputs",
    "bias": "projection_bias= in layers; what is added to scores is bias= of attention, and of a mechanism",
    "training": "dropout_p=p if training else 0.0; layers know it by train() and eval()",
    **dict.fromkeys(("seq_len", "n", "length", "size"), "masks are rules on positions and have no length"),
}


def answers(words: Mapping[str, str] | None = None, /, **hints: str) -> Callable[[F], F]:
    """Decorate a function so that a call with wrong arguments raises one of our errors, with a hint.

    Args:
        words: hints by argument names of other libraries, `WORDS` if None; empty for functions without such arguments.
        hints: more hints, by names of arguments that may be missing or that only this function answers.
    """
    words = WORDS if words is None else words

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # from inside of the function
                name = function.__qualname__.removesuffix(".__init__")
                refusal = _refusal(name, inspect.signature(function), args, kwargs, {**words, **hints})
                if refusal is None:
                    raise
                raise refusal from None

        return cast("F", called)

    return decorate


def answers_class(words: Mapping[str, str] | None = None, /, **hints: str) -> Callable[[C], C]:
    """Like `answers`, for the constructor of a class."""

    def decorate(kind: C) -> C:
        setattr(kind, "__init__", answers(words, **hints)(kind.__dict__["__init__"]))  # noqa: B010  mypy
        return kind

    return decorate


def unknown(names: Mapping[str, object], known: Callable[..., Any]) -> TypeError:
    """For a function on a hot path, which takes ``**unknown`` itself: the sentence for the first of these names.

    Args:
        names: what it was called with and does not know.
        known: the function.
    """
    parameters = [name for name in inspect.signature(known).parameters if name not in ("self", "unknown")]
    return _misnamed(next(iter(names)), parameters, WORDS)


class AnswersCalls:
    """Of whose subclasses each answers for its own ``__init__``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            answers_class()(cls)


def _refusal(
    function: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], hints: Mapping[str, str]
) -> TypeError | None:
    """What is wrong with a call: a name that is not known, too many values, a missing one."""
    known = [name for name in signature.parameters if name != "self"]
    is_method = "self" in signature.parameters
    for name in kwargs:
        if name not in known:
            return _misnamed(name, known, hints, function)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_place = [name for name in known if signature.parameters[name].kind is plain]
    given = len(args) - is_method
    if given > len(by_place):
        rule = f"be at most {len(by_place)}" if by_place else "be none"
        hint = hints.get("more") or f"by name: {', '.join(f'{name}=' for name in known[len(by_place) :])}"
        return type_error(
            "values without a name", rule, given, hint=hint if known or "more" in hints else None, where=function
        )
    for name in known[given:]:
        parameter = signature.parameters[name]
        is_named = parameter.kind in (plain, inspect.Parameter.KEYWORD_ONLY)
        if parameter.default is parameter.empty and name not in kwargs and is_named:
            return type_error(name, "be given", "nothing", hint=hints.get(name), where=function)
    return None


def _misnamed(name: str, known: Sequence[str], hints: Mapping[str, str], function: str | None = None) -> TypeError:
    hint = hints.get(name)
    is_name = hint is not None and hint.endswith("=") and hint[:-1].isidentifier()
    if hint is None or (is_name and hint[:-1] not in known):
        hint = f"its arguments are {', '.join(known)}" if known else None
    return type_error("an argument", "be one of its own", f"{name}=", hint=hint, where=function)
