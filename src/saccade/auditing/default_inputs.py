"""What a model is given in an audit: its inputs where none are named, and which of their rows are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.encoder_decoder_subject import is_pair
from saccade.auditing.inputs import InputFormat
from saccade.auditing.model_under_test import can_cache
from saccade.support.errors import value_error
from saccade.support.validation import check_type


def check_still(model: object) -> None:
    """Raise if a model drops at random: then no two runs of it agree."""
    if not isinstance(model, nn.Module) or not model.training:
        return
    drops = [name for name, own in model.named_modules() if isinstance(own, nn.Dropout) and own.p > 0]
    if drops:
        hint = "model.eval() stands still; or set p to 0 and audit what training does"
        raise value_error("model", "not drop at random", f"training, with {drops[0] or 'dropout'}", hint=hint)


def without_cache(model: object, inputs: Tensor | Mapping[str, Any]) -> Tensor | Mapping[str, Any]:
    """What a model of transformers is called with: a module that runs again must not find its own keys in a cache."""
    if not isinstance(model, nn.Module) or not can_cache(model):
        return inputs
    if isinstance(inputs, Tensor):
        inputs = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
    return {"use_cache": False} | dict(inputs)


def texts(model: object, length: int, seed: int, form: InputFormat) -> Tensor | dict[str, Tensor]:
    """Return two random texts, and for an encoder-decoder two shorter targets.

    The vocabulary is that of the model's configuration, or of its first table.
    """
    tables = [own for own in model.modules() if isinstance(own, nn.Embedding)] if isinstance(model, nn.Module) else []
    if not tables:
        hint = "give inputs=: tokens [batch, length] or vectors [batch, length, width]"
        raise value_error("inputs", "be given for a model without a table of embeddings", None, hint=hint)
    text = getattr(model, "config", None)
    size = getattr(text, "vocab_size", None) or tables[0].num_embeddings
    device = tables[0].weight.device
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(min(3, size - 1), size, (2, length), generator=draw).to(device)
    if not is_pair(model):
        return tokens if form.batch_first else tokens.mT.contiguous()
    targets = torch.randint(min(3, size - 1), size, (2, max(2, 2 * length // 3)), generator=draw).to(device)
    return {"input_ids": tokens, "decoder_input_ids": targets}


def rows_judged(padding: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Rows that say something, bool ``[batch, length]``: not those of padding."""
    if padding is None:
        return torch.ones(shape, dtype=torch.bool)
    check_type("padding", padding, Tensor, "be a bool tensor [batch, length]")
    if padding.shape != shape:
        raise value_error("padding", f"have shape {list(shape)}", list(padding.shape))
    return padding.bool().cpu()
