"""DifferentialAttention: multi-head attention whose heads are differences of two attention maps."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.masks import Mask
from saccade.mechanisms import Differential
from saccade.nn import attention_checks as checks
from saccade.nn.attention import MultiHeadAttention
from saccade.positions import Rotary
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number


class DifferentialAttention(MultiHeadAttention):
    r"""Multi-head attention whose heads are differences of two attention maps, as in the Diff Transformer.

    .. math:: \mathrm{head}_h = (1 - \lambda_{\mathrm{init}})\,
              \mathrm{norm}\big((A_1^h - \lambda A_2^h)\, V_h\big)

    The norm divides each head by its root mean square and has no weights. As in the authors' layout, a head contains
    the queries (and keys) of both maps side by side, each half as wide as the values. Calls, caches and masks work as
    in `MultiHeadAttention`; ``matrix(x)`` is the lazy difference, whose rows sum to 1 - λ.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads, each with two maps; ``2 * num_heads`` divides ``embed_dim``.
        layer: index of this layer in its stack, counted from 0; see `saccade.mechanisms.Differential`.
        rotary: a `saccade.positions.Rotary` of width ``embed_dim // (2 * num_heads)`` for each map's queries and keys.
        norm_eps: epsilon of the norm of each head.
        num_kv_heads, context_dim, mask, dropout_p, projection_bias, output_gate: see `MultiHeadAttention`.

    Raises:
        ValueError: sizes do not divide evenly, or inputs have the wrong width.

    Cost: as for a `MultiHeadAttention` with the same number of heads, plus a second matrix product.

    Example:
        >>> from saccade.masks import Causal
        >>> layer = DifferentialAttention(16, 2, mask=Causal())
        >>> x = torch.randn(1, 5, 16)
        >>> layer(x).shape, layer.matrix(x).shape
        (torch.Size([1, 5, 16]), (1, 2, 5, 5))

    Reference: Ye et al. 2024, arXiv:2410.05258, section 2.1.
    """

    mechanism: Differential

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        norm_eps: float = 1e-5,
        dropout_p: float = 0.0,
        projection_bias: bool = False,
        output_gate: bool = False,
    ):
        if check_int("embed_dim", embed_dim) % (2 * check_int("num_heads", num_heads)):
            raise value_error("num_heads", f"divide half of embed_dim {embed_dim}", num_heads)
        half = embed_dim // (2 * num_heads)
        checks.check_rotary(rotary, half)
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            context_dim=context_dim,
            mask=mask,
            mechanism=Differential(half, layer=layer),
            dropout_p=dropout_p,
            projection_bias=projection_bias,
            output_gate=output_gate,
        )
        self.norm_eps = check_number("norm_eps", norm_eps, above=0)
        self.rotary = None if rotary is None else _EachHalf(rotary)

    def _project_output(self, heads: Tensor, query: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(heads, heads.shape[-1:], eps=self.norm_eps)
        return super()._project_output(normed * (1.0 - self.mechanism.lambda_init), query)


class _EachHalf(nn.Module):
    """A rotary embedding for differential attention. It rotates both halves of each head separately."""

    def __init__(self, rotary: Rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, positions: range | Tensor) -> Tensor:
        """Rotate both halves of each differential head, ``[batch, heads, len, 2 * head_dim]``.

        The arguments are as in `saccade.positions.Rotary`.
        """
        both = x.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
        return self.rotary(both, positions).unflatten(1, (-1, 2)).transpose(2, 3).flatten(-2)
