"""saccade: attention as a matrix that you never have to build.

The first hour: `masks`, `AttentionMatrix`, `attention`, `nn.MultiHeadAttention`.
"""

from typing import TYPE_CHECKING

from saccade import masks, positions, scores, statistics
from saccade.attention import AttentionMatrix, attention, attention_with_lse
from saccade.errors import UnsupportedError
from saccade.lazily import lazily
from saccade.matrix import Matrix

if TYPE_CHECKING:
    from saccade import auditing as auditing
    from saccade import caches, integrations, mechanisms, models, nn, text, vision, viz
    from saccade import costs as costs
    from saccade import distributed as distributed
    from saccade import learning as learning
    from saccade import recording as recording
    from saccade import tasks as tasks
    from saccade import testing as testing
    from saccade import theory as theory
    from saccade.auditing.audit import audit
    from saccade.costs.cost import Cost, cost
    from saccade.integrations.replacing import Replaced, replace_attention
    from saccade.mechanisms.comparison import compare
    from saccade.packing import Packed, pack
    from saccade.recording.record import record
    from saccade.recording.recording import Recording
else:  # half of the package, which a product of attention does not need
    _HOMES = {
        "": "auditing caches costs distributed integrations learning mechanisms models nn recording tasks testing text "
        "theory vision viz",
        "auditing.audit": "audit",
        "costs.cost": "Cost cost",
        "integrations.replacing": "Replaced replace_attention",
        "mechanisms.comparison": "compare",
        "packing": "Packed pack",
        "recording.record": "record",
        "recording.recording": "Recording",
    }
    __getattr__, __dir__ = lazily(__name__, _HOMES)

__version__ = "0.1.0"

__all__ = [
    "attention",
    "attention_with_lse",
    "AttentionMatrix",
    "Matrix",
    "compare",
    "audit",
    "cost",
    "Cost",
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
    "caches",
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
