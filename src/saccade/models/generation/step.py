"""Step: the result of one pass through the model, and its cost."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor

__all__ = ["Step"]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A step of generation.

    Args:
        phase: "prefill" where the model read the prompt, "decode" where it read the tokens chosen before.
        tokens: the tokens chosen, int64 ``[batch]``; -1 for a text that had ended before.
        log_probs: their log-probabilities under the distribution they were drawn from, ``[batch]``; 0 where greedy.
        processed: tokens that the model read in this step, padding and ended texts left out.
        bytes_read: of keys and values that attention needed from the caches, in all layers; None without a cache.
        bytes_appended: of keys and values that the caches took in; None without a cache.
    """

    phase: Literal["prefill", "decode"]
    tokens: Tensor
    log_probs: Tensor
    processed: int
    bytes_read: int | None
    bytes_appended: int | None
