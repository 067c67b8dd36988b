"""Questions to a matrix as folds over its complete rows: many are answered in one sweep, in linear memory."""

from saccade.statistics.block import Block
from saccade.statistics.entropy import Entropy
from saccade.statistics.fold import Fold, Outline
from saccade.statistics.pooled import Pooled
from saccade.statistics.received import Received
from saccade.statistics.topk import Strongest, TopK

__all__ = ["Entropy", "TopK", "Strongest", "Received", "Pooled", "Fold", "Outline", "Block"]
