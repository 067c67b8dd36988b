"""AttentionPool: pools a sequence into one attention-weighted average of its tokens."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor, nn

from saccade.engine import dropout
from saccade.engine.nested import check_dense
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import Layer
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import ShapeSpec, check_bool, check_int, check_type

_TOKENS = ShapeSpec("x [batch, len, embed_dim]")
_ONE_QUERY = ShapeSpec("x [batch, len, embed_dim]", "query [batch, query_dim]")
_QUERIES = ShapeSpec("x [batch, len, embed_dim]", "query [batch, num_queries, query_dim]")


class AttentionPool(ArgumentHints, Layer):
    r"""A pooling layer that averages a sequence, weighting each token by its score with a query.

    .. math:: \mathrm{out} = \sum_j a_j x_j, \qquad a = \mathrm{softmax}_j\ \mathrm{score}(q, x_j)

    The query is either learned or passed with each call. Without ``num_heads``, the tokens themselves are the keys and
    values. With ``num_heads``, a `MultiHeadAttention` projects query, keys, values and output.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of attention heads; None for no heads and no projections.
        num_queries: number of learned queries; None for one query and a result without a query axis.
        query_dim: width of queries that are passed with each call; None for learned queries.
        mechanism: computes the attention weights; its score compares tokens with the query.
            `saccade.mechanisms.Softmax` if None.
        dropout_p: dropout of the weights, in training only.
        output_projection: whether the multi-head attention has an output projection. If not, the heads are only
            concatenated.

    Attributes:
        query: the learned queries, ``[num_queries or 1, width]``, or None.

    Raises:
        ValueError, TypeError: the sizes are incompatible, a query is passed to a layer with learned queries, or no
            query is passed to a layer without them.

    Cost: O(len · embed_dim) for each query, plus the score.

    Example:
        >>> from saccade.masks import Padding
        >>> from saccade.mechanisms import Softmax
        >>> from saccade.scores import Additive
        >>> pool = AttentionPool(8, mechanism=Softmax(score=Additive(8, 8, 16)))
        >>> pool(torch.zeros(2, 5, 8), mask=Padding((3, 5))).shape
        torch.Size([2, 8])

    Reference: Lin et al. 2017, arXiv:1703.03130, section 2.1; Yang et al. 2016, "Hierarchical attention networks for
    document classification", section 2.2; with heads: Lee et al. 2019, arXiv:1810.00825, section 3.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int | None = None,
        *,
        num_queries: int | None = None,
        query_dim: int | None = None,
        mechanism: Mechanism | None = None,
        dropout_p: float = 0.0,
        output_projection: bool = True,
    ):
        super().__init__()
        if not check_bool("output_projection", output_projection) and num_heads is None:
            hint = "without heads there are no projections"
            raise value_error("output_projection", "be True when num_heads is None", False, hint=hint)
        self.embed_dim = check_int("embed_dim", embed_dim)
        self.num_queries = None if num_queries is None else check_int("num_queries", num_queries)
        self.query_dim = None if query_dim is None else check_int("query_dim", query_dim)
        if query_dim is not None and num_queries is not None:
            hint = "num_queries is the number of learned queries; query_dim is the width of queries passed to the call"
            raise value_error("num_queries", "be None when query_dim is given", num_queries, hint=hint)
        hint, kinds = "pass a score as mechanisms.Softmax(score=...)", (Mechanism, NoneType)
        check_type("mechanism", mechanism, kinds, "be a saccade Mechanism or None", hint=hint)
        dropout.check(dropout_p)
        self.dropout_p = float(dropout_p)
        self.attention: MultiHeadAttention | None = None
        self.mechanism: Mechanism | None = None
        if num_heads is None:
            self.mechanism = Softmax() if mechanism is None else mechanism
        else:
            self.attention = MultiHeadAttention(
                query_dim or embed_dim, num_heads, context_dim=embed_dim, mechanism=mechanism, dropout_p=dropout_p
            )
            if not output_projection:
                self.attention.output_projection = nn.Identity()  # type: ignore[assignment]
        self.query: nn.Parameter | None = None
        if query_dim is None:
            self.query = nn.Parameter(torch.empty(num_queries or 1, self._query_width()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the pooling queries near 0, so that the layer starts close to a plain mean."""
        if self.query is not None:
            nn.init.normal_(self.query, std=0.02)

    def forward(self, x: Tensor, query: Tensor | None = None, *, mask: object = None) -> Tensor:
        """Return the attention-weighted average of each sequence.

        Args:
            x: ``[batch, len, embed_dim]``.
            query: ``[batch, query_dim]`` or ``[batch, num_queries, query_dim]``, if the layer has a ``query_dim``.
            mask: which tokens to average, such as `saccade.masks.Padding`; as in `saccade.attention`.

        Returns:
            ``[batch, embed_dim]``, or ``[batch, num_queries, embed_dim]`` for several queries. With heads and a
            ``query_dim``, the width is ``query_dim``. If all tokens are masked, the result is 0 or, with heads, the
            bias of the output projection.
        """
        check_dense(x=x, query=query)
        if self.attention is not None:
            out = self.attention(self._queries(x, query), x, mask=mask)
        else:
            matrix = self.matrix(x, query, mask=mask)
            out = matrix.matmul(x[:, None], dropout_p=self.dropout_p if self.training else 0.0)[:, 0]
        has_axis = self.num_queries is not None or (query is not None and query.dim() == 3)
        return out if has_axis else out[:, 0]

    def matrix(self, x: Tensor, query: Tensor | None = None, *, mask: object = None) -> Matrix:
        """Return the lazy pooling weights, ``[batch, num_heads or 1, num_queries, len]``; see `forward`."""
        queries = self._queries(x, query)
        if self.mechanism is not None:
            return self.mechanism(queries[:, None], x[:, None], mask=mask)
        assert self.attention is not None
        return self.attention.matrix(queries, x, mask=mask)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_queries={self.num_queries}, query_dim={self.query_dim}"

    def _query_width(self) -> int:
        score = getattr(self.mechanism, "score", None)
        widths = None if score is None else score.widths
        return self.embed_dim if widths is None else widths[0]

    def _queries(self, x: Tensor, query: Tensor | None) -> Tensor:
        """Return the learned queries or those passed to the call, ``[batch, num_queries, width]``."""
        _TOKENS.check(x, embed_dim=self.embed_dim)
        if self.query is not None:
            if query is not None:
                hint = "a pool with query_dim= takes queries in each call"
                raise value_error("query", "be None when queries are learned", "a tensor", hint=hint)
            return self.query.to(x.dtype).expand(len(x), -1, -1)
        if query is None:
            raise value_error("query", "be given, because the layer has a query_dim", None)
        has_axis = isinstance(query, Tensor) and query.dim() == 3
        (_QUERIES if has_axis else _ONE_QUERY).check(x, query, query_dim=self.query_dim or 0)
        return query if has_axis else query[:, None]
