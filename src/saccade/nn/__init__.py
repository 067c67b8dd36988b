"""Neural network layers with parameters: attention, feed-forward, recurrent and pooling layers, and layer stacks."""

from typing import TYPE_CHECKING

from saccade.nn.attention import MultiHeadAttention
from saccade.nn.attention_block import AttentionBlock
from saccade.nn.attention_pool import AttentionPool
from saccade.nn.compressed_attention import CompressedAttention
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.differential_attention import DifferentialAttention
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.feed_forward import FeedForward
from saccade.nn.forgetting_attention import ForgettingAttention
from saccade.nn.indexer import Indexer
from saccade.nn.latent_attention import LatentAttention
from saccade.nn.mixture_of_experts import MixtureOfExperts
from saccade.nn.native_sparse_attention import NativeSparseAttention
from saccade.nn.qk_norm import QKNorm
from saccade.nn.recurrent_layers import Recurrence
from saccade.nn.shared_keys import SharedKeyAttention
from saccade.nn.stack import DecoderStack, EncoderStack
from saccade.nn.state_space import StateSpace
from saccade.nn.table_attention import ColumnAttention, RowAttention, TriangleAttention
from saccade.nn.torch_conversion import from_torch, to_torch
from saccade.support.name_hints import other_names

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "MultiHeadAttention",
    "QKNorm",
    "LatentAttention",
    "Indexer",
    "DifferentialAttention",
    "NativeSparseAttention",
    "CompressedAttention",
    "SharedKeyAttention",
    "ForgettingAttention",
    "RowAttention",
    "ColumnAttention",
    "TriangleAttention",
    "StateSpace",
    "Recurrence",
    "AttentionBlock",
    "AttentionPool",
    "FeedForward",
    "MixtureOfExperts",
    "EncoderLayer",
    "DecoderLayer",
    "EncoderStack",
    "DecoderStack",
    "from_torch",
    "to_torch",
]
