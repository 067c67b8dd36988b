"""Gradient checkpointing: no cache is changed twice by a replay; a cache made inside the region works."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.caches import cache_kinds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade import masks
from saccade.caches import (
    CompressiveCache,
    CrossCache,
    IndexedCache,
    IndexedLatentCache,
    KVCache,
    LatentCache,
    LayerCache,
    RecurrentCache,
)
from saccade.mechanisms import CompressiveMemory, Linear, Mechanism, Softmax, TopK
from saccade.models import Decoder, DecoderConfig
from saccade.nn import MultiHeadAttention
from saccade.scorers import LightningIndexer
from saccade.support.errors import UnsupportedError

CAUSAL = masks.Causal()
KINDS: dict[str, Callable[[], LayerCache]] = cache_kinds.KINDS | {
    "sums": RecurrentCache,
    "remembered": CompressiveCache,
    "latents": lambda: LatentCache(4),
    "indexed": IndexedCache,
    "indexed latents": lambda: IndexedLatentCache(4),
}
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def mechanism_of(kind: str, q_len: int) -> Mechanism:
    if kind.startswith("indexed"):
        torch.manual_seed(1)
        return TopK(
            LightningIndexer(torch.randn(1, 2, q_len, 3), torch.randn(1, 1, q_len, 3), torch.ones(1, 2, q_len)), 3
        )
    found = {"sums": Linear, "remembered": lambda: CompressiveMemory(2, 3).requires_grad_(False)}
    return found.get(kind, Softmax)()


def attended(kind: str, x: Tensor, cache: LayerCache) -> Tensor:
    """Return what a prompt and a step give."""
    out = []
    for part in (x[:, :, :4], x[:, :, 4:5]):
        key = part[:, :, :, :4].contiguous()
        value = key[..., :4] if "latents" in kind else key.sin()
        out.append(cache.attend(mechanism_of(kind, part.shape[2]), part, key, value, mask=CAUSAL))
    return torch.cat(out, 2)


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(1, 2, 5, 4, dtype=torch.float32, requires_grad=True)


def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = inputs()
    run(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@REENTRANT
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_from_outside_is_refused_and_not_changed_twice(kind: str, use_reentrant: bool) -> None:
    cache, x = KINDS[kind](), inputs()
    with pytest.raises(UnsupportedError, match=r"gradient checkpointing .*\n.* a second time\nHint: .*fork"):
        checkpoint(partial(attended, kind, cache=cache), x, use_reentrant=use_reentrant).sum().backward()
    assert cache.length == (5 if use_reentrant else 0)  # the reentrant one is seen by its replay only
    cache.crop(0)
    torch.testing.assert_close(attended(kind, x, cache), attended(kind, x, KINDS[kind]()))


@REENTRANT
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_made_inside_has_the_gradient_of_the_plain_call(kind: str, use_reentrant: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return attended(kind, x, KINDS[kind]())

    torch.testing.assert_close(gradient(partial(checkpoint, run, use_reentrant=use_reentrant)), gradient(run))


@REENTRANT
def test_a_fork_and_an_emptied_cache_serve_inside(use_reentrant: bool) -> None:
    prefix, emptied = KVCache(), KVCache()
    with torch.no_grad():
        attended("all", inputs().cos(), prefix)

    def forked(x: Tensor) -> Tensor:
        return attended("all", x, prefix.fork())

    def cleared(x: Tensor) -> Tensor:
        emptied.crop(0)
        return attended("all", x, emptied)

    for run in (forked, cleared):
        torch.testing.assert_close(gradient(partial(checkpoint, run, use_reentrant=use_reentrant)), gradient(run))
    assert prefix.length == emptied.length == 5


@REENTRANT
def test_a_checkpoint_within_one_that_made_the_cache_is_refused(use_reentrant: bool) -> None:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(partial(attended, "all", cache=KVCache()), x, use_reentrant=use_reentrant)

    with pytest.raises(UnsupportedError, match="gradient checkpointing"):
        gradient(partial(checkpoint, outer, use_reentrant=use_reentrant))


@REENTRANT
def test_a_context_may_be_read_but_neither_filled_nor_given_again(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layer, context = MultiHeadAttention(8, 2, context_dim=6), torch.randn(1, 5, 6)
    wrapped = partial(checkpoint, use_reentrant=use_reentrant)
    x = torch.randn(1, 3, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"gradient checkpointing .*\n.* a second time"):
        wrapped(partial(layer, key=context, cache=CrossCache()), x).sum().backward()
    filled = CrossCache()
    with torch.no_grad():
        layer(x, context, cache=filled)
    grads = [torch.autograd.grad(layer(x, context.clone()).sum(), x)[0]]
    x.grad = None
    wrapped(partial(layer, cache=filled), x).sum().backward()
    torch.testing.assert_close(x.grad, grads[0])


@REENTRANT
def test_a_decoder_is_refused_before_its_position_vectors_run_out(use_reentrant: bool) -> None:
    config = DecoderConfig(
        vocab_size=20,
        max_len=6,
        embed_dim=8,
        num_heads=2,
        num_layers=2,
        feed_forward_dim=8,
        position_encoding="learned",
    )
    decoder, cache = Decoder(config), Decoder(config).new_cache()

    def run(anchor: Tensor, tokens: Tensor) -> Tensor:
        return decoder(tokens, cache=cache) + anchor

    anchor, tokens = torch.zeros((), requires_grad=True), torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(UnsupportedError, match=r"gradient checkpointing .*\n.* a second time"):
        checkpoint(run, anchor, tokens, use_reentrant=use_reentrant).sum().backward()
    assert cache.length == (4 if use_reentrant else 0)


def test_a_cache_goes_on_after_a_backward_pass_and_in_its_hooks() -> None:
    cache, x, held = KVCache(), inputs(), []
    out = attended("all", x, cache)
    x.register_hook(lambda grad: held.append(attended("all", inputs().detach(), KVCache())))
    out.sum().backward()
    attended("all", inputs(), cache)
    torch.testing.assert_close(held[0], out.detach())
    assert cache.length == 10
