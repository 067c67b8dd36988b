"""Scorers: cheap scores that rank keys or key blocks, to select the keys that a query reads."""

from saccade.scorers.block_scorers import BlockBounds, BlockMeans, BlockScorer
from saccade.scorers.key_scorers import DotProducts, LightningIndexer
from saccade.scorers.scorer import Scorer

__all__ = ["Scorer", "BlockScorer", "BlockMeans", "BlockBounds", "DotProducts", "LightningIndexer"]
