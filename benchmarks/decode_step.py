"""Time of one token of a model at a long context beside reading its weights and its cache once, and Python's share."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking
from benchmarks.measuring import Referee, compare, in_turn
from benchmarks.reporting import Row, duration, ratio_row
from saccade.caches import Cache, KVCache
from saccade.models import Decoder, DecoderConfig
from saccade.nn import DecoderLayer, FeedForward, MultiHeadAttention
from saccade.positions import Rotary

CONTEXT, LAYERS, WIDTH, KV_HEADS, DIM = 8192, 4, 2048, 8, 128
TARGET = 1.3
"""Times that reading takes."""
SMALL_CONTEXT, SMALL_LAYERS, SMALL_WIDTH, SMALL_DIM = 64, 8, 64, 16
IN_PYTHON = 25e-6
"""Seconds per layer."""
TITLE = (
    f"one token of a model, Llama of width {WIDTH}, {LAYERS} layers, {KV_HEADS} key heads of {DIM}, context {CONTEXT}"
)
TITLE_ZH = f"模型的一个词元，Llama，宽 {WIDTH}，{LAYERS} 层，{KV_HEADS} 个宽 {DIM} 的键头，上下文 {CONTEXT:,}"


class Case(NamedTuple):
    """A model, its cache with all tokens but one, and that token."""

    model: Decoder
    cache: Cache
    token: Tensor

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Decode the token, then remove it so that the next step has the same length."""
        logits = self.model(self.token, cache=self.cache)
        self.cache.crop(self.cache.length - 1)
        return logits

    @property
    def tensors(self) -> list[Tensor]:
        """The model's weights and the memory of its cache, as float32 numbers, which a sum reads fastest."""
        held = (x for one in self.cache.flat for x in one._state.values())
        return [x.detach().flatten().view(torch.float32) for x in (*self.model.parameters(), *held)]


