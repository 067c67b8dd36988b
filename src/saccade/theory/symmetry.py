"""Claims about symmetry: the effect of permuting a sequence or its keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import attention
from saccade.positions import Sinusoidal
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, same


@claim(
    latex=r"\mathrm{Attn}(PX)=P\mathrm{Attn}(X)",
    source="tutorials; Lee et al. 2019, arXiv:1810.00825, section 3.1",
    verdict="holds if",
    conditions="nothing distinguishes positions: a causal mask, a relative bias or positions added to the tokens "
    "break it. Attention therefore suits sets in which no token occurs twice: if every token is repeated equally "
    "often, no output changes, so attention cannot count",
)
def permutation_equivariance(
    draw: Draw, *, mask: Mask | None = None, attention: Callable[..., Tensor] = attention
) -> Measurements:
    """If the sequence is permuted, the output is permuted in the same way."""
    n, width = 9, 8
    x, order = draw.normal(1, 1, n, width), draw.permutation(n)
    maps = [draw.normal(width, width) for _ in range(3)]

    def attend(x: Tensor, mask: Mask | None, bias: Tensor | None = None) -> Tensor:
        query, key, value = (x @ weight for weight in maps)
        return attention(query, key, value, mask, scale=0.05, bias=bias)

    permuted = x[:, :, order]
    expected = attend(x, mask)[:, :, order]
    yield same("output of the permuted sequence, against the permuted output", attend(permuted, mask), expected)
    bias = -(torch.arange(n)[:, None] - torch.arange(n)).abs().double()
    broken = {
        "causal mask": attend(permuted, Causal()) - attend(x, Causal())[:, :, order],
        "a relative bias": attend(permuted, None, bias=bias) - attend(x, None, bias=bias)[:, :, order],
    }
    positions = Sinusoidal(width).double()(torch.arange(n))
    broken["sinusoidal positions"] = attend(permuted + positions, None) - attend(x + positions, None)[:, :, order]
    for name, difference in broken.items():
        yield apart(
            Message("permuted, with {name}, largest difference", name=Message(name)),
            float(difference.abs().max()),
            0.0,
            0.01,
        )
    once = attend(x, mask)
    yield same(
        "every token twice: outputs, against those of every token once",
        attend(torch.cat([x, x], 2), mask)[:, :, :n],
        once,
    )


@claim(
    latex=r"\mathrm{Attn}(Q,PK,PV)=\mathrm{Attn}(Q,K,V)",
    source="Lee et al. 2019, arXiv:1810.00825, section 3.1",
    verdict="holds",
    conditions="keys and values in the same order, and nothing that distinguishes positions",
)
def key_order_does_not_matter(draw: Draw, *, attention: Callable[..., Tensor] = attention) -> Measurements:
    """Cross-attention does not depend on the order of the keys, and follows the order of the queries."""
    q, k, v = draw.normal(1, 2, 5, 4), draw.normal(1, 2, 9, 4), draw.normal(1, 2, 9, 3)
    key_order, query_order = draw.permutation(9), draw.permutation(5)
    out = attention(q, k, v)
    yield same("output after permuting keys and values", attention(q, k[:, :, key_order], v[:, :, key_order]), out)
    reordered = attention(q[:, :, query_order], k, v)
    yield same("output after permuting queries, against the permuted output", reordered, out[:, :, query_order])
