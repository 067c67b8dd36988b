"""LatentAttention: multi-head attention that caches one small latent per token, shared by all heads (MLA)."""

from __future__ import annotations

from typing import NamedTuple, Never

import torch
from torch import Tensor, nn

from saccade.caches import CrossCache, IndexedCache, IndexedLatentCache, KVCache, LatentCache, LayerCache
from saccade.engine import dropout
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.nn import attention_checks as checks
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.indexer import Indexer, check_indexer
from saccade.nn.latent_attention_forms import FORMS, Expanding, Form, LatentSizes, absorb, expand_values
from saccade.nn.norms import RMSNorm
from saccade.nn.projections import reasons_against_plain, weight_of
from saccade.nn.shared_selection import SharedSelection
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.scorers import LightningIndexer
from saccade.support.argument_hints import unexpected_argument
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import CACHED, is_tracing, outside_graph
from saccade.support.validation import check_bool, check_choice, check_int, check_number

_ALL_LATENTS = (KVCache, LatentCache, IndexedCache, IndexedLatentCache)  # others expose some latents, or change them


class _Projected(NamedTuple):
    """The projected inputs of a call of latent attention.

    Attributes:
        heads: the rotated queries, ``[batch, heads, len, head]``.
        latents: ``[batch, 1, len, cached]``.
        mask: the combined mask.
        positions: the positions of the tokens, or None.
        query_latent: the input of the query projection, ``[batch, len, width]``.
    """

    heads: Tensor
    latents: Tensor
    mask: Mask | None
    positions: Positions | None
    query_latent: Tensor


