"""Caches under ``torch.func``: the same outputs and gradients as in a loop, or one clear message at the start."""

import pytest
import torch
from tests.caches.cache_kinds import EVERY_KIND, mechanism_of, value_of
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import normalize

from saccade import masks
from saccade.caches import LayerCache
from saccade.models import Decoder, DecoderConfig
from saccade.support.errors import UnsupportedError

Tensors = tuple[Tensor, Tensor, Tensor]

READS_VALUES = ("blocks", "ranked seldom", "sparse", "heavy", "snap", "8 bits", "2 bits", "indexed", "indexed latents")
ROUNDED = ("8 bits", "2 bits")  # which read only what they store
CONTINUED = [name for name in EVERY_KIND if name not in READS_VALUES]
CASES = [(name, mapped) for name in EVERY_KIND for mapped in ((0, 0, 0), (0, None, None), (None, 0, 0))]
HIDDEN = "the values of queries, keys and values are read before anything is computed, and vmap hides them"
GENERATOR = torch.Generator().manual_seed(0)
QUERIES, KEYS, VALUES = (torch.randn(3, 2, heads, 15, 4, generator=GENERATOR) for heads in (4, 2, 2))
ALL: Tensors = (QUERIES, normalize(KEYS, dim=-1), VALUES)  # three samples
FIRST: Tensors = (ALL[0][0], ALL[1][0], ALL[2][0])


def _attend(name: str, cache: LayerCache, tensors: Tensors, *stops: int) -> Tensor:
    """Pass the tokens up to each stop to a cache, and return all outputs."""
    outs, start = [], cache.length if name != "context" else 9 if cache.length else 0
    for stop in stops:
        torch.manual_seed(stop)
        q, k, v = (x[..., start:stop, :] for x in tensors)
        new = (q, k, value_of(name, k, v))
        new = new[:1] if name == "context" and cache.length else new
        outs.append(cache.attend(mechanism_of(name, stop - start), *new, mask=masks.Causal()))
        start = stop
    return torch.cat(outs, 2)


def _whole(name: str, tensors: Tensors) -> Tensor:
    return _attend(name, EVERY_KIND[name](), tensors, 9, 10, 14, 15)


def _reads(name: str, mapped: tuple[int | None, ...]) -> bool:
    return name in READS_VALUES and not (name in ROUNDED and mapped[1] is None)


def _mapped(mapped: tuple[int | None, ...]) -> tuple[Tensor, ...]:
    return tuple(x if dim == 0 else x[0] for x, dim in zip(ALL, mapped, strict=True))


@pytest.mark.parametrize(("name", "mapped"), [x for x in CASES if not _reads(*x)])
def test_samples_are_those_of_a_loop(name: str, mapped: tuple[int | None, ...]) -> None:
    tensors = _mapped(mapped)
    loop = [_whole(name, tuple(x if x.dim() == 4 else x[i] for x in tensors)) for i in range(3)]
    out = vmap(lambda *x: _whole(name, x), in_dims=mapped, randomness="same")(*tensors)
    torch.testing.assert_close(out, torch.stack(loop))


