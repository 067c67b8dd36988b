"""A cache over ranks: prefill and decode are the full run, and each rank holds its part."""

import pytest
import torch
from tests.distributed.gloo_processes import on_ranks

import saccade as sc
from saccade import masks, mechanisms, positions
from saccade.distributed import ContextParallel, ShardedCache, sharded_cache
from saccade.models import Decoder, DecoderConfig
from saccade.scorers import DotProducts

N = 40
MASKS = {
    "causal": masks.Causal(),
    "window": masks.sliding_window(7),
    "sinks and window": masks.Causal() & (masks.Window(5, 0) | masks.Global([0, 1], sees=False)),
    "documents": masks.Documents([11, 29], rule=masks.Causal()),
    "strided": masks.Causal() & masks.Strided(4),
    "nothing early": masks.Causal() & ~masks.Window(3, 0),
}
STEPS = {"at once": [N], "pieces": [17, 9, 14], "token by token": [30] + [1] * 10}


def tensors():
    torch.manual_seed(0)
    return [torch.randn(2, heads, N, 8, dtype=torch.float64) for heads in (4, 2, 2)]


def compared(rank, stripe_size):
    """The largest difference to the full run, by mask, steps and mechanism; and the share of the bytes held."""
    cp, found = ContextParallel(), {}
    query, key, value = tensors()
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    made = {
        "plain": mechanisms.Softmax(),
        "sinks and alibi": mechanisms.Softmax(bias=positions.ALiBi(4), sink_logit=sink, softcap=4.0),
    }
    for name, mask in MASKS.items():
        for kind, mechanism in made.items():
            want = mechanism(query, key, mask=mask).matmul(value)
            for how, steps in STEPS.items():
                cache = ShardedCache(cp, stripe_size)
                with torch.no_grad():
                    cuts = zip(*(x.split(steps, 2) for x in (query, key, value)), strict=True)
                    parts = [cache.attend(mechanism, *cut, mask=mask) for cut in cuts]
                found[name, kind, how] = float((torch.cat(parts, 2) - want).abs().max())
    return found, cache.key.shape[2]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "stripe_size"), [(2, 4), *(pytest.param(4, size, marks=pytest.mark.slow) for size in (1, 128))]
)
def test_prefill_and_decode_are_the_full_run(ranks, stripe_size):
    held = []
    for found in on_ranks(ranks, compared, stripe_size):
        assert isinstance(found, tuple), found
        assert {case: error for case, error in found[0].items() if not error < 1e-12} == {}
        assert len(found[0]) == len(MASKS) * 2 * len(STEPS)
        held.append(found[1])
    assert sum(held) == N
    assert max(held) == (N if stripe_size == 128 else N // ranks)  # of a short text one rank holds all


def decoded(rank):
    """A decoder's tokens, greedily, from a prompt in pieces; and what forks, crops and reorders give."""
    cp = ContextParallel()
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=50, max_len=64, embed_dim=32, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=40
    )
    model = Decoder(config).double().eval()
    prompt = torch.randint(50, (2, 20))
    found = []
    with torch.no_grad():
        for cache in (model.new_cache(), sharded_cache(model, cp, stripe_size=3)):
            for piece in prompt.split(8, 1):
                logits = model(piece, cache=cache)
            tokens, other = [logits[:, -1].argmax(-1)], cache.fork()
            for _ in range(10):
                tokens.append(model(tokens[-1][:, None], cache=cache)[:, -1].argmax(-1))
            cache.crop(25)
            cache.reorder([1, 0, 1])
            again = model(torch.tensor([[3], [4], [5]]), cache=cache)
            forked = model(torch.tensor([[3], [4]]), cache=other)
            found.append((torch.stack(tokens), again, forked))
    (tokens, *want), (sharded, *got) = found
    return torch.equal(tokens, sharded), max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))


@pytest.mark.slow
def test_a_decoder_over_ranks():
    for found in on_ranks(2, decoded):
        assert isinstance(found, tuple), found
        same, error = found
        assert same
        assert error < 1e-12


def refused(rank):
    cp, told = ContextParallel(), []
    query, key, value = tensors()
    softmax, linear = mechanisms.Softmax(), mechanisms.Linear()
    cache = ShardedCache(cp)
    for call in (
        lambda: cache.attend(softmax, query.clone().requires_grad_(), key, value, mask=masks.Causal()),
        lambda: cache.attend(linear, query, key, value, mask=masks.Causal()),
        lambda: cache.attend(mechanisms.TopK(DotProducts(), 50), query, key, value, mask=masks.Causal()),
        lambda: cache.attend(softmax, query, key, value, mask=masks.Causal(), dropout_p=0.1),
        cache.state,
        lambda: sharded_cache(torch.nn.Linear(2, 2), cp),
        lambda: cache.attend(softmax, query, key, value, mask=masks.sliding_window(2 + rank)),
    ):
        try:
            told.append(str(call()))
        except (sc.UnsupportedError, RuntimeError) as error:
            told.append(str(error))
    return told, cache.length


@pytest.mark.slow
def test_wrong_arguments_are_refused():
    for found in on_ranks(2, refused):
        assert isinstance(found, tuple), found
        told, length = found
        assert length == 0
        starts = (
            "supports only decoding",
            "a Linear selects from all keys or sums them",
            "a TopK selects",
            "supports only decoding",
            "has only a part",
            "no new_cache",
            "must make the same plan",
        )
        for message, part in zip(told, starts, strict=True):
            assert part in message, message
