"""QuantizedCache: the run over rounded keys and values, in 4 and 2 bits."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import Cache, KVCache, QuantizedCache, load_cache, save_cache
from saccade.mechanisms import Softmax
from saccade.models import Decoder, DecoderConfig
from saccade.testing import oracle

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 6, 8
BITS = pytest.mark.parametrize("bits", [4, 2])


def _levels(x: Tensor, axis: int, bits: int) -> Tensor:
    """Round by definition: to evenly spaced levels from the smallest to the largest number along an axis."""
    least, most = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    step = (most - least) / (2**bits - 1)
    return torch.where(step > 0, torch.round((x - least) / step) * step + least, x)


def _rounded(x: Tensor, bits: int, by_channel: bool) -> Tensor:
    full = x.shape[2] // SIZE * SIZE
    if not by_channel:
        return torch.cat([_levels(x[:, :, :full], 3, bits), x[:, :, full:]], 2)
    blocks = [_levels(x[:, :, start : start + SIZE], 2, bits) for start in range(0, full, SIZE)]
    return torch.cat([*blocks, x[:, :, full:]], 2)


def _qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [3 * torch.randn(2, heads, length, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@BITS
def test_it_is_the_run_over_rounded_keys_and_values(bits: int) -> None:
    q, k, v = _qkv(45)
    cache, start = QuantizedCache(bits, SIZE), 0
    for size in (19, 1, 1, 1, 1, 1, 7, 1, 1, 1, 11):
        stop, done = start + size, start // SIZE * SIZE
        out = cache.attend(Softmax(), *(x[:, :, start:stop] for x in (q, k, v)), mask=masks.Causal())
        keys, values = (
            torch.cat([_rounded(x[:, :, :done], bits, by), x[:, :, done:stop]], 2) for x, by in ((k, True), (v, False))
        )
        allowed = masks.Causal().to_dense(stop)[:, :, start:]
        expected, _ = oracle.attention(q[:, :, start:stop], keys, values, allowed)
        torch.testing.assert_close(out, expected)
        start = stop


@BITS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_element_is_off_by_more_than_was_said(bits: int, dtype: torch.dtype) -> None:
    x = _qkv(4 * SIZE, dtype)[1]
    x[:, :, :SIZE, 1] = 0.0
    x[:, :, :SIZE, 2] *= 1000.0
    x[:, :, :, 3] -= 50.0
    cache = QuantizedCache(bits, SIZE)
    cache.attend(Softmax(), *[x] * 3)
    for name, axis in (("key", 3), ("value", 4)):
        held = cache._store(name, x).read(x[:, :, :0], slice(None)).unflatten(0, (2, KV_HEADS))
        blocks = x.double().unflatten(2, (4, SIZE))
        bound = (blocks.amax(axis, keepdim=True) - blocks.amin(axis, keepdim=True)) / (2 * (2**bits - 1))
        eps = 2 * torch.finfo(dtype).eps * x.double().abs()
        off = (held.double() - x.double()).abs()
        assert bool((off <= bound.expand_as(blocks).flatten(2, 3) * (1 + 1e-5) + eps).all())
        assert float(off.max()) > 0


@BITS
def test_keys_are_rounded_by_channel_and_values_by_token(bits: int) -> None:
    x = torch.ones(1, 1, SIZE, DIM).double() * torch.arange(1.0, DIM + 1)  # alike in all tokens
    cache = QuantizedCache(bits, SIZE)
    cache.attend(Softmax(), x, x, x.mT.contiguous().view_as(x))
    held = cache._store("key", x).read(x[:, :, :0], slice(None))
    torch.testing.assert_close(held, x[0])
    by_token = torch.ones(1, 1, SIZE, DIM).double() * torch.arange(1.0, SIZE + 1)[:, None]  # alike in all channels
    cache = QuantizedCache(bits, SIZE)
    cache.attend(Softmax(), x, x, by_token)
    torch.testing.assert_close(cache._store("value", x).read(x[:, :, :0], slice(None)), by_token[0])


def test_numbers_near_both_ends_of_a_dtype_are_held() -> None:
    largest = 3e38
    x = torch.tensor([-largest, 0.0, largest, 1.0, largest / 2, -largest / 2, -1.0, 2.0]).view(1, 1, 8, 1)
    cache = QuantizedCache(4, 8)
    cache.attend(Softmax(scale=0.0), 0 * x, x, x)
    for name in ("key", "value"):
        held = cache._store(name, x).read(x[:, :, :0], slice(None)).view(-1)
        assert bool(held.isfinite().all())
        assert bool(((held - x.view(-1)).abs() <= largest / 14).all())


@BITS
def test_memory_is_what_was_said(bits: int) -> None:
    cache, x = QuantizedCache(bits, 64), torch.randn(2, 3, 256, 32)
    cache.attend(Softmax(), x, x, x, mask=masks.Causal())
    elements = x.numel()
    assert cache.nbytes == elements * (bits / 8 + 8 / 64) + elements * (bits / 8 + 8 / 32)


@BITS
def test_forks_crops_and_files_go_on_as_if_alone(bits: int, tmp_path) -> None:
    q, k, v = _qkv(30)
    cache = QuantizedCache(bits, SIZE)
    cache.attend(Softmax(), *(x[:, :, :20] for x in (q, k, v)), mask=masks.Causal())
    fork = cache.fork()
    fork.attend(Softmax(), *(x[:, :, 24:] for x in (q, k, v)), mask=masks.Causal())
    save_cache(cache, tmp_path / "cache")
    again = load_cache(tmp_path / "cache")
    assert isinstance(again, QuantizedCache)
    assert (again.bits, again.block_size) == (bits, SIZE)
    expected = cache.attend(Softmax(), *(x[:, :, 20:] for x in (q, k, v)), mask=masks.Causal())
    assert torch.equal(again.attend(Softmax(), *(x[:, :, 20:] for x in (q, k, v)), mask=masks.Causal()), expected)
    again.crop(25)
    alone = QuantizedCache(bits, SIZE)
    alone.attend(Softmax(), *(x[:, :, :25] for x in (q, k, v)), mask=masks.Causal())
    outs = [one.attend(Softmax(), *(x[:, :, 25:] for x in (q, k, v)), mask=masks.Causal()) for one in (again, alone)]
    assert torch.equal(*outs)


def test_fewer_bits_are_further_off_and_smaller() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=50, max_len=256, embed_dim=64, num_heads=2, num_layers=2, feed_forward_dim=64, rotary_base=100.0
    )
    model, tokens = Decoder(config).eval(), torch.randint(50, (1, 200))
    off, stored = [], []
    with torch.no_grad():
        expected = model(tokens)
        for make in (KVCache, lambda: QuantizedCache(4, 32), lambda: QuantizedCache(2, 32)):
            cache = Cache(make() for _ in range(2))
            parts = [model(part, cache=cache) for part in tokens.split([160, *[1] * 40], 1)]
            off.append(float((torch.cat(parts, 1) - expected).abs().max()))
            stored.append(cache.nbytes)
    assert off[0] < 1e-4 < off[1] < off[2] < 1.0
    assert stored[0] > 3 * stored[1] > 3 * stored[2]


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"bits": 3}, r"bits must be one of 4, 2; got 3.(.|\n)*Int8Cache"),
        ({"bits": 4.0}, "bits must be one of 4, 2"),
        ({"bits": 2, "block_size": 6}, "block_size must be a multiple of 4, the number of codes in a byte; got 6"),
        ({"block_size": 0}, "block_size must be an int of at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rule):
        QuantizedCache(**options)
