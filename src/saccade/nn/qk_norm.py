"""QKNorm: norms of queries and keys before their dot products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from saccade.nn.norms import RMSNorm
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import unsupported
from saccade.support.validation import check_bool, check_choice, check_number


@argument_hints()
@dataclasses.dataclass(frozen=True)
class QKNorm:
    """Options for root-mean-square norms of queries and keys, which keep scores from growing during training.

    Args:
        across: ``"head"`` for a norm over the channels of each head, with weights that all heads share (Qwen3, Gemma
            3), or ``"all_heads"`` for one norm over the channels of all heads (OLMo 2).
        eps: added to the mean square.
        learned: whether the norms have weights. Without weights, norms over the channels of each head make scores
            proportional to cosines.
        after_rotary: whether queries and keys are normalized after the rotary rotation (Hunyuan) instead of before it.
            The two differ only if the norms have weights.

    Raises:
        ValueError: an argument does not meet the conditions above, or ``after_rotary`` is combined with
            ``"all_heads"``.
        TypeError: ``learned`` or ``after_rotary`` is not a bool.

    Reference: Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442, section 3.1.
    """

    across: Literal["head", "all_heads"] = "head"
    eps: float = 1e-6
    learned: bool = True
    after_rotary: bool = False

    def __post_init__(self) -> None:
        check_choice("across", self.across, ("head", "all_heads"))
        check_number("eps", self.eps, above=0)
        check_bool("learned", self.learned)
        check_bool("after_rotary", self.after_rotary)
        if self.after_rotary:
            check_choice("across", self.across, ("head",), hint="after the rotation, each head is normed separately")

    def make(self, num_heads: int, head_dim: int) -> RMSNorm:
        """Build the norm for queries or keys with ``num_heads`` heads."""
        width = head_dim if self.across == "head" else num_heads * head_dim
        return RMSNorm(width, self.eps, elementwise_affine=self.learned)

    def check_cache(self, cache: object) -> None:
        """Raise an error if the cache rotates keys again although they were normalized after the first rotation.

        Raises:
            UnsupportedError: a learned norm follows the rotation, so the cache cannot undo the rotation.
        """
        if self.after_rotary and self.learned and getattr(cache, "rotary", None) is not None:
            reason = "it rotates stored keys again, and these were normed after their rotation, with learned weights"
            raise unsupported(type(cache).__name__, [reason], hint="a cache without rotary=, such as KVCache()")


def norm_and_rotate(
    projected: Tensor,
    split: Callable[[Tensor], Tensor],
    options: QKNorm,
    norm: nn.Module,
    rotary: nn.Module | None,
    rotary_positions: range | Tensor | None,
) -> Tensor:
    """Split projected queries or keys into heads, and normalize and rotate them in the order of `QKNorm`.

    Args:
        projected: ``[batch, len, heads * head_dim]``.
        split: returns the heads, ``[batch, heads, len, head_dim]``.
        options, norm: the options, and the norm that was built from them.
        rotary, rotary_positions: the rotary embedding and its positions; None for no rotation.
    """
    heads = split(norm(projected) if options.across == "all_heads" else projected)
    if options.across == "head" and not options.after_rotary:
        heads = norm(heads)
    if rotary is not None:
        heads = rotary(heads, rotary_positions)
    return norm(heads) if options.after_rotary else heads
