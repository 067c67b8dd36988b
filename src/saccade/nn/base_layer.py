"""AttentionLayer: what attention layers have in common: a pattern, a mechanism, dropout."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from saccade.caches import LayerCache
from saccade.masks import Mask, as_mask
from saccade.masks.rules.documents import with_facts
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.nn.typing import Layer
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import unsupported
from saccade.support.validation import check_type

__all__ = ["AttentionLayer"]


class AttentionLayer(AnswersCalls, Layer):
    """From ``[batch, len, embed_dim]`` to the same, by projections around a mechanism.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: of the matrix.
        mask: the module's pattern; joined with the mask of each call by ``&``.
        mechanism: which matrix; `saccade.mechanisms.Softmax` when None.
        dropout_p: of the attention weights, in training only; checked already.
    """

    output_projection: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism | None, dropout_p: float
    ):
        super().__init__()
        if mask is not None:
            hint = "a tensor or function is a fact of one batch: pass it with the call"
            check_type("mask", mask, Mask, "be a saccade mask", hint=hint)
        if mechanism is not None:
            hint = "for instance saccade.mechanisms.Softmax(softcap=30.0)"
            check_type("mechanism", mechanism, Mechanism, "be a saccade Mechanism or None", hint=hint)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout_p = float(dropout_p)
        self.mask = mask
        self.mechanism = Softmax() if mechanism is None else mechanism

    @abstractmethod
    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """The attention matrix of a call of self-attention, ``[batch, num_heads, len, len]``, not built."""

    def reset_parameters(self) -> None:
        """Xavier-uniform weights and zero biases, as ``nn.MultiheadAttention`` starts."""
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """An empty cache that fits the layer, with room for ``max_len`` tokens at once; None to grow."""
        return self.mechanism.new_cache(max_len)

    def _joined(self, mask: object, shape: tuple[int, int, int, int]) -> Mask | None:
        """The module's pattern and the facts of the batch as one mask that the mechanism can run."""
        joined = self.mask
        if mask is not None:
            own = as_mask(mask, shape)
            joined = own if self.mask is None else with_facts(self.mask, own)
        if joined is not None:
            reasons = self.mechanism.reasons(joined)
            if reasons:
                raise unsupported(type(self.mechanism).__name__, reasons)
        return joined
