"""MultiHeadAttention: an attention mechanism with learned projections of its inputs and its output."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import NoneType
from typing import Any, Never

import torch
from torch import Tensor, nn

from saccade.caches import Cache, CrossCache, LayerCache
from saccade.engine.nested import Nested, is_nested
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.nn import attention_checks as checks
from saccade.nn.attention_heads import CallPositions, Heads, rotated_together, rotation_positions, with_temperature
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.convolved_projections import ConvolvedProjections, restored_on_error, split_cache
from saccade.nn.projections import weight_of
from saccade.nn.qk_norm import QKNorm, norm_and_rotate
from saccade.nn.shared_keys import SharedKeys
from saccade.positions import Bias, QueryTemperature, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import unexpected_argument
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import CACHED, is_tracing, outside_graph
from saccade.support.validation import check_bool, check_type


class MultiHeadAttention(AttentionLayer):
    r"""Multi-head attention: several attention heads in parallel, each with its own projections.

    .. math:: \mathrm{out} = \mathrm{Concat}(A_1 V_1, \dots, A_h V_h)\, W_O, \qquad
              A_i = \mathrm{mechanism}(Q W_i^Q, K W_i^K)

    ``mha(x)`` is self-attention, ``mha(x, context)`` is cross-attention, and ``mha(query, key, value)`` takes three
    inputs. All tensors have the layout ``[batch, len, embed_dim]``.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads; must divide ``embed_dim`` unless ``head_dim`` is passed.
        num_kv_heads: number of key and value heads (grouped-query attention); must divide ``num_heads``; ``num_heads``
            if None.
        head_dim: width of a head; ``embed_dim / num_heads`` if None.
        context_dim: width of keys and values before projection; ``embed_dim`` if None.
        mask: mask of the module; combined with the mask of each call by ``&``.
        mechanism: computes the attention matrix; `saccade.mechanisms.Softmax` if None.
        rotary: a `saccade.positions.Rotary` for queries and keys, or None.
        qk_norm: options for norms of queries and keys, or None.
        temperature: a position-dependent factor for queries, or None; see `saccade.positions.QueryTemperature`.
        short_convolution: number of positions that a convolution of queries, keys and values reads before their norms,
            followed by a silu; see `saccade.mechanisms.ShortConvolution`. None for no convolution. With a convolution,
            only self-attention is supported, and `new_cache` returns two caches.
        dropout_p: dropout of the attention weights, in training only.
        projection_bias: whether the projections have a bias.
        output_gate: whether a fifth projection of the query input gates the heads before the output projection,
            :math:`\sigma(x W_G) \odot \mathrm{Concat}(\dots)`. The gate does not affect the matrices.

    Raises:
        ValueError: sizes do not divide evenly, or inputs have the wrong width.

    Cost: four projections (five with a gate), plus the mechanism.

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
        head_dim: int | None = None,
        context_dim: int | None = None,
        mask: Mask | None = None,
        mechanism: Mechanism | None = None,
        rotary: Rotary | None = None,
        qk_norm: QKNorm | None = None,
        temperature: QueryTemperature | None = None,
        short_convolution: int | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = True,
        output_gate: bool = False,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kv_input_dim = embed_dim if context_dim is None else context_dim
        head_width = checks.check_sizes(embed_dim, num_heads, num_kv_heads, kv_input_dim, head_dim, dropout_p)
        check_bool("projection_bias", projection_bias)
        super().__init__(embed_dim, num_heads, mask, mechanism, dropout_p)
        self.num_kv_heads, self.context_dim, self.head_dim = num_kv_heads, kv_input_dim, head_width
        checks.check_rotary(rotary, self.head_dim)
        self.rotary: nn.Module | None = rotary
        self.qk_norm = check_type("qk_norm", qk_norm, (QKNorm, NoneType), "be a saccade.nn.QKNorm or None")
        hint = "for instance saccade.positions.QueryTemperature(8192, 0.1)"
        kinds, rule = (QueryTemperature, NoneType), "be a saccade QueryTemperature or None"
        self.temperature = check_type("temperature", temperature, kinds, rule, hint=hint)
        self.query_norm = None if qk_norm is None else qk_norm.make(num_heads, self.head_dim)
        self.key_norm = None if qk_norm is None else qk_norm.make(num_kv_heads, self.head_dim)
        inner_dim, kv_dim = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.query_projection = nn.Linear(embed_dim, inner_dim, bias=projection_bias)
        self.key_projection = nn.Linear(self.context_dim, kv_dim, bias=projection_bias)
        self.value_projection = nn.Linear(self.context_dim, kv_dim, bias=projection_bias)
        self.output_projection = nn.Linear(inner_dim, embed_dim, bias=projection_bias)
        channels = inner_dim + 2 * kv_dim
        self.convolution = None if short_convolution is None else ConvolvedProjections(channels, short_convolution)
        has_gate = check_bool("output_gate", output_gate)
        self.gate_projection = nn.Linear(embed_dim, inner_dim, bias=projection_bias) if has_gate else None
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | Cache | None = None,
        shared: SharedKeys | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Apply multi-head attention to `query`.

        Args:
            query: ``[batch, q_len, embed_dim]``, or a nested tensor. Each item of a nested tensor attends only to
                itself; all inputs must then be nested, positions and cache must be None, and the output is nested in
                the same way.
            key: ``[batch, kv_len, context_dim]``; the query if None.
            value: ``[batch, kv_len, context_dim]``; the key if None.
            mask: a mask for this batch, as in `saccade.attention`; combined with the module's own mask by ``&``.
            positions: positions of the queries, and in self-attention also of the keys: a range, or int64 ``[len]`` or
                ``[batch, len]`` (a tensor or a list); -1 marks padding. By default, key j is at position j and query i
                at ``kv_len - q_len + i``.
            kv_positions: positions of the keys in cross-attention.
            rotary_positions: positions for the rotation only, in self-attention, if they differ from the positions that
                masks use: for example the depths in a `saccade.masks.Tree`, or ``[batch | 1, axes, len]`` for a
                `Rotary` with sections.
            bias: added to the scores of this call, as in `saccade.attention`; with a cache, a function of positions,
                not a tensor.
            cache: the cache of earlier calls of this layer. With a `saccade.caches.KVCache`, the query contains
                only new tokens, which attend to all tokens so far; their positions continue those in the cache unless
                ``positions`` is passed. With a `saccade.caches.CrossCache`, the context is projected only once. A
                layer with a short convolution takes the two caches that `new_cache` returns.
            shared: an object that stores the keys and values of this call for later layers, or mixes in the values of
                the first layer; see `SharedKeyAttention` and `DecoderStack`.

        Returns:
            ``[batch, q_len, embed_dim]``.
        """
        if unknown:
            raise unexpected_argument(unknown, self.forward)
        if is_nested(query, key, value):
            checks.check_nested_call(mask, bias, positions, kv_positions, rotary_positions, cache)
            return self._attend_nested(query, key, value, mask, bias)
        if cache is not None and is_tracing() and not is_dry_run():
            outside: Any = outside_graph(self.forward, CACHED)
            given = {"positions": positions, "kv_positions": kv_positions, "rotary_positions": rotary_positions}
            return outside(query, key, value, mask=mask, bias=bias, cache=cache, shared=shared, **given)
        call_positions = CallPositions(positions, kv_positions, rotary_positions)
        caches: tuple[Any, LayerCache | None] = (cache, None) if self.convolution is None else split_cache(cache)
        main_cache = caches[0]
        with nullcontext() if caches[1] is None else restored_on_error(caches[1]):
            is_new = not (isinstance(main_cache, CrossCache) and main_cache.is_filled)
            heads = self._heads(query, key, value, mask, call_positions, *caches)
            if shared is not None:
                heads = heads._replace(value=shared.exchange(heads.key, heads.value))
            dropout_p = self.dropout_p if self.training else 0.0
            if main_cache is None:
                out = self._matrix(heads, bias).matmul(heads.value, dropout_p=dropout_p)
                return self._project_output(out, query)
            assert isinstance(main_cache, LayerCache)
            mechanism = self.mechanism if bias is None else self.mechanism.with_bias(checks.checked_bias(bias))
            q, k, v, joined, q_places, kv_places = heads
            if not isinstance(main_cache, CrossCache):
                out = main_cache.attend(mechanism, q, k, v, mask=joined, positions=q_places, dropout_p=dropout_p)
                return self._project_output(out, query)
            if is_new:
                main_cache.fill(k, v, kv_positions=kv_places)
            out = main_cache.attend(mechanism, q, mask=joined, positions=q_places, dropout_p=dropout_p)
            return self._project_output(out, query)

    def new_cache(self, max_len: int | None = None) -> LayerCache | Cache:  # type: ignore[override]  # two if convolved
        """Return an empty cache for the attention layer or, with a short convolution, a `Cache` of two caches."""
        cache = super().new_cache(max_len)
        return cache if self.convolution is None else Cache([cache, self.convolution.new_cache()])

    def matrix(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the lazy matrix of multi-head attention, ``[batch, num_heads, q_len, kv_len]``; see `forward`."""
        call_positions = CallPositions(positions, kv_positions, rotary_positions)
        return self._matrix(self._heads(query, key, None, mask, call_positions, None), bias)

    def with_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention layer's output and the weights of every head, ``[batch, num_heads, q_len, kv_len]``.

        Dropout does not affect these weights, so with softmax their rows sum to 1.

        Raises:
            ValueError: more than `saccade.matrix.DENSE_LIMIT` weights; use `matrix`, which is lazy.
        """
        call_positions = CallPositions(positions, kv_positions, rotary_positions)
        heads = self._heads(query, key, value, mask, call_positions, None)
        matrix = self._matrix(heads, bias)
        checks.check_stored_size(matrix.shape)
        return self._product(matrix, heads, query), matrix.to_dense()

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, mask={self.mask}, dropout_p={self.dropout_p}"

    def _heads(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: object,
        call_positions: CallPositions,
        cache: LayerCache | None,
        convolution_cache: LayerCache | None = None,
    ) -> Heads:
        """Check the inputs of an attention call, project them to heads, and rotate queries and keys."""
        positions, kv_positions, rotary_positions = call_positions
        parts_of, rotary = self._modules, self.rotary
        if cache is not None:
            if self.qk_norm is not None:
                self.qk_norm.check_cache(cache)
            positions_unknown = rotary is not None and positions is None
            checks.check_with_cache(
                cache, query, key, value, mask, kv_positions, self.context_dim, positions_unknown=positions_unknown
            )
        elif value is not None and key is None:
            raise value_error("key", "be given together with value", None)
        is_cross, cached_len = isinstance(cache, CrossCache), 0 if cache is None else cache.length
        context_cached = isinstance(cache, CrossCache) and cache.is_filled
        if context_cached:
            key = query.new_empty(len(query), cached_len, self.context_dim)
        elif key is None:
            key, kv_positions = query, positions if kv_positions is None else kv_positions
        value = key if value is None or context_cached else value
        query_projection = parts_of["query_projection"]
        weight = weight_of(query_projection)
        dtype = None if weight is None else weight.dtype
        checks.check_inputs(query, key, value, self.embed_dim, self.context_dim, dtype)
        (batch, q_len, _), kv_len = query.shape, key.shape[1]
        joined = self._joined(mask, (batch, self.num_heads, q_len, kv_len if is_cross else cached_len + kv_len))
        q_places = None if positions is None else Positions.of(positions, length=q_len, batch=batch)
        kv_places = q_places if key is query and kv_positions is positions else None
        if kv_places is None and kv_positions is not None:
            kv_places = Positions.of(kv_positions, "kv_positions", length=kv_len, batch=batch)
        if kv_places is not None and joined is not None:
            checks.check_document_positions(joined, kv_places)
        uses_positions = q_places is not None or rotary is not None or self.temperature is not None
        cache_numbers_tokens = not uses_positions and joined is not None and joined.is_causal
        if cache is not None and not is_cross and not cache_numbers_tokens:
            q_places = kv_places = checks.check_causal(
                joined, cache.positions(q_len) if q_places is None else q_places.given, cache
            )
        # Skip unused calls: each costs as much as a small operation.
        q_rotary_positions = k_rotary_positions = temperature_places = None
        if rotary is not None or self.temperature is not None or rotary_positions is not None:
            explicit = checks.checked_rotary_positions(rotary_positions, rotary, key is query, cache)
            q_rotary_positions, k_rotary_positions, temperature_places = rotation_positions(
                explicit, (q_places, kv_places), (q_len, kv_len), joined
            )
        if context_cached:
            q = self._split_and_rotate(query_projection(query), q_rotary_positions, self.query_norm)
            q = q if temperature_places is None else with_temperature(q, self.temperature, *temperature_places)
            return Heads(q, q, q, joined, q_places, kv_places)
        projections = query_projection, parts_of["key_projection"], parts_of["value_projection"]
        parts: Sequence[Tensor] = projections[0](query), projections[1](key), projections[2](value)
        if self.convolution is not None:
            checks.check_convolved(key is query and value is query, cache)
            parts = self._convolved(parts, joined, q_places, convolution_cache)
        q, k = self._query_and_key(parts[0], parts[1], q_rotary_positions, k_rotary_positions)
        q = q if temperature_places is None else with_temperature(q, self.temperature, *temperature_places)
        return Heads(q, k, self._split(parts[2]), joined, q_places, kv_places)

    def _convolved(
        self,
        parts: Sequence[Tensor],
        mask: Mask | None,
        positions: Positions | None,
        convolution_cache: LayerCache | None,
    ) -> Sequence[Tensor]:
        """Apply the short convolution to projected queries, keys and values."""
        assert self.convolution is not None
        whole = self.convolution(torch.cat(list(parts), 2), mask=mask, positions=positions, cache=convolution_cache)
        return whole.split([part.shape[2] for part in parts], 2)

    def _attend_nested(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, mask: object, bias: Tensor | Bias | None
    ) -> Tensor:
        """Compute attention within each item of nested tensors by packing the items into one sequence.

        The output is nested in the same way.
        """
        if is_tracing():
            outside = outside_graph(self._attend_nested, "a compiled graph cannot read the lengths of nested tensors")
            return outside(query, key, value, mask, bias)
        if value is not None and key is None:
            raise value_error("key", "be given together with value", None)
        key = query if key is None else key
        items = Nested.of(query, key, key if value is None else value, axis=0)
        batch, q_len, kv_len = items.shape
        checks.check_inputs(*items[:3], self.embed_dim, self.context_dim, None)
        joined = items.mask(self._joined(mask, (batch, self.num_heads, q_len, kv_len)), self.num_heads)
        reasons = self.mechanism.reasons(joined)
        if reasons:
            raise unsupported(type(self.mechanism).__name__, reasons)
        uses_positions = self.rotary is not None or self.temperature is not None
        q_rotary_positions, k_rotary_positions = items.item_positions() if uses_positions else (None, None)
        projections = (self.query_projection, self.key_projection, self.value_projection)
        parts: Sequence[Tensor] = [project(x) for project, x in zip(projections, items[:3], strict=True)]
        if self.convolution is not None:
            checks.check_convolved(key is query and (value is None or value is query), None)
            parts = self._convolved(parts, joined, None, None)
        q, k = self._query_and_key(parts[0], parts[1], q_rotary_positions, k_rotary_positions)
        q, v = with_temperature(q, self.temperature, q_rotary_positions, None), self._split(parts[2])
        positions = {name: Positions.of(table, name) for name, table in items.positions.items()}
        heads = Heads(q, k, v, joined, positions.get("q_positions"), positions.get("kv_positions"))
        return items.unpacked(self._product(self._matrix(heads, bias), heads, items.query))

    def _matrix(self, heads: Heads, bias: Tensor | Bias | None) -> Matrix:
        query, key, _, mask, q_places, kv_places = heads
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        return mechanism(query, key, mask=mask, q_positions=q_places, kv_positions=kv_places)

    def _product(self, matrix: Matrix, heads: Heads, query: Tensor) -> Tensor:
        return self._project_output(
            matrix.matmul(heads.value, dropout_p=self.dropout_p if self.training else 0.0), query
        )

    def _project_output(self, heads: Tensor, query: Tensor) -> Tensor:
        """Apply the output gate, if there is one, and the output projection to the attention heads."""
        batch, count, length, width = heads.shape
        merged = heads.reshape(batch, 1, count * width) if length == 1 else heads.transpose(1, 2).flatten(2)
        if self.gate_projection is not None:
            merged = merged * torch.sigmoid(self.gate_projection(query))
        return self._modules["output_projection"](merged)

    def _query_and_key(
        self, query: Tensor, key: Tensor, q_positions: range | Tensor | None, k_positions: range | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Split projected queries and keys into heads, and normalize and rotate them."""
        rotary, is_one_token = self.rotary, query.shape[1] == 1 and q_positions is k_positions
        if self.qk_norm is None and (rotary is None or (is_one_token and isinstance(rotary, Rotary))):
            q, k = self._split(query), self._split(key)
            return (q, k) if rotary is None else rotated_together(q, k, rotary, q_positions)
        q = self._split_and_rotate(query, q_positions, self.query_norm)
        return q, self._split_and_rotate(key, k_positions, self.key_norm)

    def _split_and_rotate(self, projected: Tensor, positions: range | Tensor | None, norm: nn.Module | None) -> Tensor:
        """Split projected queries or keys into heads, and normalize and rotate them in the order of `QKNorm`."""
        if norm is None or self.qk_norm is None:
            heads = self._split(projected)
            rotary = self.rotary
            return heads if rotary is None else rotary(heads, positions)
        return norm_and_rotate(projected, self._split, self.qk_norm, norm, self.rotary, positions)

    def _split(self, x: Tensor) -> Tensor:
        """Split projected tokens into heads. Under tensor parallelism, only some of the heads are on this device."""
        (batch, length, width), head_dim = x.shape, self.head_dim
        if length == 1:  # nothing to transpose
            return x.reshape(batch, width // head_dim, 1, head_dim)
        return x.reshape(batch, length, width // head_dim, head_dim).transpose(1, 2)
