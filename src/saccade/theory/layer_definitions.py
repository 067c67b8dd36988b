"""Claims about the definitions of layers: the heads of multi-head attention, and the sublayers of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from saccade.matrix import attention
from saccade.nn import MultiHeadAttention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, differ, equal, same

Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""Matrices of multi-head attention: W_Q, W_K and W_V ``[heads, width, head_dim]``, W_O ``[heads, head_dim, width]``."""


def heads_by_definition(x: Tensor, weights: Projections) -> Tensor:
    """Compute head_i = Attention(X W_Q, X W_K, X W_V) of tokens ``[n, width]`` for all heads, ``[heads, n, head_dim]``.

    Heads are computed one after the other, each from separate matrices.
    """
    query, key, value, _ = weights
    return torch.stack(
        [
            attention((x @ q)[None, None], (x @ k)[None, None], (x @ v)[None, None])[0, 0]
            for q, k, v in zip(query, key, value, strict=True)
        ]
    )


def layer_of(weights: Projections) -> MultiHeadAttention:
    """Build a layer that projects to all heads at once, by concatenating the heads' matrices along the columns."""
    heads, width, head_dim = weights[0].shape
    layer = MultiHeadAttention(width, heads, head_dim=head_dim, projection_bias=False).double()
    projections = (layer.query_projection, layer.key_projection, layer.value_projection)
    with torch.no_grad():
        for projection, matrices in zip(projections, weights, strict=False):
            projection.weight.copy_(torch.cat(list(matrices), 1).T)
        layer.output_projection.weight.copy_(torch.cat(list(weights[3])).T)
    return layer


def with_residual_and_norm(output: Tensor, x: Tensor) -> Tensor:
    """Add the residual to an output and apply layer norm, as tutorial code does after attention."""
    return layer_norm(output + x, x.shape[-1:])


@claim(
    "heads",
    latex=r"\mathrm{split}(XW^Q)=(XW_1^Q,\dots,XW_h^Q),\qquad "
    r"\mathrm{Concat}(\mathrm{head}_i)\,W^O=\textstyle\sum_i\mathrm{head}_i\,W_i^O",
    source="code of tutorials, against the definition: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
    verdict="holds if",
    conditions="projections have no bias and nothing follows: a residual and a layer norm, which a tutorial puts into "
    "the same class, are not part of the definition, which gives 0 for W_O = 0. The number of heads divides the width "
    "of the model only if heads have width d_model/h, which the definition does not require",
)
def one_projection_makes_all_heads(
    draw: Draw,
    *,
    heads: Callable[[Tensor, Projections], Tensor] = heads_by_definition,
    layer: Callable[[Projections], MultiHeadAttention] = layer_of,
    after: Callable[[Tensor, Tensor], Tensor] = with_residual_and_norm,
) -> Measurements:
    """Multi-head attention by one projection, reshaped to heads, is Concat(head_i) W_O, and heads are independent."""

    def weights_of_size(heads: int, width: int, head_dim: int) -> Projections:
        query, key, value = (draw.normal(heads, width, head_dim) / width**0.5 for _ in range(3))
        return query, key, value, draw.normal(heads, head_dim, width) / width**0.5

    x, weights = draw.normal(7, 12), weights_of_size(3, 12, 4)
    seen = layer(weights)(x[None])[0].detach()
    separate = heads(x, weights)
    joined = torch.cat(list(separate), 1) @ torch.cat(list(weights[3]))
    yield same("one projection, reshaped: output, against Concat(head_i) W_O", seen, joined)
    yield same("the same, against the sum of head_i times its rows of W_O", seen, (separate @ weights[3]).sum(0))
    others = tuple(torch.cat([matrix[:1], draw.normal(*matrix[1:].shape)]) for matrix in weights)
    moved = heads(x, (others[0], others[1], others[2], others[3])) - separate
    yield equal("change of head 1 when all others get new matrices", float(moved[0].abs().max()), 0.0)
    yield at_least("the same: change of the others", float(moved[1:].abs().max()), 2.0)
    nothing = torch.zeros_like(seen)
    yield apart(
        "W_O = 0, with a residual and a layer norm as in code: largest output", float(after(nothing, x).max()), 0.0, 1.0
    )
    narrow, uneven = draw.normal(7, 10), weights_of_size(3, 10, 4)
    yield same(
        "width 10, three heads of width 4: output, against Concat(head_i) W_O",
        layer(uneven)(narrow[None])[0].detach(),
        torch.cat(list(heads(narrow, uneven)), 1) @ torch.cat(list(uneven[3])),
    )
    output, shares = layer(weights_of_size(8, 512, 64)).with_weights(draw.normal(2, 10, 512))
    yield equal("x of [2, 10, 512], 8 heads: numbers in the output, against those of x", output.numel(), 2 * 10 * 512)
    yield equal("the same: weights, against 2 · 8 · 10 · 10", shares.numel(), 2 * 8 * 10 * 10)


def add_and_norm(layer: nn.TransformerEncoderLayer, x: Tensor, causal: Tensor) -> Tensor:
    """Run masked self-attention and a feed-forward network with a layer's weights, each followed by add and norm."""
    attended = layer.self_attn(x, x, x, attn_mask=causal, need_weights=False)[0]
    x = layer_norm(x + attended, x.shape[-1:], layer.norm1.weight, layer.norm1.bias)
    fed = layer.linear2(torch.relu(layer.linear1(x)))
    return layer_norm(x + fed, x.shape[-1:], layer.norm2.weight, layer.norm2.bias)


def pytorch_decoder_layer(width: int) -> nn.Module:
    """Return PyTorch's decoder layer with two heads, without dropout."""
    return nn.TransformerDecoderLayer(width, 2, 16, dropout=0.0, batch_first=True)


@claim(
    "heads",
    latex=r"y=\mathrm{LN}(x+\mathrm{Attn}(x)),\qquad z=\mathrm{LN}(y+\mathrm{FFN}(y))",
    source="figures of tutorials; Vaswani et al. 2017, arXiv:1706.03762, section 3.1, whose decoder has a third part; "
    "for the norm before each part Xiong et al. 2020, arXiv:2002.04745",
    verdict="holds if",
    conditions="the model is a decoder alone and the norm follows each part. The decoder of the original paper has a "
    "third part between the two, cross-attention to the encoder; current models put the norm before each part",
)
def a_decoder_layer_has_two_parts(
    draw: Draw,
    *,
    parts: Callable[[nn.TransformerEncoderLayer, Tensor, Tensor], Tensor] = add_and_norm,
    whole: Callable[[int], nn.Module] = pytorch_decoder_layer,
) -> Measurements:
    """A decoder layer is masked self-attention and a feed-forward network, each followed by add and norm."""
    n, width = 6, 8
    x, causal = draw.normal(1, n, width), torch.ones(n, n, dtype=torch.bool).triu(1)

    def layer(norm_first: bool) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)

    def outputs(norm_first: bool) -> tuple[Tensor, Tensor]:
        one = draw.module(lambda: layer(norm_first))
        with torch.no_grad():
            return one(x, src_mask=causal), parts(one, x, causal)

    yield same(
        "PyTorch's layer, causal mask, norm after each part: output, against the two parts", *outputs(False), 1e-9
    )
    yield differ("the norm before each part", *outputs(True), 0.2)
    decoder = draw.module(lambda: whole(width))
    with torch.no_grad():
        first, second = (decoder(x, draw.normal(1, 4, width), tgt_mask=causal) for _ in range(2))
    yield differ("PyTorch's decoder layer, another output of the encoder", first, second, 0.06)
