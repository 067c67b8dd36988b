"""Functions that initialize the weights of models."""

from __future__ import annotations

import math

import torch
from torch import nn

from saccade.nn import DecoderLayer, EncoderLayer


def init_small_weights(model: nn.Module) -> None:
    """Initialize a model as in BERT and GPT-2: small normal weights, zero biases, a zero vector for padding."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def scale_residual_weights(model: nn.Module, num_layers: int) -> None:
    """Divide a model's initial output projections by the square root of twice the number of layers.

    The sum of all residual branches then has about the same magnitude at any depth.

    Reference: Radford et al. 2019 (GPT-2), section 2.3.
    """
    for module in model.modules():
        if not isinstance(module, EncoderLayer | DecoderLayer):
            continue
        networks = module.feed_forward.modules()  # a network or, in a mixture of experts, several
        outputs = [module.attention.output_projection, *(getattr(each, "contract", None) for each in networks)]
        if isinstance(module, DecoderLayer) and module.cross_attention is not None:
            outputs.append(module.cross_attention.output_projection)
        for linear in outputs:
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * num_layers))
