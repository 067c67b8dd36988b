"""saccade: attention as a matrix that you never have to build.

The first hour: `masks`, `AttentionMatrix`, `attention`, `nn.MultiHeadAttention`.
"""

from saccade import integrations, masks, mechanisms, models, nn, positions, scores, statistics, text, vision, viz
from saccade.attention import AttentionMatrix, attention, attention_with_lse
from saccade.auditing import audit
from saccade.errors import UnsupportedError
from saccade.integrations.replacing import Replaced, replace_attention
from saccade.matrix import Matrix
from saccade.mechanisms.comparison import compare
from saccade.packing import Packed, pack
from saccade.recording import Recording, record

__version__ = "0.1.0"

__all__ = [
    "attention",
    "attention_with_lse",
    "AttentionMatrix",
    "Matrix",
    "compare",
    "audit",
    "pack",
    "Packed",
    "record",
    "replace_attention",
    "Replaced",
    "Recording",
    "masks",
    "scores",
    "positions",
    "mechanisms",
    "statistics",
    "nn",
    "vision",
    "models",
    "text",
    "viz",
    "integrations",
    "UnsupportedError",
    "__version__",
]
