"""Statistics of an attention matrix. Many statistics are computed in one pass over the matrix, in linear memory."""

from typing import TYPE_CHECKING

from saccade.support.lazy_imports import lazily

if TYPE_CHECKING:
    from saccade.statistics.attention_rollout import rollout
    from saccade.statistics.concentration import Coverage, Entropy, LargestWeight, SquaredNorm
    from saccade.statistics.distance import Distance, LagProfile, Lags
    from saccade.statistics.gradient_relevance import gradient_rollout, relevance
    from saccade.statistics.head_ranking import Head, rank_heads
    from saccade.statistics.head_similarity import head_distances
    from saccade.statistics.indexer_loss import IndexerLoss, RowScorer
    from saccade.statistics.induction import InductionMass
    from saccade.statistics.information import PositionInformation, unexplained_information
    from saccade.statistics.logit_statistics import LargestLogit, LogitVariance
    from saccade.statistics.mass import LagMass, LocalMass, Parts, SinkMass
    from saccade.statistics.per_row import PerRow, positions_of
    from saccade.statistics.pooled import Pooled
    from saccade.statistics.received import Received
    from saccade.statistics.row_block import Block
    from saccade.statistics.spectrum import Spectrum, StableRank, singular_values, stable_rank
    from saccade.statistics.statistic import MatrixInfo, Statistic
    from saccade.statistics.summary import Measure, Summary
    from saccade.statistics.topk import Strongest, TopK
    from saccade.statistics.uniform_baseline import Uniform
else:
    _HOMES = {
        "attention_rollout": "rollout",
        "head_similarity": "head_distances",
        "row_block": "Block",
        "distance": "Distance LagProfile Lags",
        "statistic": "Statistic MatrixInfo",
        "indexer_loss": "IndexerLoss RowScorer",
        "information": "PositionInformation unexplained_information",
        "induction": "InductionMass",
        "logit_statistics": "LargestLogit LogitVariance",
        "mass": "LagMass LocalMass Parts SinkMass",
        "concentration": "Coverage Entropy LargestWeight SquaredNorm",
        "per_row": "PerRow positions_of",
        "pooled": "Pooled",
        "head_ranking": "Head rank_heads",
        "received": "Received",
        "gradient_relevance": "gradient_rollout relevance",
        "spectrum": "Spectrum StableRank singular_values stable_rank",
        "summary": "Measure Summary",
        "topk": "Strongest TopK",
        "uniform_baseline": "Uniform",
    }
    __getattr__, __dir__ = lazily(__name__, _HOMES)

__all__ = [
    "Entropy",
    "LargestWeight",
    "TopK",
    "Strongest",
    "Coverage",
    "SquaredNorm",
    "SinkMass",
    "LagMass",
    "LocalMass",
    "InductionMass",
    "Parts",
    "Distance",
    "Received",
    "PositionInformation",
    "LagProfile",
    "Lags",
    "Pooled",
    "LogitVariance",
    "LargestLogit",
    "IndexerLoss",
    "RowScorer",
    "singular_values",
    "Spectrum",
    "stable_rank",
    "StableRank",
    "head_distances",
    "rollout",
    "relevance",
    "gradient_rollout",
    "rank_heads",
    "Head",
    "unexplained_information",
    "Summary",
    "Measure",
    "Uniform",
    "positions_of",
    "Statistic",
    "PerRow",
    "MatrixInfo",
    "Block",
]
