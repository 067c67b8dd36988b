"""HOW ALIKE are a query and a key."""

from saccade.scores.additive import Additive
from saccade.scores.base import Prepared, Score
from saccade.scores.bilinear import Bilinear
from saccade.scores.cosine import Cosine
from saccade.scores.dot import Dot
from saccade.scores.gaussian import Gaussian
from saccade.scores.modified import Modified

__all__ = ["Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "Modified", "Prepared", "Score"]
