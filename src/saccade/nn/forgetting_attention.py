"""ForgettingAttention: multi-head attention with a forget gate for each token and head."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor, nn

from saccade.caches import CrossCache, LayerCache
from saccade.masks import Causal, Mask
from saccade.mechanisms import Forgetting
from saccade.mechanisms.forgetting import with_gates
from saccade.nn import attention_checks as checks
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.attention_heads import CallPositions, Heads
from saccade.nn.qk_norm import QKNorm
from saccade.positions import Rotary
from saccade.support.errors import unsupported, value_error

_LIFETIMES = 2.0, 1024.0  # tokens after which weights have fallen to 1/e at the start of training: first and last head


class ForgettingAttention(MultiHeadAttention):
    r"""Multi-head attention with forget gates, as in the Forgetting Transformer (FoX).

    .. math:: A = \mathrm{softmax}_j \Big( \frac{q_i \cdot k_j}{\sqrt d} + \sum_{l=j+1}^{i} \log f_l \Big), \qquad
              f_l = \sigma(w \cdot x_l + b)

    Each head computes its own gates from the tokens. The layer is causal, and for self-attention only. It works without
    rotary positions, because the gates favour recent tokens. Caches store the gates, before the sigmoid, as channels of
    the keys. The "Pro" layer of the paper also has ``qk_norm``, ``output_gate`` and a shift of keys and values
    (``short_convolution``).

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads; must divide ``embed_dim`` unless ``head_dim`` is passed.
        mask: combined with Causal and with the mask of each call by ``&``.
        num_kv_heads, head_dim, rotary, qk_norm, short_convolution: see `MultiHeadAttention`.
        dropout_p, projection_bias, output_gate: see `MultiHeadAttention`.

    Attributes:
        forget_projection: computes the gates before the sigmoid, one for each head. Its bias is initialised so that
            weights fall to 1/e within 2 tokens in the first head and within 1,024 in the last, with logarithmic spacing
            in between.

    Raises:
        ValueError: sizes do not divide evenly, inputs have the wrong width, or the key is not the query.
        UnsupportedError: nested tensors, or a bias.

    Cost: as for `MultiHeadAttention` with a bias, plus a projection to ``num_heads`` channels. For each key head, a
    cache stores one more channel per query head.

    Example:
        >>> import torch
        >>> layer = ForgettingAttention(16, 2)
        >>> x = torch.randn(1, 5, 16)
        >>> layer(x).shape, layer.matrix(x).shape
        (torch.Size([1, 5, 16]), (1, 2, 5, 5))

    Reference: Lin et al. 2025, arXiv:2503.02130, section 3.
    """

    mechanism: Forgetting

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        qk_norm: QKNorm | None = None,
        short_convolution: int | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = False,
        output_gate: bool = False,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = checks.check_sizes(embed_dim, num_heads, kv_heads, embed_dim, head_dim, dropout_p)
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            mask=mask,
            mechanism=Forgetting(width),
            rotary=rotary,
            qk_norm=qk_norm,
            short_convolution=short_convolution,
            dropout_p=dropout_p,
            projection_bias=projection_bias,
            output_gate=output_gate,
        )
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask
        self.forget_projection = nn.Linear(embed_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with Xavier-uniform weights, zero biases, and gates with log-spaced lifetimes."""
        super().reset_parameters()
        if hasattr(self, "forget_projection"):  # created after the base class's projections
            first, last = (math.log(tokens) for tokens in _LIFETIMES)
            lifetimes = torch.linspace(first, last, self.num_heads).exp()
            self.forget_projection.bias.data.copy_(-torch.expm1(1.0 / lifetimes).log())

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
        if not (key is None or key is query) or not (value is None or value is query) or isinstance(cache, CrossCache):
            rule = "be None, because the forget gates are computed from the queries"
            raise value_error("key", rule, "another tensor")
        heads = super()._heads(query, key, value, mask, call_positions, cache, convolution_cache)
        return heads._replace(key=with_gates(heads.key, self.forget_projection(query).mT))

    def _attend_nested(self, *inputs: object) -> NoReturn:
        hint = "saccade.pack(tensors) gives packed tokens, and a mask of Documents"
        raise unsupported("ForgettingAttention", ["it does not support nested tensors"], hint=hint)
