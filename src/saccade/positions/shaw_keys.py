"""ShawKeys: a relative position bias with a trainable embedding for each distance, added to the keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.positions.bias import Bias, check_distances
from saccade.support.errors import describe, shown, value_error
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import check_int


class ShawKeys(Bias):
    r"""A position bias that depends on the query: a trainable embedding of each distance is added to the keys.

    .. math:: s\, q_i^\top (k_j + a_{j-i}) = s\, q_i^\top k_j + s\, q_i^\top a_{j-i}, \qquad
              a_d = w_{\mathrm{clip}(d,\, -r,\, r) + r}

    As in the paper, the index of the embedding grows with the *key's* position. Embeddings start at 0. All heads share
    them or, as in the Music Transformer, each head has separate ones. The paper's second table, which is added to the
    values, is not available, because it is not part of the attention matrix.

    Args:
        head_dim: width of queries and keys of one head.
        reach: largest distance with a separate embedding, at least 0 (k in the paper); or a pair with the limits for
            earlier and for later keys. ``(r, 0)`` is enough under a causal mask.
        num_heads: number of query heads, for separate embeddings per head; None if all heads share them.

    Attributes:
        weight: ``[back + 1 + ahead, head_dim]``, ordered from the earliest key within reach to the latest; with
            ``num_heads``, a head axis comes first.

    Raises:
        ValueError: a size is not an int or is too small, or the query has a different width.

    Cost: ``(2 * reach + 1) * head_dim`` parameters, for each head or shared by all heads. Each call also computes
        ``2 * reach + 1`` dot products for each query and head, so ``reach`` should be far below the length.

    Example:
        >>> bias = ShawKeys(4, reach=2)
        >>> query = torch.zeros(1, 3, 6, 4)
        >>> bias.values(torch.arange(-2, 3), query, 0.5).shape
        torch.Size([1, 3, 6, 5])

    Reference: Shaw et al. 2018, arXiv:1803.02155, section 3; separate vectors per head: Huang et al. 2018, "Music
    Transformer", arXiv:1809.04281, section 3.4.
    """

    reach: int

    def __init__(self, head_dim: int, reach: int | tuple[int, int], num_heads: int | None = None):
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim)
        limits = reach if isinstance(reach, tuple | list) else (reach, reach)
        if len(limits) != 2:
            raise value_error("reach", "be an int or a pair (back, ahead)", shown(reach))
        self.back, self.ahead = (check_int("reach", limit, 0) for limit in limits)
        self.reach = max(self.back, self.ahead)
        self.num_heads = None if num_heads is None else check_int("num_heads", num_heads)
        heads = () if num_heads is None else (num_heads,)
        self.weight = nn.Parameter(torch.zeros(*heads, self.back + 1 + self.ahead, head_dim))

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        check_distances(distances)
        if query.shape[-1] != self.head_dim:
            facts = [describe("query", query)]
            raise value_error("query", f"have head_dim {self.head_dim}", query.shape[-1], facts=facts)
        if self.num_heads not in (None, query.shape[1]):
            facts = [describe("query", query)]
            raise value_error("query", f"have {self.num_heads} heads", query.shape[1], facts=facts)
        # Scores are float32 or wider, also under autocast.
        wide = torch.promote_types(torch.promote_types(query.dtype, self.weight.dtype), torch.float32)
        vectors = self.weight[..., self.back - distances.clamp(-self.ahead, self.back), :].to(wide)
        with without_autocast(query.device):
            return (query.to(wide) * scale) @ vectors.mT

    def extra_repr(self) -> str:
        reach = self.back if self.back == self.ahead else (self.back, self.ahead)
        return f"{self.head_dim}, reach={reach}" + ("" if self.num_heads is None else f", num_heads={self.num_heads}")
