"""MultiHeadAttention: projections around a mechanism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.arguments import is_integer
from saccade.caches import CrossCache, LayerCache
from saccade.engine import dropout
from saccade.engine.at_positions import GivenPositions, check_positions, consecutive
from saccade.errors import describe, type_error, unsupported, value_error
from saccade.masks import Mask, as_mask
from saccade.masks.causality import sees_later
from saccade.matrix import DENSE_LIMIT, Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.nn.projections import weight_of
from saccade.positions import Rotary

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    r"""Several attentions side by side, each on its own projections.

    .. math:: \mathrm{out} = \mathrm{Concat}(A_1 V_1, \dots, A_h V_h)\, W_O, \qquad
              A_i = \mathrm{mechanism}(Q W_i^Q, K W_i^K)

    ``mha(x)`` is self-attention, ``mha(x, context)`` cross-attention, ``mha(query, key, value)`` takes three sources.
    Layout is ``[batch, len, embed_dim]`` throughout.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: divides ``embed_dim``.
        num_kv_heads: key and value heads (grouped-query attention); divides ``num_heads``; as many when None.
        context_dim: width of keys and values before projection; ``embed_dim`` when None.
        mask: the module's pattern (who may attend to whom); joined with the mask of each call by ``&``.
        mechanism: which matrix; `saccade.mechanisms.Softmax` when None.
        rotary: turns queries and keys by their positions, a `saccade.positions.Rotary`; none when None.
        dropout_p: of the attention weights, in training only.
        projection_bias: whether the four projections have a bias.

    Raises:
        ValueError: sizes that do not divide, or inputs of the wrong width.

    Cost: four projections, and the mechanism's.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> mha = MultiHeadAttention(16, 4, num_kv_heads=2, mask=Causal())
        >>> mha(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        mask: Mask | None = None,
        mechanism: Mechanism | None = None,
        rotary: Rotary | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = True,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_sizes(embed_dim, num_heads, num_kv_heads, context_dim, dropout_p)
        if not isinstance(projection_bias, bool):
            raise type_error("MultiHeadAttention", "projection_bias", "be True or False", repr(projection_bias))
        if mask is not None and not isinstance(mask, Mask):
            hint = "a tensor or function is a fact of one batch: pass it with the call"
            raise type_error("MultiHeadAttention", "mask", "be a saccade mask", type(mask).__name__, hint=hint)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.context_dim = embed_dim if context_dim is None else context_dim
        self.head_dim = embed_dim // num_heads
        self.dropout_p = float(dropout_p)
        self.mask = mask
        if mechanism is not None and not isinstance(mechanism, Mechanism):
            hint = "for instance saccade.mechanisms.Softmax(softcap=30.0)"
            rule = "be a saccade Mechanism or None"
            raise type_error("MultiHeadAttention", "mechanism", rule, type(mechanism).__name__, hint=hint)
        self.mechanism = Softmax() if mechanism is None else mechanism
        _check_rotary(rotary, self.head_dim)
        self.rotary = rotary
        kv_dim = num_kv_heads * self.head_dim
        self.query_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.key_projection = nn.Linear(self.context_dim, kv_dim, bias=projection_bias)
        self.value_projection = nn.Linear(self.context_dim, kv_dim, bias=projection_bias)
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform weights and zero biases, as ``nn.MultiheadAttention`` starts."""
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, q_len, embed_dim]``.
            key: ``[batch, kv_len, context_dim]``; the query itself when None.
            value: ``[batch, kv_len, context_dim]``; the key when None.
            mask: the facts of this batch (anything that `saccade.attention` takes); joined with the module's by ``&``.
            positions: where the queries stand, and in self-attention the keys: a range, or int64 ``[len]`` or
                ``[batch, len]`` (a tensor or a list); -1 means that no token stands here. By default key j stands at j
                and query i at ``kv_len - q_len + i``.
            kv_positions: where the keys stand, in cross-attention.
            cache: what this layer remembers of earlier calls. With a `saccade.caches.KVCache` the query holds new
                tokens, which attend to all tokens so far; they stand where the cache says unless ``positions`` do.
                With a `saccade.caches.CrossCache` the context is projected once.

        Returns:
            ``[batch, q_len, embed_dim]``.
        """
        if cache is not None:
            # What a cache remembers lies outside of a compiler's graph.
            remembering = (
                torch.compiler.disable(self._remembering) if torch.compiler.is_compiling() else self._remembering
            )
            return remembering(query, key, value, mask, positions, kv_positions, cache)
        matrix, v = self._prepare(query, key, value, mask, positions, kv_positions)
        return self._finish(matrix, v)

    def matrix(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Matrix:
        """The attention matrix of this call, ``[batch, num_heads, q_len, kv_len]``, not built; see `forward`."""
        return self._prepare(query, key, None, mask, positions, kv_positions)[0]

    def with_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> tuple[Tensor, Tensor]:
        """Output, and the weights of every head: ``[batch, num_heads, q_len, kv_len]``.

        The weights are those of the mechanism, before dropout: their rows sum to 1.

        Raises:
            ValueError: more than `saccade.matrix.DENSE_LIMIT` weights; `matrix` gives them without building them.
        """
        matrix, v = self._prepare(query, key, value, mask, positions, kv_positions)
        batch, heads, q_len, kv_len = matrix.shape
        if batch * heads * q_len * kv_len > DENSE_LIMIT:
            got = f"{batch * heads * q_len * kv_len:,} weights, {list(matrix.shape)}"
            hint = "matrix(...) returns them as a lazy matrix: rows, products, A.mT @ x"
            rule = f"be at most {DENSE_LIMIT:,} weights"
            raise value_error("MultiHeadAttention.with_weights", "size", rule, got, hint=hint)
        return self._finish(matrix, v), matrix.to_dense()

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"mask={self.mask}, dropout_p={self.dropout_p}"
        )

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: object,
        positions: GivenPositions,
        kv_positions: GivenPositions,
    ) -> tuple[Matrix, Tensor]:
        if value is not None and key is None:
            raise value_error("MultiHeadAttention", "key", "be given where value is", None)
        if key is None:
            key = query
            kv_positions = positions if kv_positions is None else kv_positions
        value = key if value is None else value
        self._check_inputs(query, key, value)
        shape = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        joined = self._joined(mask, shape)
        q = self._heads(self.query_projection(query), self.num_heads)
        k = self._heads(self.key_projection(key), self.num_kv_heads)
        v = self._heads(self.value_projection(value), self.num_kv_heads)
        positions = check_positions(positions, "positions", shape[0], shape[2], "MultiHeadAttention")
        kv_positions = check_positions(kv_positions, "kv_positions", shape[0], shape[3], "MultiHeadAttention")
        if self.rotary is not None:
            q = self.rotary(q, consecutive(shape[3] - shape[2], shape[3]) if positions is None else positions)
            k = self.rotary(k, consecutive(0, shape[3]) if kv_positions is None else kv_positions)
        return self.mechanism(q, k, mask=joined, q_positions=positions, kv_positions=kv_positions), v

    def _remembering(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: object,
        positions: GivenPositions,
        kv_positions: GivenPositions,
        cache: LayerCache,
    ) -> Tensor:
        where = "MultiHeadAttention"
        if not isinstance(cache, LayerCache):
            hint = "for instance saccade.caches.KVCache(); a Cache of a whole model holds one for each layer"
            raise type_error(where, "cache", "be the cache of a layer, or None", type(cache).__name__, hint=hint)
        if isinstance(mask, Tensor):
            hint = "masks.Dense(tensor) is read at positions; padding goes to positions, as -1"
            raise value_error(where, "mask", "be a rule on positions with a cache", "a tensor", hint=hint)
        if isinstance(cache, CrossCache):
            return self._attending_to_context(query, key, value, mask, positions, kv_positions, cache)
        if not (key is None and value is None and kv_positions is None):
            name = "kv_positions" if key is None and value is None else "key and value"
            hint = "the cache holds the keys of earlier tokens; another context goes to a saccade.caches.CrossCache"
            raise value_error(where, name, f"be None with a {type(cache).__name__}", "another", hint=hint)
        self._check_inputs(query, query, query)
        q_len = query.shape[1]
        joined = self._joined(mask, (query.shape[0], self.num_heads, q_len, cache.length + q_len))
        positions = check_positions(positions, "positions", len(query), q_len, where)
        positions = cache.positions(q_len) if positions is None else positions
        _check_causal(joined, positions, cache)
        q = self._heads(self.query_projection(query), self.num_heads)
        k = self._heads(self.key_projection(query), self.num_kv_heads)
        v = self._heads(self.value_projection(query), self.num_kv_heads)
        if self.rotary is not None:
            own = range(q_len) if positions is None else positions
            q, k = self.rotary(q, own), self.rotary(k, own)
        dropout_p = self.dropout_p if self.training else 0.0
        return self._merged(
            cache.attend(self.mechanism, q, k, v, mask=joined, positions=positions, dropout_p=dropout_p)
        )

    def _attending_to_context(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: object,
        positions: GivenPositions,
        kv_positions: GivenPositions,
        cache: CrossCache,
    ) -> Tensor:
        where = "MultiHeadAttention"
        if self.rotary is not None and positions is None:
            hint = "a CrossCache does not count the tokens that ask"
            raise value_error(where, "positions", "be given with rotary and a CrossCache", None, hint=hint)
        if not cache.is_filled:
            if key is None:
                raise value_error(where, "key", "be given in the first call with a CrossCache", None)
            value = key if value is None else value
            self._check_inputs(query, key, value)
            joined = self._joined(mask, (len(query), self.num_heads, query.shape[1], key.shape[1]))
            k = self._heads(self.key_projection(key), self.num_kv_heads)
            v = self._heads(self.value_projection(value), self.num_kv_heads)
            kv_positions = check_positions(kv_positions, "kv_positions", key.shape[0], key.shape[1], where)
            if self.rotary is not None:
                k = self.rotary(k, range(key.shape[1]) if kv_positions is None else kv_positions)
            cache.fill(k, v, kv_positions=kv_positions)
        else:
            context = query.new_empty(len(query), cache.length, self.context_dim)
            self._check_inputs(query, context, context)
            for name, x in (("key", key), ("value", value)):
                if x is not None and x.shape != context.shape:
                    rule = f"have shape {list(context.shape)}, as the context in the cache, or be None"
                    raise value_error(where, name, rule, list(x.shape), hint="a new context: a new CrossCache")
            if kv_positions is not None:
                rule = "be given in the first call with a CrossCache only"
                raise value_error(where, "kv_positions", rule, "new ones")
            joined = self._joined(mask, (len(query), self.num_heads, query.shape[1], cache.length))
        positions = check_positions(positions, "positions", query.shape[0], query.shape[1], where)
        q = self._heads(self.query_projection(query), self.num_heads)
        if self.rotary is not None and positions is not None:
            q = self.rotary(q, positions)
        dropout_p = self.dropout_p if self.training else 0.0
        return self._merged(cache.attend(self.mechanism, q, mask=joined, positions=positions, dropout_p=dropout_p))

    def _joined(self, mask: object, shape: tuple[int, int, int, int]) -> Mask | None:
        """The module's pattern and the facts of the batch as one mask that the mechanism can run."""
        joined = self.mask
        if mask is not None:
            own = as_mask(mask, shape, where="MultiHeadAttention")
            joined = own if self.mask is None else self.mask & own
        if joined is not None:
            reasons = self.mechanism.reasons(joined)
            if reasons:
                raise unsupported("MultiHeadAttention", type(self.mechanism).__name__, reasons)
        return joined

    def _finish(self, matrix: Matrix, v: Tensor) -> Tensor:
        return self._merged(matrix.matmul(v, dropout_p=self.dropout_p if self.training else 0.0))

    def _merged(self, heads: Tensor) -> Tensor:
        return self.output_projection(heads.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        where = "MultiHeadAttention"
        widths = {"query": self.embed_dim, "key": self.context_dim, "value": self.context_dim}
        given = {"query": query, "key": key, "value": value}
        if key is query and value is query and self.context_dim == self.embed_dim:
            given = {"query": query}  # looked at once
        for name, x in given.items():
            if not isinstance(x, Tensor):
                raise type_error(where, name, "be a tensor", type(x).__name__)
        for name, x in given.items():
            if x.dim() != 3 or x.shape[2] != widths[name]:
                rule = f"have shape [batch, len, {widths[name]}]"
                raise value_error(where, name, rule, list(x.shape), facts=_facts(given))
        own = weight_of(self.query_projection)
        for x in given.values():
            if own is not None and x.dtype != own.dtype and not torch.is_autocast_enabled(x.device.type):
                rule = f"be {str(own.dtype).removeprefix('torch.')}, like the parameters"
                raise value_error(where, "dtype", rule, str(x.dtype).removeprefix("torch."), facts=_facts(given))
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            got = f"{query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
            raise value_error(where, "batch", "be the same for all inputs", got, facts=_facts(given))
        if key.shape[1] != value.shape[1]:
            got = f"{key.shape[1]} and {value.shape[1]}"
            raise value_error(where, "key and value", "be equally long", got, facts=_facts(given))


def _facts(given: dict[str, Tensor]) -> list[str]:
    return [describe(name, x) for name, x in given.items()]


def _check_causal(mask: Mask | None, positions: range | Tensor | None, cache: LayerCache) -> None:
    """Raise if these queries may attend to keys that are yet to come: the answer would not be that of the full run."""
    if positions is None or not sees_later(mask, positions):
        return
    hint = (
        "mask=masks.Causal(), or your_mask & masks.Causal(); keys that may be seen go in with the queries that see them"
    )
    rule = f"let no query see keys that come later, with a {type(cache).__name__}"
    raise value_error("MultiHeadAttention", "mask", rule, mask, hint=hint)


def _check_sizes(embed_dim: int, num_heads: int, num_kv_heads: int, context_dim: int | None, dropout_p: float) -> None:
    where = "MultiHeadAttention"
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in (sizes if context_dim is None else sizes | {"context_dim": context_dim}).items():
        if not is_integer(size) or size < 1:
            raise value_error(where, name, "be an int of at least 1", repr(size))
    if embed_dim % num_heads:
        raise value_error(where, "num_heads", f"divide embed_dim {embed_dim}", num_heads)
    if num_heads % num_kv_heads:
        raise value_error(where, "num_kv_heads", f"divide num_heads {num_heads}", num_kv_heads)
    dropout.check(dropout_p, where)


def _check_rotary(rotary: Rotary | None, head_dim: int) -> None:
    if rotary is None:
        return
    where = "MultiHeadAttention"
    if not isinstance(rotary, Rotary):
        hint = f"for instance saccade.positions.Rotary({head_dim})"
        raise type_error(where, "rotary", "be a saccade Rotary or None", type(rotary).__name__, hint=hint)
    if rotary.head_dim != head_dim:
        raise value_error(where, "rotary", f"be made for head_dim {head_dim}", rotary.head_dim)
