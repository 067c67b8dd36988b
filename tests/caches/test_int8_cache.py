"""Int8Cache: the run over rounded keys and values, and how far these are off."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import Int8Cache, KVCache, load_cache, padded_positions, save_cache
from saccade.caches.files import encoded
from saccade.matrix import Matrix
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import ALiBi, Rotary
from saccade.testing import oracle

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 4, 8
CAUSAL = masks.Causal()


def _rounded(x: Tensor) -> Tensor:
    """Round by definition: each channel of each block to 255 levels from its smallest number to its largest."""
    out = x.clone()
    for start in range(0, x.shape[2] - SIZE + 1, SIZE):
        block = x[:, :, start : start + SIZE]
        least, most = block.amin(2, keepdim=True), block.amax(2, keepdim=True)
        step, zero = (most - least) / 254, (most + least) / 2
        out[:, :, start : start + SIZE] = torch.where(step > 0, torch.round((block - zero) / step) * step, 0.0) + zero
    return out


def _qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [3 * torch.randn(2, heads, length, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("name", ["plain", "alibi"])
def test_it_is_the_run_over_rounded_keys_and_values(name: str) -> None:
    q, k, v = _qkv(45)
    mechanism = Softmax(bias=ALiBi(HEADS)) if name == "alibi" else Softmax()
    cache, start = Int8Cache(SIZE), 0
    for size in (19, 1, 1, 1, 1, 1, 7, 1, 1, 1, 11):
        stop, done = start + size, start // SIZE * SIZE
        out = cache.attend(mechanism, *(x[:, :, start:stop] for x in (q, k, v)), mask=CAUSAL)
        keys, values = (torch.cat([_rounded(x[:, :, :done]), x[:, :, done:stop]], 2) for x in (k, v))
        torch.testing.assert_close(out, mechanism(q[:, :, start:stop], keys, mask=CAUSAL) @ values)
        if name == "plain":
            expected, _ = oracle.attention(q[:, :, start:stop], keys, values, CAUSAL.to_dense(stop)[:, :, start:])
            torch.testing.assert_close(out, expected)
        start = stop
    assert start == cache.length == 45


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_element_is_off_by_more_than_was_said(dtype: torch.dtype) -> None:
    k = _qkv(4 * SIZE, dtype)[1]
    k[:, :, :SIZE, 1] = 0.0  # a channel that says nothing
    k[:, :, :SIZE, 2] *= 1000.0
    cache = Int8Cache(SIZE)
    cache.attend(Softmax(), *[k] * 3)
    held = cache._store("key", k).read(k[:, :, :0], slice(None)).unflatten(0, (2, KV_HEADS))
    blocks = k.double().unflatten(2, (4, SIZE))
    bound = (blocks.amax(3, keepdim=True) - blocks.amin(3, keepdim=True)) / 508
    eps = torch.finfo(dtype).eps * k.double().abs()
    off = (held.double() - k.double()).abs()
    assert bool((off <= bound.expand(-1, -1, -1, SIZE, -1).flatten(2, 3) * (1 + 1e-5) + eps).all())
    assert float(off.max()) > 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steps = (bound * 2)[:, :, :, 0].to(wide)
    torch.testing.assert_close(cache._store("key", k).steps, steps, atol=0, rtol=1e-5)
    assert bool((held[:, :, :SIZE, 1] == 0).all())


@pytest.mark.parametrize("offset", [0.0, 50.0, 150.0, -1e4])
def test_a_mean_far_from_0_costs_no_precision(offset: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 64)
    shifted = k.clone()
    shifted[..., 5] += offset
    shifted[..., 40] -= offset
    held = []
    for keys in (k, shifted):
        cache = Int8Cache(32)
        cache.attend(Softmax(), q, keys, v, mask=CAUSAL)
        held.append(cache._store("key", keys).read(keys[:, :, :0], slice(None)) - keys[0])
    assert float(held[0].abs().max()) < 0.02
    assert float(held[1].abs().max()) < 1.1 * float(held[0].abs().max()) + 1e-6 * abs(offset)


def test_numbers_near_both_ends_of_a_dtype_are_held() -> None:
    largest = 3e38
    x = torch.tensor([-largest, 0.0, largest, 1.0, largest / 2, -largest / 2, -1.0, 2.0]).view(1, 1, 8, 1)
    cache = Int8Cache(8)
    cache.attend(Softmax(scale=0.0), 0 * x, x, 0 * x)
    held = cache._store("key", x).read(x[:, :, :0], slice(None)).view(-1)
    assert bool(held.isfinite().all())
    assert bool(((held - x.view(-1)).abs() <= largest / 250).all())


def test_a_file_of_the_old_format_is_read_as_it_was_meant(tmp_path: Path) -> None:
    q, k, v = _qkv(20, torch.float32)
    cache = Int8Cache(SIZE)
    cache.attend(Softmax(), q, k, v, mask=CAUSAL)
    save_cache(cache, tmp_path / "new")
    again = load_cache(tmp_path / "new")
    assert isinstance(again, Int8Cache)
    for name, x in cache.state()[1].items():
        assert torch.equal(again.state()[1][name], x)
    # Version 0.1 rounded to multiples of a step, and wrote no zeros.
    numbers, tensors = cache.state()
    old = {name: x for name, x in tensors.items() if not name.endswith("zeros")}
    about = {"kind": "cache", "fingerprint": None, "cache": {"kind": "Int8Cache", "block_size": SIZE, **numbers}}
    (tmp_path / "old").write_bytes(encoded(old, about))
    loaded = load_cache(tmp_path / "old")
    assert isinstance(loaded, Int8Cache)
    held = loaded._store("key", k).read(k[:, :, :0], slice(None)).unflatten(0, (2, KV_HEADS))[:, :, :16]
    steps = tensors["key.steps"].repeat_interleave(SIZE, 2)
    torch.testing.assert_close(held, tensors["key.codes"] * steps, atol=0, rtol=0)
    loaded.attend(Softmax(), q, k, v, mask=CAUSAL)


def test_scores_are_off_by_no_more_than_was_said() -> None:
    q, k, _ = _qkv(4 * SIZE)
    cache = Int8Cache(SIZE)
    cache.attend(Softmax(), *[k] * 3)
    held = cache._store("key", k).read(k[:, :, :0], slice(None)).unflatten(0, (2, KV_HEADS)).repeat_interleave(2, 1)
    off = (q @ (held - k.repeat_interleave(2, 1)).mT).abs() / 2
    steps = cache._store("key", k).steps.repeat_interleave(2, 1)
    bound = (q.abs() @ steps.mT).repeat_interleave(SIZE, 3) / 2 / 2
    assert bool((off <= bound * (1 + 1e-9)).all())


def test_unfinished_blocks_are_dense_in_ragged_batches_too() -> None:
    mha = MultiHeadAttention(16, HEADS, num_kv_heads=2, mask=CAUSAL, rotary=Rotary(4)).double().eval()
    mha.requires_grad_(False)
    x, positions = torch.randn(3, 30, 16).double(), padded_positions([12, 5, 9], side="left")
    outs = []
    for cache in (KVCache(), Int8Cache(64)):
        parts = [mha(x[:, :12], cache=cache, positions=positions)]
        parts += [mha(part, cache=cache) for part in x[:, 12:].split([1, 4, 1, 12], 1)]
        outs.append(torch.cat(parts, 1))
    torch.testing.assert_close(outs[1], outs[0])


def test_reordered_cropped_and_forked_caches_go_on_as_if_alone() -> None:
    parts = _qkv(30)
    cache = Int8Cache(SIZE)
    cache.attend(Softmax(), *(x[:, :, :20] for x in parts), mask=CAUSAL)
    fork, other = cache.fork(), cache.fork()
    fork.attend(Softmax(), *(x[:, :, 25:] for x in parts), mask=CAUSAL)
    cache.attend(Softmax(), *(x[:, :, 28:29] for x in parts), mask=CAUSAL)
    cache.crop(20)
    own = cache.attend(Softmax(), *(x[:, :, 20:30] for x in parts), mask=CAUSAL)
    other.reorder([1, 1, 0])
    again = other.attend(Softmax(), *(x[[1, 1, 0], :, 20:30] for x in parts), mask=CAUSAL)
    torch.testing.assert_close(again, own[[1, 1, 0]])
    with pytest.raises(NotImplementedError, match="the first 24 columns are rounded in blocks"):
        cache.crop(23)
    cache.crop(24)
    alone = Int8Cache(SIZE)
    alone.attend(Softmax(), *(x[:, :, :24] for x in parts), mask=CAUSAL)
    last = [one.attend(Softmax(), *(x[:, :, 24:] for x in parts), mask=CAUSAL) for one in (cache, alone)]
    torch.testing.assert_close(*last)
    cache.crop(0)
    assert (cache.length, cache.nbytes) == (0, 0)


def test_heads_that_are_read_a_few_at_a_time_are_those_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, positions = _qkv(20), padded_positions([19, 11], side="left")
    outs, read = [], []

    class Watched(Softmax):
        def forward(self, query: Tensor, key: Tensor, **where: object) -> Matrix:
            read.append(len(key))
            return super().forward(query, key, **where)

    # Bytes of keys: all, three of four heads, one.
    for limit, heads in ((1 << 21, [4]), (3 * 20 * DIM * 8, [3, 1]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr("saccade.caches.rounded_cache._AT_ONCE", limit)
        cache = Int8Cache(SIZE)
        cache.attend(Softmax(), *(x[:, :, :19] for x in parts), mask=CAUSAL, positions=positions)
        read.clear()
        outs.append(cache.attend(Watched(), *(x[:, :, 19:] for x in parts), mask=CAUSAL))
        assert read == heads
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_a_call_of_no_tokens_binds_to_no_batch() -> None:
    cache, (q, k, v) = Int8Cache(SIZE), _qkv(9)
    cache.attend(Softmax(), q[:, :, :0], k[:, :, :0], v[:, :, :0], mask=CAUSAL)
    out = cache.attend(Softmax(), q[:1], k[:1], v[:1], mask=CAUSAL)
    torch.testing.assert_close(out, Softmax()(q[:1], k[:1], mask=CAUSAL) @ v[:1])


def test_bytes_are_counted_exactly() -> None:
    q, k, v = _qkv(21, torch.float32)
    cache, element = Int8Cache(SIZE), 2 * 2 * KV_HEADS * DIM  # keys and values, batch
    cache.attend(Softmax(), q[:, :, :20], k[:, :, :20], v[:, :, :20], mask=CAUSAL)
    held = element * (16 + 2 * 8 + 4 * 4)
    assert (cache.nbytes, cache.traffic) == (held, (20 * 4 * element, 20 * 4 * element))
    cache.attend(Softmax(), *(x[:, :, 20:] for x in (q, k, v)), mask=CAUSAL)
    assert cache.traffic == (held + 4 * element, 4 * element)
    assert cache.nbytes == held + 4 * element


def test_impossible_arguments_are_refused() -> None:
    cache, (q, k, v) = Int8Cache(), _qkv(4)
    k[0, 0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="key must be finite; got NaN or inf"):
        cache.attend(Softmax(), q, k, v)
    with pytest.raises(ValueError, match="value must be finite"):
        cache.attend(Softmax(), q, v, k)
    assert (cache.length, cache.nbytes) == (0, 0)
    large = torch.full((1, 1, 9, 4), 3e38)  # whose sum is not finite
    assert Int8Cache(SIZE).attend(Softmax(), 0 * large, large, 0 * large).isfinite().all()
    with pytest.raises(ValueError, match="block_size must be an int of at least 1; got 0"):
        Int8Cache(0)
    cache.attend(Softmax(), q, v, v)
    with pytest.raises(TypeError, match="dtype of key must be float64, as in the cache; got float32"):
        cache.attend(Softmax(), q.float(), v.float(), v.float())
