"""EncoderLayer (self-attention and a feed-forward network), and the base class of encoder and decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from saccade.engine import dropout
from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer, Layer
from saccade.nn.norms import Norm, make_norm
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_type


class ResidualLayer(ArgumentHints, Layer):
    """The base class of `EncoderLayer` and `DecoderLayer`: residual branches, each with a norm.

    Args:
        attentions: the attention modules by name, ``attention`` first; None for a module that the layer lacks.
        feed_forward, norm, norm_eps, norm_first, dropout_p: see `EncoderLayer`.
    """

    attention: AttentionLayer
    attention_norm: nn.Module
    feed_forward_norm: nn.Module

    def __init__(
        self,
        attentions: Mapping[str, AttentionLayer | None],
        feed_forward: nn.Module,
        norm: Norm,
        norm_eps: float,
        norm_first: bool,
        dropout_p: float,
    ):
        super().__init__()
        width = _width(attentions, feed_forward)
        dropout.check(dropout_p)
        self.norm_first = check_bool("norm_first", norm_first)
        for name, part in attentions.items():
            setattr(self, name, part)
        self.feed_forward = feed_forward
        parts = {"attention": None, "feed_forward": feed_forward} | {**attentions}
        for name, module in parts.items():
            setattr(self, f"{name}_norm", None if module is None else make_norm(norm, width, norm_eps))
        self.dropout = nn.Dropout(dropout_p)

    def matrix(
        self,
        x: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the lazy self-attention matrix of `forward`: ``[batch, num_heads, len, len]``."""
        tokens = self.attention_norm(x) if self.norm_first else x
        options = {} if rotary_positions is None else {"rotary_positions": rotary_positions}
        return self.attention.matrix(tokens, mask=mask, positions=positions, bias=bias, **options)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"

    def _add(self, x: Tensor, part: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        """Apply one residual branch of an encoder or decoder layer.

        With pre-norm, return ``x + dropout(part(norm(x)))``; with post-norm, return ``norm(x + dropout(part(x)))``.
        """
        if self.norm_first:
            return x + self._dropped(part(norm(x)))
        return norm(x + self._dropped(part(x)))

    def _dropped(self, change: Tensor) -> Tensor:
        """Apply dropout to a sublayer's output. In eval mode, skip the call, whose overhead is measurable."""
        dropout_layer = self._modules["dropout"]
        return dropout_layer(change) if dropout_layer.training else change


class EncoderLayer(ResidualLayer):
    r"""An encoder layer: self-attention and a feed-forward network, each with a residual connection and a norm.

    .. math:: \text{norm first:}\quad x' = x + \mathrm{attention}(\mathrm{norm}(x)), \quad
              x'' = x' + \mathrm{ff}(\mathrm{norm}(x')); \qquad
              \text{else:}\quad x' = \mathrm{norm}(x + \mathrm{attention}(x)), \quad \dots

    The layer is built from parts. Set attention options (mask, mechanism, rotary, grouped heads) on the attention
    module, and feed-forward options on the feed-forward network.

    Args:
        attention: a `MultiHeadAttention`, `LatentAttention` or `DifferentialAttention`.
        feed_forward: a `FeedForward`, or any module that maps ``[batch, len, embed_dim]`` to the same shape.
        norm: ``"layer"``, ``"layer_without_bias"`` or ``"rms"`` (root mean square: no mean is subtracted, no bias).
        norm_eps: added to the variance in the norms.
        norm_first: whether norms come before each part (as in most current models) or after each sum (as in the paper).
        dropout_p: dropout of the output of each part, in training only.

    Attributes:
        attention_norm, feed_forward_norm: the norms, which can be replaced by any module.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: the parts have different widths, or the norm is unknown.

    Example:
        >>> import torch
        >>> from saccade.nn import FeedForward
        >>> layer = EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 64), norm="rms")
        >>> layer(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; norm first: Xiong et al. 2020, arXiv:2002.04745.
    """

    def __init__(
        self,
        attention: AttentionLayer,
        feed_forward: nn.Module,
        *,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        norm_first: bool = True,
        dropout_p: float = 0.0,
    ):
        super().__init__({"attention": attention}, feed_forward, norm, norm_eps, norm_first, dropout_p)

    def forward(
        self,
        x: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Tensor:
        """Apply self-attention and the feed-forward network, each with a norm and a residual connection.

        Args:
            x: ``[batch, len, embed_dim]``.
            mask: a mask for this batch, combined with the attention's own mask by ``&``.
            positions, rotary_positions: positions of the tokens; see `MultiHeadAttention.forward`.
            bias: added to the scores of this call, as in `saccade.attention`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        options = {} if rotary_positions is None else {"rotary_positions": rotary_positions}
        attend = partial(self.attention, mask=mask, positions=positions, bias=bias, **options)
        x = self._add(x, attend, self.attention_norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm)


def _width(attentions: Mapping[str, AttentionLayer | None], feed_forward: nn.Module) -> int:
    """Check the types and widths of a layer's parts, and return the width that they share."""
    width = 0
    for name, part in attentions.items():
        if part is None and name != "attention":
            continue
        hint = "for instance saccade.nn.MultiHeadAttention(64, 8)"
        is_cross = name != "attention"  # only MultiHeadAttention supports cross-attention
        rule = "be a saccade.nn.MultiHeadAttention" + ("" if is_cross else ", or another attention of saccade.nn")
        kind = MultiHeadAttention if is_cross else AttentionLayer
        part_width = check_type(name, part, kind, rule, hint=hint).embed_dim
        width = width or part_width
        if part_width != width:
            raise value_error(name, f"have embed_dim {width}, as the first attention", part_width)
    hint = f"for instance saccade.nn.FeedForward({width}, {4 * width})"
    check_type("feed_forward", feed_forward, nn.Module, "be a module", hint=hint)
    inner_width = getattr(feed_forward, "embed_dim", width)
    if inner_width != width:
        raise value_error("feed_forward", f"have embed_dim {width}, as the attention", inner_width)
    return width
