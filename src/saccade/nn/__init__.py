"""Layers with parameters."""

from saccade.nn.attention import MultiHeadAttention
from saccade.nn.block import AttentionBlock
from saccade.nn.convert import from_torch, to_torch

__all__ = ["MultiHeadAttention", "AttentionBlock", "from_torch", "to_torch"]
