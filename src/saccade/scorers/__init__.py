"""Scorers, which rank keys or key blocks by cheap scores to select the keys that each query attends to."""

from saccade.scorers.block_scorers import BlockBounds, BlockMeans, BlockScorer
from saccade.scorers.key_scorers import DotProducts, LightningIndexer
from saccade.scorers.scorer import Scorer

__all__ = ["Scorer", "BlockScorer", "BlockMeans", "BlockBounds", "DotProducts", "LightningIndexer"]
