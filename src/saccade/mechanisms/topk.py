"""TopK: exact softmax over the keys that a scorer selects for each query."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from saccade.caches import IndexedCache, KVCache, LayerCache
from saccade.engine.inputs import AttentionInputs
from saccade.matrix.block_sparse import select_blocks
from saccade.mechanisms.selecting import Selecting, has_no_values
from saccade.mechanisms.softmax import Softmax
from saccade.positions import Bias
from saccade.scorers.key_scorers import DotProducts
from saccade.scorers.scorer import FunctionScorer, Scorer
from saccade.support.errors import kind, type_error
from saccade.support.validation import check_int, check_type, is_integer

_ROWS = 256  # number of rows whose scores a dry run forecasts at a time


class TopK(Selecting):
    r"""Exact softmax over the ``k`` keys, or blocks of keys, that a cheap scorer ranks highest for each query.

    .. math:: A_{ij} = \frac{\exp(s_{ij})}{\sum_{j' \in S(i)} \exp(s_{ij'})},\quad j \in S(i), \qquad
              S(i) = \text{the } k \text{ largest } I_{ij} \text{ with } j \in V(i)

    where V(i) is the set of keys that query i may attend to. Of keys with equal scores, the first ones are selected.
    Scores are computed in float64 and compared in float32, so that a step with a cache selects the same keys as the
    full run. If two scores differ by less than the precision of float32, either selection is correct.

    With blocks of several keys, ``k`` counts blocks. Blocks that a query sees only in part, such as the block that
    contains it under a causal mask, are always read and count towards ``k``. Block boundaries are counted in columns
    from the first key.

    The selection is part of the matrix, as a mask, so all statistics and products use only the selected keys. The
    scorer gets no gradient; `saccade.statistics.IndexerLoss` can train one.

    Args:
        scorer: a `saccade.scorers.Scorer`, or a function ``(query, key, rows) -> scores`` that receives all queries,
            all keys and a range of rows, and returns ``[batch, 1 | kv_heads | heads, rows, kv_len or blocks]``. Under a
            causal mask, a query's scores must not depend on later keys. When None, dot products of query and key:
            ``TopK(256)`` is ``TopK(scorers.DotProducts(), 256)``.
        k: largest number of keys, or of blocks, that a query reads. If a query sees more than ``k`` blocks only in
            part, it reads them all.
        block_size: number of keys in a block.
        softmax: the softmax over the selected keys, with its score, bias, scale, softcap, sink_logit and impl;
            `Softmax()` when None.

    Raises:
        TypeError: a scorer or softmax of a wrong type.
        ValueError: sizes below 1, or scores with a wrong shape.

    Cost: O(q_len * kv_len) cheap scores, computed a few rows at a time, and an index of 4 bytes for each selected key
    or block of each query. With blocks of at least 16 keys, products run block by block in O(q_len * k * block_size)
    time. Single keys are gathered if they are few, as in decoding steps, or if many heads share a key. If not, they
    become a mask over all tiles, which takes about as long as dense attention. Under `torch.compile`, the selection and
    the product break the graph.

    Example:
        >>> import torch
        >>> from saccade import masks
        >>> from saccade.scorers import DotProducts
        >>> q = k = torch.tensor([[0.0], [3.0], [1.0], [2.0]])[None, None]
        >>> TopK(DotProducts(), 2)(q, k, mask=masks.Causal()).to_dense()[0, 0].gt(0).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp; Lu et al. 2025, arXiv:2502.13189 (MoBA).
    """

    forecasts_with_cache = True

    def __init__(
        self,
        scorer: Scorer | Callable[[Tensor, Tensor, range], Tensor] | int | None = None,
        k: int | None = None,
        block_size: int = 1,
        *,
        softmax: Softmax | None = None,
    ):
        if k is None and is_integer(scorer):
            scorer, k = None, scorer
        if k is None:
            raise type_error(
                "k", "be given", "nothing", hint="TopK(256) selects by dot products, TopK(scorer, 256) by another score"
            )
        scorer = DotProducts() if scorer is None else scorer
        if isinstance(scorer, type) or not (isinstance(scorer, Scorer) or callable(scorer)):
            rule = "be a Scorer or a function (query, key, rows) -> scores"
            raise type_error("scorer", rule, kind(scorer), hint="saccade.scorers.BlockMeans()")
        given = check_type("softmax", Softmax() if softmax is None else softmax, Softmax, "be a Softmax or None")
        super().__init__(check_int("k", k), check_int("block_size", block_size), given)
        self.scorer = scorer

    @property
    def _scorer(self) -> Scorer:
        """The scorer, or a scorer that calls the user's function."""
        return self.scorer if isinstance(self.scorer, Scorer) else FunctionScorer(self.scorer)

    @property
    def index_key(self) -> Tensor | None:
        """The scorer's index keys, which some scorers need in addition to the keys; None if there are none."""
        return self._scorer.index_key

    def with_index_key(self, index_key: Tensor) -> TopK:
        """Return this mechanism with the index keys of all tokens so far. Caches call this method."""
        indexed = TopK(self._scorer.with_index_key(index_key), self.k, self.block_size, softmax=self.softmax)
        return self._with_hooks(indexed)

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        return KVCache(max_len) if self.index_key is None else IndexedCache(max_len)

    def with_bias(self, bias: Tensor | Bias) -> TopK:
        biased = TopK(self.scorer, self.k, self.block_size, softmax=self.softmax.with_bias(bias))
        return self._with_hooks(biased)

    def _index(self, inputs: AttentionInputs, query: Tensor, key: Tensor) -> Tensor | None:
        score = self._scorer.on(query, key, self.block_size)
        if not has_no_values(query):
            return select_blocks(inputs, score, self.k, self.block_size)
        q_len, kv_len = inputs.shape[2:]
        for first in range(0, q_len, _ROWS):
            last = min(first + _ROWS, q_len)
            score(range(first, last), max(0, kv_len - q_len + last) if inputs.rule.is_causal else kv_len)
        return None

    def extra_repr(self) -> str:
        return f"{self.scorer}, k={self.k}, block_size={self.block_size}"
