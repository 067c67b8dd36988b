"""The dtype of mask that models of a transformers configuration accept."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch


def mask_dtype(config: object, dtype: torch.dtype) -> torch.dtype:
    """Return bool, or the model's ``dtype`` if its code may add the mask to its scores.

    Models that call the attention interface, and support "sdpa" or "flex_attention", pass a mask on as it is. All
    others get float masks from transformers, and read them: GIT and Falcon add them to their scores, DeepSeek-V4 joins
    them with a bias, Gemma 4's audio encoder compares them with 0.

    Args:
        config: the configuration for which a mask is made; None if it is not known.
        dtype: of the model.
    """
    return torch.bool if config is None or _takes_bool(type(config)) else dtype


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_bool(kind: type) -> bool:
    return _all_support(kind, len(sys.modules))


@functools.cache
def _all_support(kind: type, num_modules: int) -> bool:
    """Whether every model of this configuration passes its mask on; ``num_modules`` as models may be imported later."""
    del num_modules
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return True
    models = [model for model in _subclasses(modeling.PreTrainedModel) if model.config_class is kind]
    return all(
        model._can_set_attn_implementation() and (model._supports_sdpa or model._supports_flex_attn) for model in models
    )


def _subclasses(kind: Any) -> Iterator[Any]:
    for other in kind.__subclasses__():
        yield other
        yield from _subclasses(other)
