"""saccade: attention as a matrix that you never have to build.

The first hour: `masks`, `AttentionMatrix`, `attention`, `nn.MultiHeadAttention`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from saccade import masks, positions, scores, statistics
from saccade.attention import AttentionMatrix, attention, attention_with_lse
from saccade.errors import UnsupportedError
from saccade.matrix import Matrix

if TYPE_CHECKING:
    from saccade import integrations, mechanisms, models, nn, text, vision, viz
    from saccade.auditing.audit import audit
    from saccade.costs.cost import Cost, cost
    from saccade.integrations.replacing import Replaced, replace_attention
    from saccade.mechanisms.comparison import compare
    from saccade.packing import Packed, pack
    from saccade.recording.record import record
    from saccade.recording.recording import Recording

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

# Imported when they are first asked for: half of the package, which a product of attention does not need.
_HOMES = {
    "audit": "auditing.audit",
    "cost": "costs.cost",
    "Cost": "costs.cost",
    "compare": "mechanisms.comparison",
    "pack": "packing",
    "Packed": "packing",
    "record": "recording.record",
    "Recording": "recording.recording",
    "replace_attention": "integrations.replacing",
    "Replaced": "integrations.replacing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
