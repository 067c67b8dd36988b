"""Claims about the rank of scores, of weights, and of the output of a deep stack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade.masks import Causal, Documents, Mask
from saccade.matrix import AttentionMatrix, attention
from saccade.models import chinese_encoder, small_decoder
from saccade.nn import MultiHeadAttention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal

_LU_XUN = (
    "我从乡下跑到京城里，一转眼已经六年了。其间耳闻目睹的所谓国家大事，算起来也很不少；"
    "但在我心里，都不留什么痕迹，倘要我寻出这些事的影响来说，便只是增长了我的坏脾气"
)


def weights_of(query: Tensor, key: Tensor, mask: Mask | None = None, bias: Tensor | None = None) -> Tensor:
    """Return the softmax weights of one head as a dense matrix, ``[q_len, kv_len]``."""
    return AttentionMatrix(query[None, None], key[None, None], mask, bias=bias).to_dense()[0, 0]


def centred_logs(weights: Tensor) -> Tensor:
    """Return the logarithms of the weights, centred row by row, which is the part of the scores that softmax uses."""
    logits = weights.log()
    return logits - logits.mean(-1, keepdim=True)


def spread_of_rows(x: Tensor) -> float:
    """Return the distance of tokens from their mean, relative to their norm; it is 0 if all tokens are equal."""
    return float((x - x.mean(-2, keepdim=True)).norm() / x.norm())


@claim(
    latex=r"\mathrm{rank}\,\mathrm{softmax}(QK^\top/\sqrt{d_k})\le d_k",
    source="tutorials; against it Bhojanapalli et al. 2020, arXiv:2002.07028",
    verdict="refuted",
    conditions="the rank of QKᵀ is d_k at most; exp is applied entry by entry and does not preserve rank",
)
def attention_has_low_rank(
    draw: Draw,
    *,
    weights: Callable[[Tensor, Tensor], Tensor] = weights_of,
    scores: Callable[[Tensor, Tensor], Tensor] = lambda query, key: query @ key.T,
) -> Measurements:
    """The attention matrix has low rank, because QKᵀ has rank at most d_k."""
    ends = torch.linspace(-3, 3, 8, dtype=torch.float64)[:, None]
    line = weights(ends, ends)
    yield apart("rank of A, n = 8, d_k = 1", int(torch.linalg.matrix_rank(line)), 1, 6.5)
    yield at_least("its smallest singular value", float(torch.linalg.svdvals(line)[-1]), 1e-8)
    q, k = draw.normal(64, 8), draw.normal(64, 8)
    yield apart("rank of A, n = 64, d_k = 8", int(torch.linalg.matrix_rank(weights(q, k))), 8, 50)
    yield equal("rank of QKᵀ, n = 64, d_k = 8", int(torch.linalg.matrix_rank(scores(q, k))), 8)


def directions(weights: Tensor, share: float = 0.9) -> Tensor:
    """Return the number of singular directions that contain ``share`` of the energy, as an approximate rank.

    The energy is the sum of the squared singular values.
    """
    energy = torch.linalg.svdvals(weights.double()).square()
    return (energy.cumsum(-1) < share * energy.sum(-1, keepdim=True)).sum(-1) + 1


def trained_heads() -> dict[str, list[Tensor]]:
    """Return the attention weights of both bundled models on a passage by Lu Xun, ``[heads, n, n]`` for each layer."""
    weights = {}
    for model in (chinese_encoder(), small_decoder()):
        assert model.tokenizer is not None
        tokens = torch.tensor([model.tokenizer.encode(_LU_XUN).ids])
        with torch.no_grad():
            weights[type(model).__name__.lower()] = [matrix.to_dense()[0] for matrix in model.matrices(tokens)]
    return weights


@claim(
    latex=r"\textstyle\sum_{i\le k}\sigma_i^2\ge 0.9\sum_i\sigma_i^2\ \text{for}\ k\ll n",
    source="tutorials; Wang et al. 2020, arXiv:2006.04768, section 3 and figure 1, for RoBERTa",
    verdict="holds if",
    conditions="it refers to most trained heads, above all in the later layers: heads that attend to one neighbour, "
    "as in the first layer of the encoder, need most of the n directions. Random scores of variance 1 need equally "
    "few, so low rank says little about learning",
)
def attention_is_approximately_low_rank(
    draw: Draw,
    *,
    heads: Callable[[], dict[str, list[Tensor]]] = trained_heads,
    weights: Callable[[Tensor, Tensor], Tensor] = weights_of,
) -> Measurements:
    """Attention matrices have approximately low rank: a few directions capture nearly all of each matrix."""
    for name, layers in heads().items():
        shares = [directions(layer).double() / layer.shape[-1] for layer in layers]
        later = 0.14 if name == "encoder" else 0.3
        typical, widest = float(torch.cat(shares).median()), float(torch.cat(shares).max())
        yield at_most(
            Message("{name}: directions for 90 % of the energy / n, median head", name=Message(name)), typical, 0.25
        )
        for number, layer_shares in enumerate(shares[1:], 2):
            yield at_most(
                Message("{name}, layer {number}: the same", name=Message(name), number=number),
                float(layer_shares.median()),
                0.35 if number == 2 else later,
            )
        yield at_least(Message("{name}: head that needs most", name=Message(name)), widest, 0.45)
        if name == "encoder":
            yield at_least("encoder, layer 1: median head", float(shares[0].median()), 0.6)
    dense = weights(draw.normal(96, 32), draw.normal(96, 32))
    yield at_most("random scores of variance 1, n = 96", float(directions(dense)) / 96, 0.35)


@claim(
    latex=r"\mathrm{rank}\,A\ll n\ \Rightarrow\ \text{global reach without }n^2\text{ weights}",
    source="tutorials; against it, by example",
    verdict="refuted",
    conditions="rank and reach are unrelated: blocks that see only themselves have low rank, and causal attention, "
    "whose last token sees all, has full rank. Attention avoids the n² trained weights of a fully connected layer "
    "because it computes its weights from the tokens, with the same few matrices for every n",
)
def low_rank_explains_global_reach(
    draw: Draw,
    *,
    weights: Callable[..., Tensor] = weights_of,
    layer: Callable[[int], nn.Module] = lambda n: MultiHeadAttention(16, 2),
    connected: Callable[[int], nn.Module] = lambda n: nn.Linear(n, n, bias=False, device="meta"),
) -> Measurements:
    """Low rank explains why attention reaches everywhere without a fully connected layer."""
    n, alike = 64, torch.zeros(64, 8, dtype=torch.float64)
    blocks = weights(alike, alike, Documents([16] * 4))
    yield equal("four blocks apart: rank of A, n = 64", int(torch.linalg.matrix_rank(blocks)), 4)
    yield equal("four blocks apart: share of all tokens that one reaches", float((blocks > 0).double().mean()), 0.25)
    causal = weights(draw.normal(n, 8), draw.normal(n, 8), Causal())
    yield apart("causal, d_k = 8: rank of A, n = 64", int(torch.linalg.matrix_rank(causal)), 8, 40)
    yield equal("causal: tokens that the last one reaches", int((causal[-1] > 0).sum()), n)

    def size(make: Callable[[int], nn.Module], length: int) -> int:
        return sum(parameter.numel() for parameter in make(length).parameters())

    yield equal("trained weights for n = 1,024, against n = 64: attention", size(layer, 1024) / size(layer, 64), 1.0)
    yield equal("the same: fully connected", size(connected, 1024) / size(connected, 64), 256.0)


@claim(
    latex=r"\mathrm{rank}\bigl(\log A\,(I-\tfrac1n\mathbf{1}\mathbf{1}^\top)\bigr)\le d_k",
    source="softmax changes the scores only by a constant in each row; Bhojanapalli et al. 2020, arXiv:2002.07028",
    verdict="holds",
    conditions="no mask and no bias; with a softcap it fails",
)
def logits_have_low_rank(draw: Draw, *, weights: Callable[[Tensor, Tensor], Tensor] = weights_of) -> Measurements:
    """The matrix of logarithms of the weights, centred row by row, has low rank."""
    for width in (2, 5):
        centred = centred_logs(weights(draw.normal(30, width), draw.normal(30, width)))
        rank = int(torch.linalg.matrix_rank(centred, rtol=1e-9))
        yield equal(Message("rank of centred log A, n = 30, d_k = {width}", width=width), rank, width)


@claim(
    latex=r"\det A=\prod_i A_{ii}>0",
    source="a triangular matrix",
    verdict="holds",
    conditions="in exact arithmetic; the numerical rank may be lower",
)
def causal_attention_is_invertible(
    draw: Draw, *, weights: Callable[[Tensor, Tensor], Tensor] = lambda q, k: AttentionMatrix(q, k, Causal()).to_dense()
) -> Measurements:
    """Causal attention never loses a value: its matrix is always invertible."""
    matrix = weights(draw.normal(1, 1, 24, 4), draw.normal(1, 1, 24, 4))[0, 0]
    sign, log = torch.linalg.slogdet(matrix)
    yield equal("sign of the determinant", float(sign), 1.0)
    yield equal("its logarithm, against the sum over the diagonal", float(log), float(matrix.diag().log().sum()), 1e-9)


@claim(
    latex=r"\lVert X_L-\mathbf{1}\bar{x}_L^\top\rVert\to 0",
    source="Dong et al. 2021, arXiv:2103.03404; on the sphere Geshkovski et al. 2023, arXiv:2312.10794",
    verdict="holds if",
    conditions="there is neither a skip connection nor a feed-forward network, the weights stay bounded and W_v does "
    "not expand: it is the output that collapses, not A. With W_v = 2 I and orthonormal tokens nothing collapses; and "
    "a skip connection does not prevent it if tokens are normalised to the same length",
)
def stacks_collapse(
    draw: Draw, *, skip: float = 0.0, residual: float = 1.0, expansion: float = 2.0, pull: float = 1.0
) -> Measurements:
    """Stacked layers of attention make all tokens alike."""
    grown = torch.eye(16, dtype=torch.float64)[None, None]
    for _ in range(200):
        key = 10**0.5 * grown
        grown = attention(key, key, expansion * grown, scale=1.0)
    yield at_least(
        "W_v = 2 I, W_q = W_k = √10 I, orthonormal tokens: spread after 200 layers", spread_of_rows(grown), 0.9
    )
    sphere = nn.functional.normalize(draw.normal(1, 1, 32, 16), dim=-1)
    for _ in range(100):
        sphere = nn.functional.normalize(
            residual * sphere + attention(sphere, sphere, pull * sphere, scale=1.0), dim=-1
        )
    yield at_least(
        "unit tokens, skip connections: smallest inner product after 100 layers",
        float((sphere @ sphere.mT).min()),
        0.99,
    )
    n, width, layers = 32, 16, 6
    plain = with_skip = draw.normal(1, 1, n, width)
    for _ in range(layers):
        maps = [draw.normal(width, width) / width**0.5 for _ in range(3)]
        plain = skip * plain + attention(*(plain @ weight for weight in maps))
        with_skip = residual * with_skip + attention(*(with_skip @ weight for weight in maps))
    yield at_most("spread of the tokens after 6 layers", spread_of_rows(plain), 1e-12)
    yield at_least("the same with skip connections", spread_of_rows(with_skip), 0.1)
