"""Claims about decoding: one token at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.models import Decoder, DecoderConfig
from saccade.nn import MultiHeadAttention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.complexity import dense, flops
from saccade.theory.measurement import Measurements, differ, equal, same

_PROMPT, _LENGTH = 6, 16


def decoder(num_kv_heads: int = 4) -> Decoder:
    """Build a small decoder with random weights and two layers with four heads of width 8."""
    return Decoder(
        DecoderConfig(
            vocab_size=_LENGTH,
            max_len=64,
            embed_dim=32,
            num_heads=4,
            num_layers=2,
            feed_forward_dim=32,
            num_kv_heads=num_kv_heads,
        )
    )


def one_by_one(model: Decoder, tokens: Tensor, prompt: int) -> tuple[Tensor, int]:
    """Decode one token at a time after running the prompt at once. Return the logits and the cache size in bytes."""
    cache = model.new_cache()
    pieces = [tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)]
    return torch.cat([model(piece, cache=cache) for piece in pieces], 1), cache.nbytes


@claim(
    latex=r"\mathrm{prefill}(x_{\le p})+\mathrm{decode}(x_{p+1}),\ldots=\mathrm{full}(x_{\le n})",
    source="tutorials on the KV cache; Shazeer 2019, arXiv:1911.02150, and Ainslie et al. 2023, arXiv:2305.13245, for "
    "heads that share keys and values",
    verdict="holds if",
    conditions="attention is causal: otherwise each new token changes the results of the earlier ones. For n tokens "
    "a layer stores 2 n numbers for each entry of a key head; if several heads share one, the cache is smaller by "
    "that factor",
)
def prefill_and_decode_are_the_full_run(
    draw: Draw,
    *,
    decode: Callable[[Decoder, Tensor, int], tuple[Tensor, int]] = one_by_one,
    make: Callable[[int], Decoder] = decoder,
    mask: Mask | None = None,
) -> Measurements:
    """Prefill followed by decoding token by token with a KV cache gives the same result as the full run."""
    tokens = draw.permutation(_LENGTH)[None]
    cache_bytes = {}
    with torch.no_grad():
        for heads in (4, 2):
            model = draw.module(partial(make, heads)).eval()
            logits, cache_bytes[heads] = decode(model, tokens, _PROMPT)
            yield same(
                Message("{heads} key heads: logits, against the full run", heads=heads), logits, model(tokens), 1e-10
            )
    yield equal(
        "bytes of the cache, against 2 n · layers · heads · width, in float64",
        cache_bytes[4],
        2 * _LENGTH * 2 * 4 * 8 * 8,
    )
    yield equal("bytes with 2 key heads, as a share", cache_bytes[2] / cache_bytes[4], 0.5)
    layer = draw.module(lambda: MultiHeadAttention(32, 4))
    x = draw.normal(1, _LENGTH, 32)
    with torch.no_grad():
        whole, less = (layer(x[:, :n], mask=mask)[:, : _LENGTH - 1] for n in (_LENGTH, _LENGTH - 1))
    yield differ("attention to both sides: earlier tokens, with a last one and without it", whole, less, 1e-3)


@claim(
    latex=r"\sum_{i\le n}i\cdot 4d=2n(n+1)d\ \text{against}\ \tfrac{2}{3}n(n+1)(2n+1)d",
    source="tutorials on the KV cache; by counting",
    verdict="holds",
    conditions="products of queries, keys and values are counted; projections, which the cache saves as well, are not",
)
def a_cache_spares_what_was_computed(
    draw: Draw, *, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = dense
) -> Measurements:
    """With a KV cache, a token costs O(n d); without one, all earlier tokens are computed again."""
    width, n = 16, 32

    def cost(queries: int, keys: int) -> int:
        query, key = (torch.empty(1, 1, count, width, device="meta") for count in (queries, keys))
        return flops(lambda: attend(query, key, key))

    cached = sum(cost(1, length) for length in range(1, n + 1))
    uncached = sum(cost(length, length) for length in range(1, n + 1))
    yield equal("operations of one step, 32 tokens, against 4 n d", cost(1, n), 4 * n * width)
    yield equal("of 32 steps with a cache, against 2 n (n + 1) d", cached, 2 * n * (n + 1) * width)
    yield equal("without one, against 2/3 n (n + 1) (2 n + 1) d", uncached, 2 * n * (n + 1) * (2 * n + 1) * width / 3)
