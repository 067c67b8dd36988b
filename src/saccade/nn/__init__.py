"""Layers with parameters."""

from saccade.nn.attention import MultiHeadAttention
from saccade.nn.block import AttentionBlock
from saccade.nn.convert import from_torch, to_torch
from saccade.nn.pool import AttentionPool

__all__ = ["MultiHeadAttention", "AttentionBlock", "AttentionPool", "from_torch", "to_torch"]