@pytest.mark.parametrize(("name", "mapped"), [x for x in CASES if _reads(*x)])
def test_a_cache_that_reads_values_is_refused(name: str, mapped: tuple[int | None, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"\w+\.attend: vmap cannot run") as refused:
        vmap(lambda *x: _whole(name, x), in_dims=mapped, randomness="same")(*_mapped(mapped))
    assert refused.value.reasons == (HIDDEN,)


@pytest.mark.parametrize("name", CONTINUED)
def test_samples_continue_a_prompt_that_they_share(name: str) -> None:
    prompt = EVERY_KIND[name]()
    _attend(name, prompt, FIRST, 9)

    def forked(*tensors: Tensor) -> Tensor:
        return _attend(name, prompt.fork(), tensors, 10, 14)

    def begun(*tensors: Tensor) -> Tensor:
        cache = EVERY_KIND[name]()
        _attend(name, cache, FIRST, 9)
        return _attend(name, cache, tensors, 10, 14)

    loop = torch.stack([forked(*x) for x in zip(*ALL, strict=True)])
    for run in (forked, begun):
        torch.testing.assert_close(vmap(run, randomness="same")(*ALL), loop)
    assert _attend(name, prompt, FIRST, 10).shape[2] == 1


@pytest.mark.ci
@pytest.mark.parametrize("name", CONTINUED)
def test_gradients_of_samples_are_those_of_a_loop(name: str) -> None:
    gradients = grad(lambda *x: _whole(name, x).sin().sum(), (0, 1))
    loop = [torch.stack(x) for x in zip(*(gradients(*x) for x in zip(*ALL, strict=True)), strict=True)]
    torch.testing.assert_close(list(vmap(gradients, randomness="same")(*ALL)), loop)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_cache_that_others_use_is_not_written_by_samples(name: str) -> None:
    empty, prompt = EVERY_KIND[name](), EVERY_KIND[name]()
    _attend(name, prompt, FIRST, 9)
    expected = _attend(name, prompt.fork(), FIRST, 10)
    for cache in [empty] if name == "context" else [empty, prompt]:  # a context is only read
        for mapped in ((0, 0, 0), (0, None, None)):
            with pytest.raises(UnsupportedError, match="created outside the function that vmap maps, so all"):
                vmap(lambda *x, c=cache: _attend(name, c, x, c.length + 1), in_dims=mapped, randomness="same")(
                    *_mapped(mapped)
                )
    assert empty.length == 0
    torch.testing.assert_close(_attend(name, prompt, FIRST, 10), expected)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_cache_of_samples_is_refused_outside(name: str) -> None:
    made: list[LayerCache] = []

    def run(*tensors: Tensor) -> Tensor:
        made.append(EVERY_KIND[name]())
        return _attend(name, made[0], tensors, 9)

    vmap(run, randomness="same")(*ALL)
    with pytest.raises(UnsupportedError, match="created inside the function that vmap maps, so it"):
        _attend(name, made[0], FIRST, 10)
    cache = EVERY_KIND[name]() if name == "context" else made[0]  # a context is not cropped
    cache.crop(0)
    torch.testing.assert_close(_attend(name, cache, FIRST, 9, 10), _attend(name, EVERY_KIND[name](), FIRST, 9, 10))


def test_a_decoder_generates_samples_with_a_cache_in_each() -> None:
    config = DecoderConfig(
        vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=2, feed_forward_dim=8, position_encoding="rotary"
    )
    model, tokens = Decoder(config).eval(), torch.randint(9, (3, 2, 12))

    def run(tokens: Tensor) -> Tensor:
        cache = model.new_cache()
        return torch.cat([model(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 12))], 1)

    torch.testing.assert_close(vmap(run)(tokens), torch.stack([model(one) for one in tokens]))
    with pytest.raises(ValueError, match="tokens must be from 0 to 8, the vocabulary; got 9"):
        vmap(run)(tokens + 1 + (8 - tokens.max()))


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_cache_goes_on_after_a_gradient(name: str) -> None:
    cache, other = EVERY_KIND[name](), EVERY_KIND[name]()
    for one in (cache, other):
        _attend(name, one, FIRST, 9)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(name, cache, (q, k, v), 10).sin().sum()

    leaves = [x.clone().requires_grad_() for x in FIRST]
    out = _attend(name, other, (leaves[0], leaves[1], leaves[2]), 10)
    expected = torch.autograd.grad(out.sin().sum(), leaves[0])
    torch.testing.assert_close(grad(loss)(*FIRST), *expected)
    torch.testing.assert_close(_attend(name, cache, FIRST, 11, 14), _attend(name, other, FIRST, 11, 14))
