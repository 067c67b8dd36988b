"""WHICH KEYS a query reads: scorers, cheap ones, that rank keys or blocks of them."""

from saccade.mechanisms.scorers.base import Scorer
from saccade.mechanisms.scorers.block_means import BlockMeans
from saccade.mechanisms.scorers.dot_products import DotProducts
from saccade.mechanisms.scorers.lightning_indexer import LightningIndexer

__all__ = ["Scorer", "LightningIndexer", "BlockMeans", "DotProducts"]
