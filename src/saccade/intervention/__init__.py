"""Change the attention of a model while it runs: ablation, knock-out of edges, patching of patterns."""

from saccade.intervention.intervene import intervene
from saccade.intervention.sweep import HeadEffect, Sweep

__all__ = ["HeadEffect", "Sweep", "intervene"]
