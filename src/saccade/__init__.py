"""saccade: attention as a matrix that you never have to build.

Start with `masks`, `AttentionMatrix`, `attention` and `nn.MultiHeadAttention`.
"""

from typing import TYPE_CHECKING

from saccade import masks, positions, scores, statistics
from saccade.matrix import AttentionMatrix, Matrix, attention, attention_with_lse
from saccade.support.errors import UnsupportedError
from saccade.support.lazy_imports import lazily

if TYPE_CHECKING:
    from saccade import auditing as auditing
    from saccade import caches, integrations, mechanisms, models, nn, scorers, text, vision, viz
    from saccade import costs as costs
    from saccade import distributed as distributed
    from saccade import fusion as fusion
    from saccade import learning as learning
    from saccade import recording as recording
    from saccade import tasks as tasks
    from saccade import testing as testing
    from saccade import theory as theory
    from saccade.auditing.audit import audit
    from saccade.costs.cost import Cost, cost
    from saccade.integrations.replace_attention import replace_attention
    from saccade.integrations.replacement_plan import Replaced, Replacements
    from saccade.intervention.intervene import intervene
    from saccade.masks.convert.packing import Packed, pack
    from saccade.mechanisms.comparison import compare
    from saccade.recording.record import record
    from saccade.recording.recording import Recording
else:  # imported on first use, because attention itself does not need these modules
    _HOMES = {
        "": "auditing caches costs distributed fusion integrations intervention learning mechanisms models nn "
        "recording scorers tasks testing text theory vision viz",
        "auditing.audit": "audit",
        "costs.cost": "Cost cost",
        "integrations.replace_attention": "replace_attention",
        "integrations.replacement_plan": "Replaced Replacements",
        "intervention.intervene": "intervene",
        "mechanisms.comparison": "compare",
        "masks.convert.packing": "Packed pack",
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
    "intervene",
    "replace_attention",
    "Replaced",
    "Replacements",
    "Recording",
    "masks",
    "scores",
    "positions",
    "mechanisms",
    "scorers",
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
