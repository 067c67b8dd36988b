"""Check the arguments of transformers' attention functions, and raise errors for unsupported arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from saccade.integrations.lazy_mask import Placed
from saccade.support.errors import unsupported
from saccade.support.torch_modes import constant_result, is_tracing

# A test searches the sources of transformers for arguments that are missing from these tables.
SUPPORTED = frozenset(
    {
        "attention_mask",
        "block_indices",
        "dropout",
        "indices",
        "is_causal",
        "key",
        "module",
        "position_bias",
        "query",
        "s_aux",
        "scaling",
        "sliding_window",  # the mask already contains it
        "softcap",
        "value",
    }
)
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # ends of packed sequences, which the mask must also separate
# Settings of the full model and of kernels. For any other argument, check whether the model's functions read it.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "kernel_options",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_OTHER = "another attention implementation"
_PAGED = "paged caches use their own kernels"
UNSUPPORTED = {
    "output_attentions": "saccade.record(model) gives the matrices of every layer without building them",
    "cache": _PAGED,
    "block_table": _PAGED,
    "k_cache": _PAGED,
    "v_cache": _PAGED,
    "cache_seqlens": _PAGED,
    "sinks": "eager; sink logits that depend on the query are not supported",
}
"""Hints for error messages about arguments that change the attention matrix in an unsupported way."""


def check_supported(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise an error if an argument of a transformers attention function changes the matrix in an unsupported way."""
    unknown = [name for name in options if name not in SUPPORTED and name not in WITHOUT_EFFECT]
    if not unknown:
        return
    files = tuple(parent.__module__ for parent in type(module).__mro__)
    refused = [name for name in unknown if name in UNSUPPORTED or _is_read(files, name)]
    if refused:
        reasons = [f"the model passes {name}, which is not supported here" for name in refused]
        hints = [UNSUPPORTED[name] for name in refused if name in UNSUPPORTED]
        raise unsupported(type(module).__name__, reasons, hint=hints[0] if hints else _OTHER)


def check_ends(module: nn.Module, ends: Mapping[str, Tensor], placed: Placed) -> None:
    """Raise an error if the arguments and the attention mask disagree about where packed sequences begin and end."""
    texts = placed.texts or ((len(placed.kv_positions),),)
    wrong = [name for name, end in ends.items() if texts != (tuple(end.diff().tolist()),)]
    if wrong:
        reasons = [f"the model passes {name}, but its mask does not separate these texts" for name in wrong]
        hint = "pass position_ids that restart with each text, and use_cache=False"
        raise unsupported(type(module).__name__, reasons, hint=hint)


@constant_result
def _is_read(files: tuple[str, ...], name: str) -> bool:
    """Return whether an attention function in the given source files reads an argument; Dynamo does not trace this."""
    return name in _read_by_functions(files)


@functools.cache
def _read_by_functions(files: tuple[str, ...]) -> frozenset[str]:
    """Return the parameter names of all attention functions in the source files, such as a model's eager function."""
    names: set[str] = set()
    for file in set(files) & sys.modules.keys():
        if file.split(".")[0] in ("torch", "builtins"):
            continue
        for function in vars(sys.modules[file]).values():
            parameters = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
            if parameters[:4] == ["module", "query", "key", "value"]:
                names.update(parameters)
    return frozenset(names)


_FLAG = "output_attentions"


def check_no_weights(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise an error if a call requests attention weights, which kernels never materialise.

    Args:
        module: the attention layer.
        options: the keyword arguments of the layer's attention function.

    Raises:
        UnsupportedError: the layer, or the model around it, was called with ``output_attentions=True``.
    """
    if not (options.get(_FLAG) or _is_collected()):
        return
    reason = f"{_FLAG}=True needs all weights, which are not built here"
    hint = "saccade.record(model) gives the matrices of every layer without building them"
    raise unsupported(type(module).__name__, [reason], hint=hint)


def _is_collected() -> bool:
    """Return whether the running transformers model collects the attention weights that its layers return."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    is_compiling = is_tracing()
    if is_compiling:  # a context variable cannot be traced, so transformers uses this attribute instead
        collected = getattr(collector, "global_var", None)
    else:
        collected = None if collector is None else collector.get()
    if collected is None:
        return not is_compiling and _is_read_by_a_caller(sys._getframe(1))
    return any(name.endswith("attentions") for name in collected)


def _is_read_by_a_caller(frame: FrameType | None) -> bool:
    """Return whether any transformers function on the call stack has ``output_attentions`` set.

    Some models, such as PatchTST and Pix2Struct, collect attention weights in their own code.
    """
    while frame is not None:
        is_theirs = str(frame.f_globals.get("__name__")).startswith("transformers.")
        if is_theirs and _FLAG in frame.f_code.co_varnames and frame.f_locals.get(_FLAG):
            return True
        frame = frame.f_back
    return False
