"""LatentAttention: multi-head attention that remembers of a token one short vector for all heads (MLA)."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor, nn

from saccade.caches import CrossCache, KVCache, LatentCache, LayerCache
from saccade.engine import dropout
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Softmax
from saccade.nn import attention_checks as checks
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.latent_attention_forms import FORMS, Expanding, Form, LatentSizes, absorbed, released
from saccade.nn.projections import reasons_against_plain, weight_of
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import unknown as misnamed
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_bool, check_choice, check_int, check_number

__all__ = ["LatentAttention"]

_Given = tuple[Tensor, Tensor, Mask | None, Positions | None]


class LatentAttention(AttentionLayer):
    r"""Self-attention whose keys and values are made of latents: multi-head latent attention, of DeepSeek-V2 and V3.

    A token t is remembered by a latent :math:`c_t` and a turned vector :math:`r_t`, both shared by all heads:

    .. math:: c_t = \mathrm{norm}(W_C x_t), \quad r_t = \mathrm{rot}(W_R x_t), \qquad
              k_t^h = [W_K^h c_t,\, r_t], \quad v_t^h = W_V^h c_t

    Two forms compute the same matrix. *Expanded*: keys and values of all heads are made of the latents of all tokens.
    *Absorbed*: :math:`q \cdot W_K c = W_K^\top q \cdot c`, so queries go to the latents, as heads that share one key
    head, and :math:`W_V` comes after the product. The expanded form is cheaper for a prompt, the absorbed one for a
    step; "auto" counts multiplications and takes the smaller number (see `explain`).

    Args:
        embed_dim: width of tokens.
        num_heads: any number.
        latent_dim: width of :math:`c_t`.
        head_dim: width of queries and keys of one head, the turned part, which comes last, included.
        rotary_dim: width of the turned part.
        value_dim: width of values of one head; that of the part that is not turned when None.
        query_latent_dim: width of a latent that queries are made of, after a norm; none when None.
        rotary: turns queries and keys by their positions, a `saccade.positions.Rotary` of ``rotary_dim``; when None,
            nothing is turned.
        mask: the module's pattern (who may attend to whom); joined with the mask of each call by ``&``.
        scale: of the scores; ``head_dim ** -0.5`` when None. YaRN models multiply that by a square of their own.
        form: which form is used.
        norm_eps: of the root-mean-square norms of latents.
        dropout_p: of the attention weights, in training only.
        projection_bias: whether the projections to latents and of the output have a bias.

    Raises:
        ValueError: sizes that do not fit, or inputs of the wrong width.
        UnsupportedError: a form that a call cannot have: absorbed where the expansion is no plain linear layer,
            expanded with a cache that does not hand on all latents.

    Cost: memory of a cache ``latent_dim + rotary_dim`` numbers a token; time see `explain`.

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
            self.query_norm = nn.RMSNorm(query_dim, eps)
        self.query_projection = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.latent_projection = nn.Linear(embed_dim, self.sizes.held, bias=has_bias)
        self.latent_norm = nn.RMSNorm(latent_dim, eps)
        self.expansion = nn.Linear(latent_dim, num_heads * (plain + value_dim), bias=False)
        self.output_projection = nn.Linear(num_heads * value_dim, embed_dim, bias=has_bias)
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Attend.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``; with a cache, the new ones.
            mask: the facts of this batch (anything that `saccade.attention` takes); joined with the module's by ``&``.
            positions: where the tokens stand; see `MultiHeadAttention.forward`.
            bias: added to the scores of this call, as in `saccade.attention`; on positions, no tensor, with a cache.
            cache: what this layer remembers of earlier calls: a `saccade.caches.LatentCache`, as `new_cache` makes it;
                any other that holds keys and values gets latents as both.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        if unknown:
            raise misnamed(unknown, self.forward)
        if cache is not None and torch.compiler.is_compiling():
            outside = torch.compiler.disable(self.forward)  # what a cache remembers lies outside of a compiler's graph
            return outside(query, mask=mask, positions=positions, bias=bias, cache=cache)
        own, latents, joined, stands = self._given(query, mask, positions, cache)
        form = self._form(own.shape[2], latents.shape[2] + (0 if cache is None else cache.length), cache)
        weight = self.expansion.weight if form == "absorbed" else None
        mechanism = self.mechanism
        if bias is not None:
            mechanism = mechanism.with_bias(bias if cache is None else checks.checked_bias(bias))
        makes = Expanding(mechanism, self.expansion, self.sizes) if weight is None else mechanism
        own = own if weight is None else absorbed(own, weight, self.sizes)
        values, dropout_p = latents[..., : self.sizes.latent], self.dropout_p if self.training else 0.0
        if cache is None:
            matrix = makes(own, latents, mask=joined, q_positions=stands, kv_positions=stands)
            out = matrix.matmul(values, dropout_p=dropout_p)
        else:
            out = cache.attend(makes, own, latents, values, mask=joined, positions=stands, dropout_p=dropout_p)
        out = out if weight is None else released(out, weight, self.sizes)
        return self.output_projection(out.transpose(1, 2).flatten(2))

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """The attention matrix of this call, ``[batch, num_heads, len, len]``, not built, in the form of the layer.

        In the absorbed form it has one key head, and multiplies latents; in the expanded one it has ``num_heads``.
        """
        own, latents, joined, stands = self._given(query, mask, positions, None)
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        if self._form(own.shape[2], latents.shape[2], None) == "absorbed":
            own = absorbed(own, self.expansion.weight, self.sizes)
            return mechanism(own, latents, mask=joined, q_positions=stands, kv_positions=stands)
        expanding = Expanding(mechanism, self.expansion, self.sizes)
        made = expanding(own, latents, mask=joined, q_positions=stands, kv_positions=stands)
        return made.matrix

    def new_cache(self, max_len: int | None = None) -> LatentCache:
        """An empty cache of latents, with room for ``max_len`` tokens at once; None to grow."""
        return LatentCache(self.sizes.latent, max_len)

    def explain(self, q_len: int = 1, kv_len: int | None = None, *, dtype: torch.dtype | None = None) -> str:
        """Which form a call takes and why, and what a token costs to remember.

        Args:
            q_len: new tokens.
            kv_len: all tokens, the new ones included; as many as new ones when None.
            dtype: of the cache; that of the parameters when None.
        """
        sizes, kv_len = self.sizes, check_int("kv_len", q_len if kv_len is None else kv_len, 0)
        check_int("q_len", q_len, 0, below=kv_len + 1)
        form = self._form(q_len, kv_len, None)
        costs = {own: sizes.heads * sizes.cost(own, q_len, kv_len) for own in FORMS[1:]}
        told = " and ".join(f"{own} {cost:.2g}" for own, cost in costs.items())
        dtype = self.latent_norm.weight.dtype if dtype is None else dtype
        bytes_each, name = dtype.itemsize, str(dtype).removeprefix("torch.")
        more = sizes.held_expanded / sizes.held
        return (
            f"{q_len:,} on {kv_len:,} tokens: {form}; multiplications: {told}. "
            f"Where keys are many, expanded is cheaper from {sizes.crossover:,.0f} queries on. "
            f"A token is remembered by {sizes.held:,} numbers, {sizes.held * bytes_each:,} bytes in {name}; "
            f"keys and values of all heads would be {sizes.held_expanded * bytes_each:,}, {more:.0f} times as many."
        )

    def extra_repr(self) -> str:
        told = zip(("num_heads", "latent_dim", "head_dim", "rotary_dim", "value_dim"), self.sizes, strict=True)
        words = ", ".join(f"{name}={size}" for name, size in told)
        return f"{self.embed_dim}, {words}, form={self.form!r}, mask={self.mask}, dropout_p={self.dropout_p}"

    def _form(self, q_len: int, kv_len: int, cache: LayerCache | None) -> Form:
        """The form of a call.

        Raises:
            UnsupportedError: the one that was asked for cannot be had.
        """
        parts = {"expansion": self.expansion}
        against = {"absorbed": reasons_against_plain(parts, "the absorbed form, which multiplies by its weight,")}
        # Another cache hands on some of the latents, or others than came.
        is_whole = cache is None or type(cache) in (KVCache, LatentCache)
        reason = f"a {type(cache).__name__} does not hand on all latents; a LatentCache does"
        against["expanded"] = [] if is_whole else [reason]
        if self.form != "auto":
            if against[self.form]:
                raise unsupported(f"form={self.form!r}", against[self.form])
            return self.form
        possible = [form for form in FORMS[1:] if not against[form]]
        if not possible:
            raise unsupported("cache", [*against["absorbed"], *against["expanded"]])
        return possible[0] if len(possible) == 1 else self.sizes.cheaper(q_len, kv_len)

    def _given(self, x: Tensor, mask: object, positions: GivenPositions, cache: LayerCache | None) -> _Given:
        """Check, project and turn what a call brings: queries, latents ``[batch, 1, len, held]``, mask, positions."""
        if isinstance(cache, CrossCache):
            rule, hint = "be that of a self-attention", "new_cache() makes one"
            raise value_error("cache", rule, type(cache).__name__, hint=hint)
        if cache is not None:
            checks.check_with_cache(cache, x, None, None, mask, None, self.embed_dim, is_lost=False)
        weight = weight_of(self.latent_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        batch, length, _ = x.shape
        held = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, held + length))
        stands = None if positions is None else Positions.of(positions, length=length, batch=batch)
        if stands is not None and joined is not None:
            checks.check_apart(joined, stands)
        if cache is not None:
            where = cache.positions(length) if stands is None else stands.given
            stands = checks.check_causal(joined, where, cache)
        sizes, own = self.sizes, x
        if self.query_latent_projection is not None and self.query_norm is not None:
            own = self.query_norm(self.query_latent_projection(x))
        query = self.query_projection(own).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        latent, turned = self.latent_projection(x)[:, None].split([sizes.latent, sizes.turned], -1)
        if self.rotary is not None:
            given = (Positions.between(0, length) if stands is None else stands).given
            plain, part = query.split([sizes.plain, sizes.turned], -1)
            query = torch.cat([plain, self.rotary(part, given)], -1)
            turned = self.rotary(turned, given)
        latents = torch.cat([self.latent_norm(latent), turned], -1).to(query.dtype)
        return query, latents, joined, stands
