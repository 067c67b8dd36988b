"""Scores: how alike a query and a key are."""

from typing import TYPE_CHECKING

from saccade.support.lazy_imports import lazily

if TYPE_CHECKING:
    from saccade.scores.additive import Additive
    from saccade.scores.base import Prepared, Score
    from saccade.scores.bilinear import Bilinear
    from saccade.scores.cosine import Cosine
    from saccade.scores.dot import Dot
    from saccade.scores.gaussian import Gaussian
    from saccade.scores.score_mod import Modified
else:
    _HOMES = {
        "additive": "Additive",
        "base": "Prepared Score",
        "bilinear": "Bilinear",
        "cosine": "Cosine",
        "dot": "Dot",
        "gaussian": "Gaussian",
        "score_mod": "Modified",
    }
    __getattr__, __dir__ = lazily(__name__, _HOMES)

__all__ = ["Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "Modified", "Prepared", "Score"]
