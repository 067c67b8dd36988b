"""Bytes and time of a decode step that reads chosen blocks, beside a full one; and the saving by a stored prefix."""

import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks, models
from saccade.caches import BlockSelectCache, Cache, KVCache, PrefixStore, fingerprint
from saccade.mechanisms import Softmax

TITLE = "decode with chosen blocks, and prompts that begin like earlier ones"
TITLE_ZH = "只读选中的块的解码，以及开头相同的提示词"
HEADS, KV_HEADS, DIM, LENGTH, BLOCK = 32, 8, 128, 32768, 64
SHARE, BYTES, FASTER, FIRST_TOKEN = 8, 6, 3.0, 3.0
SHORTER = (2048, 4096, 8192, 16384)
PROMPT, KNOWN = 1280, 1024
_CAUSAL, _SOFTMAX = masks.Causal(), Softmax()


class Case(NamedTuple):
    """The same tokens in a cache that selects blocks and in one that reads all, and the next token."""

    chosen: BlockSelectCache
    dense: KVCache
    token: tuple[Tensor, Tensor, Tensor]

    def step(self, cache: KVCache) -> Tensor:
        """Take a step, then undo it so that the next one has the same length."""
        out = cache.attend(_SOFTMAX, *self.token, mask=_CAUSAL)
        cache.crop(cache.length - 1)
        return out


def case(n: int, budget: int, block: int, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Case:
    """Return random inputs: n tokens, the last of which is the token to decode."""
    torch.manual_seed(0)
    key, value = (torch.randn(1, kv_heads, n, dim) for _ in range(2))
    token = (torch.randn(1, heads, 1, dim), key[:, :, -1:].clone(), value[:, :, -1:].clone())
    chosen, dense = BlockSelectCache(block, budget, max_len=n), KVCache(n)
    for cache in (chosen, dense):
        cache.fill(key[:, :, :-1], value[:, :, :-1])
    return Case(chosen, dense, token)


def check(its: Case) -> None:
    """Check that both caches agree if the budget covers all blocks."""
    everything = BlockSelectCache(its.chosen.block_size, its.chosen.block_size * (its.dense.length + 1))
    everything.fill(its.dense.key, its.dense.value)
    assert_agree(its.step(everything), its.step(its.dense))


class Prompt(NamedTuple):
    """A model, a prompt, and a store that holds the prompt's prefix."""

    model: models.Decoder
    tokens: list[int]
    store: PrefixStore

    def first_token(self, *, knowing: bool) -> list[list[int]]:
        """Compute the token after the prompt, with the stored prefix or without."""
        cache = self.model.new_cache()
        start = self.store.restore(self.tokens, cache) if knowing else 0
        return models.generate(self.model, [self.tokens[start:]], 1, cache=cache)


def prompt(folder: str, length: int = PROMPT, known: int = KNOWN, width: int = 512, layers: int = 4) -> Prompt:
    """Return a model with random weights, and a prompt with a stored prefix."""
    torch.manual_seed(0)
    config = models.DecoderConfig(
        vocab_size=1000,
        max_len=length + 1,
        embed_dim=width,
        num_heads=8,
        num_kv_heads=2,
        num_layers=layers,
        feed_forward_dim=3 * width,
    )
    model = models.Decoder(config).eval()
    store = PrefixStore(folder, 1 << 30, fingerprint=fingerprint(model), block_size=BLOCK)
    tokens = torch.randint(1000, (length,)).tolist()
    cache: Cache = model.new_cache()
    with torch.no_grad():
        model.hidden(torch.tensor([tokens[:known]]), cache=cache)
    store.put(tokens[:known], cache)
    return Prompt(model, tokens, store)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case(LENGTH, LENGTH // SHARE, BLOCK)
    check(its)
    with torch.no_grad():
        its.chosen.attend(_SOFTMAX, *its.token, mask=_CAUSAL)
        read = its.chosen.traffic.bytes_read
        its.chosen.crop(LENGTH - 1)
        its.dense.attend(_SOFTMAX, *its.token, mask=_CAUSAL)
        full = its.dense.traffic.bytes_read
        its.dense.crop(LENGTH - 1)
        name = f"n={LENGTH}, {HEADS} heads, {KV_HEADS} key heads of {DIM}, blocks of {BLOCK}, budget 1/{SHARE}"
        figures = {"bytes_read": float(read), "bytes_dense": float(full), "bytes_held": float(its.chosen.nbytes)}
        measured = f"{read / full:.3f} of {full / 1e6:.0f} MB, summaries included"
        yield Row(f"{name}: bytes read", measured, f"at most 1/{BYTES}", read * BYTES <= full, figures)
        calls = (lambda: its.step(its.chosen), lambda: its.step(its.dense))
        pair = compare(*calls, rounds=20, referee=referee, batch=5, warm_up=2)
        yield ratio_row(f"{name}: a step", pair, peer="all keys", target=FASTER)
    for n in SHORTER:
        its = case(n, n // SHARE, BLOCK)
        calls = (lambda its=its: its.step(its.chosen), lambda its=its: its.step(its.dense))
        pair = compare(*calls, rounds=40, referee=referee, batch=20, warm_up=2)
        yield ratio_row(f"n={n}, the same share: a step", pair, peer="all keys")
    with tempfile.TemporaryDirectory() as folder:
        own = prompt(folder)
        assert own.first_token(knowing=True) == own.first_token(knowing=False)
        pair = compare(
            lambda: own.first_token(knowing=True), lambda: own.first_token(knowing=False), rounds=5, referee=referee
        )
        yield ratio_row(
            f"first token after {PROMPT}, {KNOWN} of them in a store on disk",
            pair,
            peer="read anew",
            target=FIRST_TOKEN,
        )
