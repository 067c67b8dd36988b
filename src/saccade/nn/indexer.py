"""Indexer: the projections with which a layer scores keys, to select a few of them for each query."""

from __future__ import annotations

from types import NoneType

from torch import Tensor, nn

from saccade.nn import attention_checks as checks
from saccade.nn.projections import weight_of
from saccade.positions import Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.scorers import LightningIndexer
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number, check_type


class Indexer(ArgumentHints, nn.Module):
    r"""The projections of a lightning indexer, which selects ``k`` keys per query for all heads of a layer (DeepSeek).

    .. math:: q^I_{th} = \mathrm{rot}(W_Q^h u_t), \quad k^I_s = \mathrm{rot}(\mathrm{LayerNorm}(W_K x_s)), \quad
              w_t = W_W x_t, \qquad I_{ts} = (H d)^{-1/2} \sum_h w_{th} \max(0,\; q^I_{th} \cdot k^I_s)

    where u is the input of the layer's query projection: its query latent or, if it has none, the tokens x. Pass the
    indexer to a `LatentAttention`. With ``k`` at least as large as the number of keys, the layer attends to all keys;
    the attribute ``k`` can be changed at any time.

    The selection has no gradient, so the indexer is trained with a loss of its own, `saccade.statistics.IndexerLoss`;
    see `LatentAttention.scorer`.

    DeepSeek multiplies index queries and keys by an orthogonal matrix (Hadamard) before quantizing them to 8 bits. That
    matrix does not change scores, and the indexer does not quantize, so it is left out.

    Args:
        embed_dim: width of the tokens.
        k: largest number of keys that a query reads.
        num_heads: number of index heads.
        head_dim: width of the index queries and of the index key, which all heads share.
        query_dim: width of u, the query latent; ``embed_dim`` if None.
        rotary: a `saccade.positions.Rotary` of width ``head_dim``, or None. ``Rotary(head_dim, rotary_dim=...)``
            rotates only the first channels.
        norm_eps: epsilon of the layer norm of index keys.

    Raises:
        ValueError: sizes below 1, or a rotary of another width.

    Cost: three projections of each token, and the scores of a `saccade.scorers.LightningIndexer`. A cache stores
    ``head_dim`` numbers per token for it.

    Example:
        >>> import torch
        >>> indexer = Indexer(16, 4, num_heads=2, head_dim=8, rotary=Rotary(8, rotary_dim=4))
        >>> indexer(torch.zeros(1, 5, 16)).scores(range(5), 5).shape
        torch.Size([1, 1, 5, 5])

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.
    """

    forecasts_with_cache = True  # as in `saccade.mechanisms.Mechanism`

    def __init__(
        self,
        embed_dim: int,
        k: int,
        *,
        num_heads: int,
        head_dim: int,
        query_dim: int | None = None,
        rotary: Rotary | None = None,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        query_dim = embed_dim if query_dim is None else query_dim
        sizes = {"embed_dim": embed_dim, "k": k, "num_heads": num_heads, "head_dim": head_dim, "query_dim": query_dim}
        for name, size in sizes.items():
            check_int(name, size)
        self.embed_dim, self.k, self.num_heads, self.head_dim, self.query_dim = sizes.values()
        checks.check_rotary(rotary, head_dim)
        self.rotary: nn.Module | None = rotary
        self.query_projection = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.key_projection = nn.Linear(embed_dim, head_dim, bias=False)
        self.key_norm = nn.LayerNorm(head_dim, check_number("norm_eps", norm_eps, above=0))
        self.weight_projection = nn.Linear(embed_dim, num_heads, bias=False)
        for projection in (self.query_projection, self.key_projection, self.weight_projection):
            nn.init.xavier_uniform_(projection.weight)

    def forward(
        self, x: Tensor, query_latent: Tensor | None = None, *, positions: GivenPositions = None
    ) -> LightningIndexer:
        """Return a scorer with the index queries, index keys and head weights of the tokens.

        Args:
            x: the tokens, ``[batch, len, embed_dim]``.
            query_latent: the input of the layer's query projection, ``[batch, len, query_dim]``; x if None.
            positions: positions of the tokens for the rotation, as in `LatentAttention.forward`; 0, 1, 2, … if None.
        """
        weight = weight_of(self.key_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        latent = x if query_latent is None else query_latent
        if latent.shape != (*x.shape[:2], self.query_dim):
            rule = f"be [{x.shape[0]}, {x.shape[1]}, {self.query_dim}], the input of the layer's query projection"
            raise value_error("query_latent", rule, None if query_latent is None else list(latent.shape))
        query = self.query_projection(latent)
        query = query.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = self.key_norm(self.key_projection(x))[:, None]
        if self.rotary is not None:
            places = Positions.of(range(x.shape[1]) if positions is None else positions).given
            query, key = self.rotary(query, places), self.rotary(key, places)
        return LightningIndexer(query, key, self.weight_projection(x).mT)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, k={self.k}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def check_indexer(indexer: Indexer | None, embed_dim: int, query_dim: int) -> None:
    """Raise an error unless ``indexer`` is None or an Indexer that fits the layer's widths."""
    hint = "for instance saccade.nn.Indexer(embed_dim, 2048, num_heads=64, head_dim=128)"
    checked = check_type("indexer", indexer, (Indexer, NoneType), "be a saccade.nn.Indexer or None", hint=hint)
    sizes = None if checked is None else [checked.embed_dim, checked.query_dim]
    if sizes not in (None, [embed_dim, query_dim]):
        rule = f"be made for embed_dim {embed_dim} and query_dim {query_dim}"
        raise value_error("indexer", rule, sizes)