class LatentAttention(AttentionLayer):
    r"""Self-attention that computes keys and values from cached latents, as in DeepSeek-V2 and V3 (MLA).

    For each token t, the cache stores a latent :math:`c_t` and a rotated key part :math:`r_t`, shared by all heads:

    .. math:: c_t = \mathrm{norm}(W_C x_t), \quad r_t = \mathrm{rot}(W_R x_t), \qquad
              k_t^h = [W_K^h c_t,\, r_t], \quad v_t^h = W_V^h c_t

    Two forms compute the same matrix. *Expanded*: keys and values of all heads are computed from the latents of all
    tokens. *Absorbed*: since :math:`q \cdot W_K c = W_K^\top q \cdot c`, transformed queries attend directly to the
    latents, which form a single key head shared by all heads, and :math:`W_V` is applied to the result. The expanded
    form is cheaper for a prompt, and the absorbed form for decoding one token. "auto" uses the form with fewer
    multiplications (see `explain`).

    With an ``indexer``, each query attends only to the ``k`` keys with the highest index scores, the same for all heads
    (DeepSeek-V3.2). Keys are selected among those that the mask allows. Later layers of a `saccade.nn.DecoderStack`
    with ``selection_from`` have no indexer and attend to the same keys, if their own mask allows them (GLM-5). No
    gradient flows through the selection.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads, which need not divide ``embed_dim``.
        latent_dim: width of :math:`c_t`.
        head_dim: width of the queries and keys of one head, including the rotated part at the end.
        rotary_dim: width of the rotated part.
        value_dim: width of the values of one head; ``head_dim - rotary_dim`` if None.
        query_latent_dim: width of a normalized latent from which queries are computed; None to compute queries from
            the tokens.
        rotary: a `saccade.positions.Rotary` of width ``rotary_dim`` for queries and keys, or None.
        mask: mask of the module; combined with the mask of each call by ``&``.
        scale: scale of the scores; ``head_dim ** -0.5`` if None. Models with YaRN multiply this by another factor.
        form: "expanded", "absorbed" or "auto".
        norm_eps: epsilon of the root-mean-square norms of latents.
        dropout_p: dropout of the attention weights, in training only.
        projection_bias: whether the projections to latents and the output projection have a bias.
        indexer: selects the keys of each query; None to attend to all keys.
        selection_from: index of the earlier layer of the stack, from 0, whose indexer selects the keys of this layer.

    Raises:
        ValueError: incompatible sizes, or inputs of the wrong width.
        UnsupportedError: the form does not support a call. The absorbed form requires the expansion to be a plain
            linear layer, and the expanded form requires a cache that exposes all latents. An indexer requires a cache
            with index keys.

    Cost: a cache stores ``latent_dim + rotary_dim`` numbers per token, and the index key of an indexer. For the time,
    see `explain`, and for an indexer `saccade.mechanisms.TopK`.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> from saccade.positions import Rotary
        >>> mla = LatentAttention(32, 4, latent_dim=12, head_dim=12, rotary_dim=4, rotary=Rotary(4), mask=Causal())
        >>> cache, x = mla.new_cache(), torch.randn(2, 5, 32)
        >>> out = torch.cat([mla(x[:, :4], cache=cache), mla(x[:, 4:], cache=cache)], 1)
        >>> torch.allclose(out, mla(x), atol=1e-5), cache.key.shape
        (True, torch.Size([2, 1, 5, 16]))

    Reference: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; 2024, arXiv:2412.19437.
    """

    mechanism: Softmax

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        head_dim: int,
        rotary_dim: int,
        value_dim: int | None = None,
        query_latent_dim: int | None = None,
        rotary: Rotary | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        form: Form = "auto",
        norm_eps: float = 1e-6,
        dropout_p: float = 0.0,
        projection_bias: bool = False,
        indexer: Indexer | None = None,
        selection_from: int | None = None,
    ):
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "latent_dim": latent_dim, "head_dim": head_dim}
        for name, size in sizes.items():
            check_int(name, size)
        plain = head_dim - check_int("rotary_dim", rotary_dim, 0, below=head_dim)
        value_dim = plain if value_dim is None else check_int("value_dim", value_dim)
        dropout.check(dropout_p)
        checks.check_rotary(rotary, rotary_dim)
        has_bias, eps = check_bool("projection_bias", projection_bias), check_number("norm_eps", norm_eps, above=0)
        scale = head_dim**-0.5 if scale is None else check_number("scale", scale)
        super().__init__(embed_dim, num_heads, mask, Softmax(scale=scale), dropout_p)
        self.sizes = LatentSizes(num_heads, latent_dim, head_dim, rotary_dim, value_dim)
        self.form, self.rotary = check_choice("form", form, FORMS), rotary
        self.query_latent_projection = self.query_norm = None
        query_dim = embed_dim
        if query_latent_dim is not None:
            query_dim = check_int("query_latent_dim", query_latent_dim)
            self.query_latent_projection = nn.Linear(embed_dim, query_dim, bias=has_bias)
            self.query_norm = RMSNorm(query_dim, eps)
        self.query_projection = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.latent_projection = nn.Linear(embed_dim, self.sizes.cached, bias=has_bias)
        self.latent_norm = RMSNorm(latent_dim, eps)
        self.expansion = nn.Linear(latent_dim, num_heads * (plain + value_dim), bias=False)
        self.output_projection = nn.Linear(num_heads * value_dim, embed_dim, bias=has_bias)
        check_indexer(indexer, embed_dim, query_dim)
        self.indexer = indexer
        if selection_from is not None:
            self.source = check_int("selection_from", selection_from, 0)
            if indexer is not None:
                raise value_error("selection_from", "be None in a layer with an indexer", selection_from)
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
        shared: SharedSelection | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Apply latent self-attention to `query`.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            mask: a mask for this batch, as in `saccade.attention`; combined with the module's own mask by ``&``.
            positions: positions of the tokens; see `MultiHeadAttention.forward`.
            bias: added to the scores of this call, as in `saccade.attention`; with a cache, it must be a function of
                positions, not a tensor.
            cache: the cache of earlier calls of this layer: a `saccade.caches.LatentCache` from `new_cache`, or another
                cache of keys and values, which stores the latents as both. A layer with an indexer needs a cache of
                index keys as well.
            shared: the selection of keys that a layer with an indexer stores in this call, and that one with
                ``selection_from`` reads; see `DecoderStack`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        if unknown:
            raise unexpected_argument(unknown, self.forward)
        if cache is not None and is_tracing() and not is_dry_run():
            outside = outside_graph(self.forward, CACHED)
            return outside(query, mask=mask, positions=positions, bias=bias, cache=cache, shared=shared)
        projected = self._project(query, mask, positions, cache)
        heads, latents, joined, positions, _ = projected
        form = self._form(heads.shape[2], latents.shape[2] + (0 if cache is None else cache.length), cache)
        weight = self.expansion.weight if form == "absorbed" else None
        bias = bias if bias is None or cache is None else checks.checked_bias(bias)
        mechanism = self._mechanism(query, projected, bias, shared)
        compute_matrix = Expanding(mechanism, self.expansion, self.sizes) if weight is None else mechanism
        heads = heads if weight is None else absorb(heads, weight, self.sizes)
        values, dropout_p = latents[..., : self.sizes.latent], self.dropout_p if self.training else 0.0
        if cache is None:
            matrix = compute_matrix(heads, latents, mask=joined, q_positions=positions, kv_positions=positions)
            out = matrix.matmul(values, dropout_p=dropout_p)
        else:
            out = cache.attend(
                compute_matrix, heads, latents, values, mask=joined, positions=positions, dropout_p=dropout_p
            )
        out = out if weight is None else expand_values(out, weight, self.sizes)
        return self.output_projection(out.transpose(1, 2).flatten(2))

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        shared: SharedSelection | None = None,
    ) -> Matrix:
        """Return the lazy attention matrix of a call, ``[batch, num_heads, len, len]``; see `forward`.

        In the absorbed form, the matrix has one key head, which contains the latents. In the expanded form, it has
        ``num_heads`` key heads.
        """
        projected = self._project(query, mask, positions, None)
        heads, latents, joined, positions, _ = projected
        mechanism = self._mechanism(query, projected, bias, shared)
        if self._form(heads.shape[2], latents.shape[2], None) == "absorbed":
            heads = absorb(heads, self.expansion.weight, self.sizes)
            return mechanism(heads, latents, mask=joined, q_positions=positions, kv_positions=positions)
        expanding = Expanding(mechanism, self.expansion, self.sizes)
        return expanding(heads, latents, mask=joined, q_positions=positions, kv_positions=positions).matrix

    def scorer(self, query: Tensor, *, positions: GivenPositions = None) -> LightningIndexer:
        """Return the scorer of the layer's indexer for a `saccade.statistics.IndexerLoss`.

        Gradients of its scores flow to the indexer's parameters, and no further.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``.
            positions: positions of the tokens; see `forward`.

        Raises:
            UnsupportedError: the layer has no indexer.
        """
        if self.indexer is None:
            hint = "indexer=saccade.nn.Indexer(...)"
            raise unsupported("scorer", ["the layer has no indexer"], hint=hint)
        with torch.no_grad():
            projected = self._project(query, None, positions, None)
        return self.indexer(query.detach(), projected.query_latent.detach(), positions=projected.positions)

    def new_cache(self, max_len: int | None = None) -> LatentCache:
        """Return an empty cache for latents.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        kind = LatentCache if self.indexer is None else IndexedLatentCache
        return kind(self.sizes.latent, max_len)

    def explain(self, q_len: int = 1, kv_len: int | None = None, *, dtype: torch.dtype | None = None) -> str:
        """Describe which form of latent attention a call uses and why, and how large the cache is.

        Args:
            q_len: number of new tokens in the call.
            kv_len: total number of tokens, including the new ones; ``q_len`` if None.
            dtype: dtype of the cache; the dtype of the parameters if None.
        """
        sizes, kv_len = self.sizes, check_int("kv_len", q_len if kv_len is None else kv_len, 0)
        check_int("q_len", q_len, 0, below=kv_len + 1)
        form = self._form(q_len, kv_len, None)
        costs = {name: sizes.heads * sizes.cost(name, q_len, kv_len) for name in FORMS[1:]}
        counts = " and ".join(f"{name} {cost:.2g}" for name, cost in costs.items())
        dtype = self.latent_norm.weight.dtype if dtype is None else dtype
        bytes_each, name = dtype.itemsize, str(dtype).removeprefix("torch.")
        cached = sizes.cached + (0 if self.indexer is None else self.indexer.head_dim)
        more = sizes.cached_expanded / cached
        return (
            f"{q_len:,} on {kv_len:,} tokens: {form}; multiplications: {counts}. "
            f"With many keys, expanded is cheaper from {sizes.crossover:,.0f} queries on. "
            f"The cache stores {cached:,} numbers per token, {cached * bytes_each:,} bytes in {name}; "
            f"keys and values of all heads would take {sizes.cached_expanded * bytes_each:,} "
            f"bytes, {more:.0f} times as many."
        )

    def extra_repr(self) -> str:
        names = ("num_heads", "latent_dim", "head_dim", "rotary_dim", "value_dim")
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=True))
        return f"{self.embed_dim}, {sizes}, form={self.form!r}, mask={self.mask}, dropout_p={self.dropout_p}"

    def _form(self, q_len: int, kv_len: int, cache: LayerCache | None) -> Form:
        """Return the form of latent attention to use for a call, "expanded" or "absorbed".

        Raises:
            UnsupportedError: no allowed form supports this call.
        """
        parts = {"expansion": self.expansion}
        reasons = {"absorbed": reasons_against_plain(parts, "the absorbed form, which multiplies by its weight,")}
        exposes_all = cache is None or type(cache) in _ALL_LATENTS
        reason = f"a {type(cache).__name__} does not return all latents; a LatentCache does"
        reasons["expanded"] = [] if exposes_all else [reason]
        if self.form != "auto":
            if reasons[self.form]:
                raise unsupported(f"form={self.form!r}", reasons[self.form])
            return self.form
        possible = [form for form in FORMS[1:] if not reasons[form]]
        if not possible:
            raise unsupported("cache", [*reasons["absorbed"], *reasons["expanded"]])
        return possible[0] if len(possible) == 1 else self.sizes.cheaper(q_len, kv_len)

    def _project(self, x: Tensor, mask: object, positions: GivenPositions, cache: LayerCache | None) -> _Projected:
        """Check and project the inputs of latent attention."""
        if isinstance(cache, CrossCache):
            rule, hint = "be a self-attention cache", "new_cache() makes one"
            raise value_error("cache", rule, type(cache).__name__, hint=hint)
        if cache is not None:
            checks.check_with_cache(cache, x, None, None, mask, None, self.embed_dim, positions_unknown=False)
            self._check_selected_from(cache)
        weight = weight_of(self.latent_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        batch, length, _ = x.shape
        cached = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, cached + length))
        checked = None if positions is None else Positions.of(positions, length=length, batch=batch)
        if checked is not None and joined is not None:
            checks.check_document_positions(joined, checked)
        if cache is not None:
            new_positions = cache.positions(length) if checked is None else checked.given
            checked = checks.check_causal(joined, new_positions, cache)
        sizes, query_latent = self.sizes, x
        if self.query_latent_projection is not None and self.query_norm is not None:
            query_latent = self.query_norm(self.query_latent_projection(x))
        query = self.query_projection(query_latent).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        latent, rotated = self.latent_projection(x)[:, None].split([sizes.latent, sizes.rotated], -1)
        if self.rotary is not None:
            rotary_positions = (Positions.between(0, length) if checked is None else checked).given
            plain, part = query.split([sizes.plain, sizes.rotated], -1)
            query = torch.cat([plain, self.rotary(part, rotary_positions)], -1)
            rotated = self.rotary(rotated, rotary_positions)
        latents = torch.cat([self.latent_norm(latent), rotated], -1).to(query.dtype)
        return _Projected(query, latents, joined, checked, query_latent)

    def _mechanism(
        self, x: Tensor, projected: _Projected, bias: Tensor | Bias | None, shared: SharedSelection | None
    ) -> Mechanism:
        """Return the mechanism of a call: the layer's softmax, or one that covers only the selected keys."""
        softmax = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        if self.indexer is None and self.source is None:
            return softmax
        shared = SharedSelection() if shared is None else shared
        if self.indexer is None:
            return shared.reuse(softmax)
        with torch.no_grad():
            scorer = self.indexer(x, projected.query_latent, positions=projected.positions)
        return shared.select(softmax, scorer, self.indexer.k)

    def _check_selected_from(self, cache: LayerCache) -> None:
        """Raise an error unless keys can be selected from those in a cache."""
        if self.indexer is not None and not isinstance(cache, IndexedCache):
            reason = f"a {type(cache).__name__} does not store index keys; an IndexedLatentCache does"
        elif self.source is not None and type(cache) not in _ALL_LATENTS:
            reason = f"a {type(cache).__name__} does not return all latents; a LatentCache does"
        else:
            return
        raise unsupported("cache", [reason], hint="new_cache() makes one")