def case(
    context: int = CONTEXT,
    layers: int = LAYERS,
    width: int = WIDTH,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Return a model with random weights, and a cache of random keys and values."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=4 * width,
        max_len=context,
        embed_dim=width,
        num_heads=width // dim,
        num_kv_heads=kv_heads,
        num_layers=layers,
        feed_forward_dim=11 * width // 4,
    )
    model = Decoder(config).eval().to(dtype)
    cache = model.new_cache(context)
    for one in cache.flat:
        shape = (1, kv_heads, context - 1, dim)
        cast(KVCache, one).fill(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    return Case(model, cache, torch.randint(config.vocab_size, (1, 1)))


class Operators:
    """The operators of a small model's step, called one after another: no checks, modules or choices.

    Args:
        its: the model, its cache and a token. The cache must have room for that token.
    """

    def __init__(self, its: Case):
        self.its, self.position, config = its, its.cache.length, its.model.config
        self.heads = (-1, SMALL_DIM)
        layers = [cast(DecoderLayer, layer) for layer in its.model.stack.layers]
        self.weights = [_weights(layer) for layer in layers]
        self.memory = [cast(KVCache, one)._state for one in its.cache.flat]
        rotary = cast(Rotary, cast(MultiHeadAttention, layers[0].attention).rotary)
        like = torch.zeros(1, 1, 1, SMALL_DIM)
        self.cos, self.sin = rotary._factors_at(range(self.position, self.position + 1), like)
        self.table, self.eps = its.model.embedding.weight, config.norm_eps
        self.last_norm = cast(torch.nn.RMSNorm, its.model.stack.final_norm).weight

    def rotated(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys."""
        return torch.addcmul(heads * self.cos, heads.roll(SMALL_DIM // 2, -1), self.sin)

    def split(self, x: Tensor, weight: Tensor) -> Tensor:
        """Project the token to heads."""
        return F.linear(x, weight).view(1, 1, *self.heads).transpose(1, 2)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Decode the token. The cache does not count it."""
        x, (start, width) = F.embedding(self.its.token, self.table), (self.position, self.table.shape[1:])
        for own, memory in zip(self.weights, self.memory, strict=True):
            h = F.rms_norm(x, width, own.norm, self.eps)
            query, key, value = (self.split(h, weight) for weight in (own.query, own.key, own.value))
            query, key = self.rotated(query), self.rotated(key)
            memory["key"].narrow(2, start, 1).copy_(key)
            memory["value"].narrow(2, start, 1).copy_(value)
            keys, values = (memory[name].narrow(2, 0, start + 1) for name in ("key", "value"))
            heads = torch._scaled_dot_product_flash_attention_for_cpu(query, keys, values)[0]
            x = x + F.linear(heads.transpose(1, 2).flatten(2), own.output)
            h = F.rms_norm(x, width, own.next_norm, self.eps)
            x = x + F.linear(F.silu(F.linear(h, own.gate)) * F.linear(h, own.expand), own.contract)
        return F.linear(F.rms_norm(x, width, self.last_norm, self.eps), self.table)


class _Weights(NamedTuple):
    norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    next_norm: Tensor
    gate: Tensor
    expand: Tensor
    contract: Tensor


def _weights(layer: DecoderLayer) -> _Weights:
    attention, network = cast(MultiHeadAttention, layer.attention), cast(FeedForward, layer.feed_forward)
    projections = [attention.query_projection, attention.key_projection, attention.value_projection]
    parts: list[torch.nn.Module | None] = [layer.attention_norm, *projections, attention.output_projection]
    parts += [layer.feed_forward_norm, network.gate, network.expand, network.contract]
    return _Weights(*(cast(Tensor, part.weight) for part in parts if part is not None))


def small_case() -> Case:
    """Return a model whose operators take little time, with 64 tokens in its cache."""
    return case(SMALL_CONTEXT + 1, SMALL_LAYERS, SMALL_WIDTH, 2, SMALL_DIM)


def check(its: Case, operators: Operators) -> None:
    """Check that the model and its operators give the same logits."""
    assert_agree(its.step(), operators.step())


def beside_reading(its: Case, referee: Referee, name: str, but: str = "") -> Row:
    """Measure a step beside a sum of all bytes that it reads."""
    tensors = its.tensors
    size = sum(x.nbytes for x in tensors)
    pair = compare(its.step, lambda: [x.sum() for x in tensors], rounds=15, referee=referee, batch=3, warm_up=2)
    times = 1 / pair.ratio
    told, met = f"at most {TARGET:g}x", times <= TARGET
    figures = {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs, "bytes": float(size)}
    measured = f"{times:.2f}x: {duration(pair.ours)}, a sum of the {size / 1e6:.0f} MB {duration(pair.theirs)}"
    row = Row(f"{name}: beside reading weights and cache once", measured, told, met, figures, pair.rate, pair.quiet)
    return row._replace(target=f"{told}; not asked: {but}", met=None) if but else row


def in_python(its: Case, referee: Referee) -> Row:
    """Measure a step of a small model beside its operators."""
    operators = Operators(its)
    check(its, operators)
    both = in_turn([its.step, operators.step], rounds=400, referee=referee, batch=100, warm_up=50)
    per_layer = statistics.median(ours - theirs for ours, theirs in both.times) / SMALL_LAYERS
    figures = {"ours_s": both.median(0), "theirs_s": both.median(1), "per_layer_s": per_layer}
    parts = f"step {duration(both.median(0))}, its operators alone {duration(both.median(1))}"
    name = f"width {SMALL_WIDTH}, {SMALL_LAYERS} layers, {SMALL_CONTEXT} tokens: Python per layer"
    told = f"at most {duration(IN_PYTHON)}"
    return Row(name, f"{duration(per_layer)}; {parts}", told, per_layer <= IN_PYTHON, figures, both.rate, both.quiet)


def beside_compiled(its: Case, referee: Referee, name: str) -> Row:
    """Measure a step beside the same step of the compiled model."""
    compiled = its._replace(model=cast(Decoder, torch.compile(its.model)))
    for _ in range(3):  # compiled again where a number changes
        assert_agree(compiled.step(), its.step())
    pair = compare(compiled.step, its.step, rounds=15, referee=referee, batch=3, warm_up=2)
    return ratio_row(f"{name}: compiled", pair, peer="not compiled")


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for dtype in (torch.float32, torch.bfloat16):
        its, name = case(dtype=dtype), str(dtype).removeprefix("torch.")
        yield beside_reading(its, referee, name, lacking(dtype))
        if dtype == torch.float32:
            yield beside_compiled(its, referee, name)
        del its
    its = small_case()
    yield in_python(its, referee)
    yield beside_compiled(its, referee, f"width {SMALL_WIDTH}")
