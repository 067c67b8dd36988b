"""Layers that read the keys and values of an earlier layer: a hand-written reference, Gemma 3n, caches and refusals."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention

import saccade as sc
from saccade import masks
from saccade.caches import Cache, Int8Cache, KVCache
from saccade.mechanisms import Forgetting, Mechanism, Softmax
from saccade.nn import (
    CompressedAttention,
    DecoderLayer,
    DecoderStack,
    DifferentialAttention,
    FeedForward,
    ForgettingAttention,
    LatentAttention,
    MultiHeadAttention,
    NativeSparseAttention,
    QKNorm,
    Recurrence,
    SharedKeyAttention,
    StateSpace,
)
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.shared_keys import SharedKeys
from saccade.positions import Rotary
from saccade.support.errors import UnsupportedError

N, WIDTH, CAUSAL = 13, 16, masks.Causal()


def _stack(**options: object) -> DecoderStack:
    """Four layers, of which the last two read the keys of the first two, under other masks."""
    torch.manual_seed(0)
    given = {"num_kv_heads": 2, "rotary": Rotary(4), "qk_norm": QKNorm(), **options}
    sources = [MultiHeadAttention(WIDTH, 4, mask=mask, **given) for mask in (masks.sliding_window(4), CAUSAL)]
    readers = [
        SharedKeyAttention(WIDTH, 4, source, mask=mask, **given)
        for source, mask in ((1, masks.sliding_window(6)), (0, CAUSAL))
    ]
    layers = [DecoderLayer(one, FeedForward(WIDTH, 8), norm="rms") for one in (*sources, *readers)]
    return DecoderStack(layers, final_norm=nn.RMSNorm(WIDTH)).double().eval()


def _tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, N, WIDTH, dtype=torch.float64)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:2], count, 4).transpose(1, 2)


def test_outputs_and_gradients_are_those_of_a_stack_written_by_hand() -> None:
    stack, x = _stack(), _tokens()
    held, y = [], x
    for layer in stack.layers:
        own, tokens = layer.attention, layer.attention_norm(y)
        rotary = Rotary(4).double()
        q = rotary(own.query_norm(_heads(own.query_projection(tokens), 4)), range(N))
        if isinstance(own, MultiHeadAttention):
            k = rotary(own.key_norm(_heads(own.key_projection(tokens), 2)), range(N))
            held.append((k, _heads(own.value_projection(tokens), 2)))
        k, v = held[own.source] if isinstance(own, SharedKeyAttention) else held[-1]
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        scores = (q @ k.mT / 2).masked_fill(~own.mask.to_dense(N), -torch.inf)
        y = y + own.output_projection((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = y + layer.feed_forward(layer.feed_forward_norm(y))
    expected = stack.final_norm(y)
    torch.testing.assert_close(stack(x), expected, atol=1e-10, rtol=1e-10)
    parameters = list(stack.parameters())
    grads = torch.autograd.grad(stack(x).sin().sum(), parameters)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sin().sum(), parameters), atol=1e-10, rtol=1e-10)


def test_a_pair_of_layers_is_that_of_gemma_3n() -> None:
    config = Gemma3nTextConfig(
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = [Gemma3nTextAttention(config, index).double().eval() for index in (1, 2)]
    assert theirs[0].store_full_length_kv
    assert theirs[1].is_kv_shared_layer
    theirs[0].v_norm = nn.Identity()  # another part of Gemma 3n
    options = {"num_kv_heads": 2, "qk_norm": QKNorm(eps=config.rms_norm_eps), "projection_bias": False, "mask": CAUSAL}
    base = config.rope_parameters["full_attention"]["rope_theta"]
    options |= {"rotary": Rotary(4, base=base)}
    options |= {"mechanism": Softmax(scale=1.0)}
    ours = MultiHeadAttention(WIDTH, 4, **options).double(), SharedKeyAttention(WIDTH, 4, 0, **options).double()
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    for own, other in zip(ours, theirs, strict=True):
        for name, parameter in own.named_parameters():
            part, kind, _ = name.replace("_projection", " proj").replace("_norm", " norm").replace(".", " ").split()
            source = getattr(other, f"{names[part]}_{kind}").weight
            with torch.no_grad():
                source.normal_()
                parameter.copy_(source)
    x, y = _tokens(), _tokens()
    angles = torch.arange(N, dtype=torch.float64)[:, None] * base ** -torch.tensor([0.0, 0.5] * 2, dtype=torch.float64)
    turns = angles.cos()[None], angles.sin()[None]
    hidden = torch.zeros(N, N, dtype=x.dtype).masked_fill(~CAUSAL.to_dense(N)[0, 0], -torch.inf)[None, None]
    states: dict[str, tuple[Tensor, Tensor]] = {}
    shared = SharedKeys()
    for own, other, tokens in zip(ours, theirs, (x, y), strict=True):
        expected, _ = other(tokens, turns, hidden, shared_kv_states=states)
        # Their norms are computed in float32.
        torch.testing.assert_close(own(tokens, shared=shared), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("edges", [[0, 5, 6, 7, 13], [0, 1, 12, 13]])
def test_any_split_with_a_cache_is_the_full_run(edges: list[int], grad: bool) -> None:
    stack, x = _stack(), _tokens()
    with torch.set_grad_enabled(grad):
        cache = stack.new_cache()
        out = torch.cat([stack(x[:, i:j], cache=cache) for i, j in itertools.pairwise(edges)], 1)
        torch.testing.assert_close(out, stack(x), atol=1e-10, rtol=1e-10)
        copy = cache.fork()
        copy.crop(6)
        torch.testing.assert_close(stack(x[:, 6:], cache=copy), stack(x)[:, 6:], atol=1e-10, rtol=1e-10)


def test_keys_are_stored_and_counted_once() -> None:
    stack, x = _stack(), _tokens()
    cache = stack.new_cache()
    stack(x, cache=cache)
    assert len(cache) == 2
    assert cache.nbytes == sum(layer.nbytes for layer in cache)
    assert sc.cost(stack, N, mask=CAUSAL, batch=2).cache_bytes == cache.nbytes


def test_ragged_and_packed_texts_are_each_text_alone() -> None:
    stack, x = _stack(), _tokens()
    positions = torch.tensor([[-1, -1, -1, *range(10)], [*range(13)]])
    cache = stack.new_cache()
    out = stack(x, positions=positions, cache=cache)
    torch.testing.assert_close(out[0, 3:], stack(x[:1, 3:])[0])
    torch.testing.assert_close(out[1], stack(x[1:])[0])
    new = torch.randn(2, 2, WIDTH, dtype=torch.float64)
    for item, text in enumerate((x[0, 3:], x[1])):
        whole = stack(torch.cat([text, new[item]])[None])[0, -2:]
        fork = cache.fork()
        torch.testing.assert_close(stack(new, cache=fork)[item], whole)
    packed = stack(x.flatten(0, 1)[None], mask=masks.Documents([N, N]))
    torch.testing.assert_close(packed.view(2, N, WIDTH), stack(x))


def test_matrices_are_those_that_run() -> None:
    stack, x = _stack(), _tokens()
    with torch.no_grad(), sc.record(stack, keep="qk") as recording:
        stack(x)
    matrices = stack.matrices(x)
    assert len(matrices) == 4
    for index, matrix in enumerate(matrices):
        recorded = recording[f"layers.{index}.attention"].matrix
        torch.testing.assert_close(recorded.to_dense(), matrix.to_dense())
    assert not torch.equal(matrices[2].to_dense() > 0, matrices[1].to_dense() > 0)  # a window of its own


def test_dropout_falls_on_the_reader_too() -> None:
    layer = SharedKeyAttention(WIDTH, 4, 0, mask=CAUSAL, dropout_p=0.5).double()
    shared, x = SharedKeys(), _tokens()
    shared.exchange(*torch.randn(2, 2, 4, N, 4, dtype=torch.float64))
    assert not torch.equal(layer(x, shared=shared), layer(x, shared=shared))
    assert torch.equal(layer.eval()(x, shared=shared), layer(x, shared=shared))


def test_other_caches_are_refused() -> None:
    stack = _stack()
    with pytest.raises(UnsupportedError, match="a Int8Cache does not return all keys and values, as a KVCache does"):
        stack(_tokens(), cache=Cache([Int8Cache(4), Int8Cache(4)]))
    with pytest.raises(ValueError, match="cache must contain the caches of 2 layers; got 4"):
        stack(_tokens(), cache=Cache(KVCache() for _ in range(4)))


def test_only_a_stack_can_call_it() -> None:
    layer = SharedKeyAttention(WIDTH, 4, 0)
    for call in (layer, layer.matrix):
        with pytest.raises(ValueError, match="shared must contain the keys and values of an earlier layer"):
            call(torch.zeros(1, 3, WIDTH))
    with pytest.raises(UnsupportedError, match="it reads the cache of layer 0"):
        layer.new_cache()


@pytest.mark.parametrize(
    ("source", "reader", "said"),
    [
        (MultiHeadAttention(WIDTH, 4), SharedKeyAttention(WIDTH, 4, 1), "source of layer 1 must be an earlier layer"),
        (MultiHeadAttention(WIDTH, 4), SharedKeyAttention(WIDTH, 4, 0, num_kv_heads=2), "2 key heads of width 4"),
        (MultiHeadAttention(WIDTH, 4, head_dim=8), SharedKeyAttention(WIDTH, 4, 0), "4 key heads of width 4"),
        (MultiHeadAttention(WIDTH, 4, short_convolution=2), SharedKeyAttention(WIDTH, 4, 0), "a short convolution"),
        (ForgettingAttention(WIDTH, 4), SharedKeyAttention(WIDTH, 4, 0), "mechanism of layer 1 must be a Forgetting"),
    ],
    ids=["itself", "heads", "width", "convolution", "gates"],
)
def test_sources_that_do_not_fit_are_refused(source: nn.Module, reader: SharedKeyAttention, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DecoderStack([DecoderLayer(one, FeedForward(WIDTH, 8)) for one in (source, reader)])


SOURCES: dict[str, tuple[AttentionLayer, Mechanism | None]] = {
    "MultiHeadAttention": (MultiHeadAttention(WIDTH, 4, mask=CAUSAL), Softmax()),
    "DifferentialAttention": (DifferentialAttention(WIDTH, 4, mask=CAUSAL), Softmax()),
    "ForgettingAttention": (ForgettingAttention(WIDTH, 4), Forgetting(4)),
    "LatentAttention": (LatentAttention(WIDTH, 4, latent_dim=4, head_dim=4, rotary_dim=0), None),
    "NativeSparseAttention": (NativeSparseAttention(WIDTH, 4), None),
    "CompressedAttention": (
        CompressedAttention(WIDTH, 4, head_dim=4, rotary_dim=0, block_size=2, window=2),
        None,
    ),
    "SharedKeyAttention": (SharedKeyAttention(WIDTH, 4, 0), None),
    "Recurrence": (Recurrence(WIDTH, 4), None),
    "StateSpace": (StateSpace(WIDTH), None),
}


def _stack_after(source: AttentionLayer, mechanism: Mechanism | None) -> DecoderStack:
    """Return three layers, of which the last reads the keys of the second."""
    first = MultiHeadAttention(WIDTH, 4, mask=CAUSAL)
    reader = SharedKeyAttention(WIDTH, 4, 1, mask=CAUSAL, mechanism=mechanism)
    return DecoderStack([DecoderLayer(one, FeedForward(WIDTH, 8)) for one in (first, source, reader)])


@pytest.mark.parametrize("name", [name for name, (_, mechanism) in SOURCES.items() if mechanism is None])
def test_sources_whose_keys_no_mechanism_can_read_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"be a MultiHeadAttention without a short convolution; got {name}"):
        _stack_after(*SOURCES[name])


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, (_, mechanism) in SOURCES.items() if mechanism is not None])
def test_prefill_and_steps_with_each_kind_of_source_equal_the_full_run(name: str) -> None:
    stack, x = _stack_after(*SOURCES[name]).double().eval(), _tokens()
    cache = stack.new_cache()
    torch.testing.assert_close(torch.cat([stack(part, cache=cache) for part in x.split([6, 1, N - 7], 1)], 1), stack(x))


def test_every_attention_layer_has_a_case() -> None:
    kinds = {name for name, x in vars(sc.nn).items() if isinstance(x, type) and issubclass(x, AttentionLayer)}
    assert kinds == set(SOURCES)
