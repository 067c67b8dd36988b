"""What the most telling head is chosen by: the choices of ``saccade look --by``."""

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from saccade.statistics.ranking import position_information, unexplained_information

__all__ = ["Statistic"]


class Statistic(Enum):
    """What "most telling" means."""

    POSITION = "position"
    UNEXPLAINED = "unexplained"

    @property
    def label(self) -> str:
        """Its name."""
        return {"position": "position mutual information", "unexplained": "unexplained information"}[self.value]

    @property
    def meaning(self) -> str:
        """What it measures, in a few words."""
        return {
            "position": "how much the place of a word says about where it looks",
            "unexplained": "how far words look elsewhere than distance and everybody's favourites explain",
        }[self.value]

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """Computes it from weights, ``[..., q_len, kv_len]`` to float64 ``[...]``."""
        return {"position": position_information, "unexplained": unexplained_information}[self.value]
