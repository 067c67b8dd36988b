"""The weights that a model starts with."""

from __future__ import annotations

import math

import torch
from torch import nn

from saccade.nn import DecoderLayer, EncoderLayer

__all__ = ["start_small", "weaken_parts"]


def start_small(model: nn.Module) -> None:
    """Small normal weights, zero biases, and zeros for the token that fills up, as BERT and GPT-2 start."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def weaken_parts(model: nn.Module, num_layers: int) -> None:
    """Make what each part of a layer adds smaller, the more layers there are.

    The sum of all parts then has about the size of one, however deep the model is.

    Reference: Radford et al. 2019 (GPT-2), section 2.3.
    """
    for module in model.modules():
        if not isinstance(module, EncoderLayer | DecoderLayer):
            continue
        last = [module.attention.output_projection, getattr(module.feed_forward, "contract", None)]
        if isinstance(module, DecoderLayer) and module.cross_attention is not None:
            last.append(module.cross_attention.output_projection)
        for linear in last:
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * num_layers))
