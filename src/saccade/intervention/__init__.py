"""Change the attention of a model while it runs: ablate heads, cut edges, patch patterns."""

from saccade.intervention.intervene import intervene
from saccade.intervention.sweep import HeadEffect, Sweep

__all__ = ["HeadEffect", "Sweep", "intervene"]
