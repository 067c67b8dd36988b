"""Short convolutions: torch's, packed, padded, split, in layers with every kind of cache."""

import pytest
import torch
from tests.caches.cache_kinds import KINDS
from torch.nn import functional as F

from saccade import masks
from saccade.caches import Cache, CrossCache, KVCache, SinkWindowCache, load_cache, padded_positions, save_cache
from saccade.mechanisms import SSD, Delta, GatedLinear, ShortConvolution
from saccade.models import Decoder, DecoderConfig
from saccade.nn import DecoderLayer, FeedForward, MultiHeadAttention, QKNorm, Recurrence
from saccade.positions import Rotary
from saccade.support.errors import UnsupportedError

CAUSAL = masks.Causal()


def _x(batch=2, channels=3, length=9):
    return torch.randn(batch, channels, length, 1, dtype=torch.float64)


def _by_torch(convolution, x):
    """torch's grouped convolution, of inputs with zeros before them."""
    weight = convolution.weight.flip(1)[:, None]
    return F.conv1d(F.pad(x[..., 0], (convolution.width - 1, 0)), weight, groups=convolution.channels)[..., None]


@pytest.mark.parametrize("width", [1, 2, 4, 12])
def test_it_is_torchs_convolution(width):
    convolution, x = ShortConvolution(3, width).double(), _x().requires_grad_()
    matrix = convolution(x, x)
    expected = _by_torch(convolution, x)
    torch.testing.assert_close(matrix @ x, expected)
    torch.testing.assert_close(matrix.to_dense() @ x, expected)
    torch.testing.assert_close(matrix.mT @ x, matrix.to_dense().mT @ x)
    torch.testing.assert_close(torch.stack([matrix[1, 2, row] for row in range(9)]), matrix.to_dense()[1, 2])
    for own, other in zip(
        torch.autograd.grad((matrix @ x).square().sum(), (x, convolution.weight), retain_graph=True),
        torch.autograd.grad(expected.square().sum(), (x, convolution.weight)),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("order", [range(9), [8, 3, 1, 0, 2, 7, 5, 6, 4]], ids=["in order", "mixed"])
def test_distances_are_those_of_positions(order):
    convolution, x = ShortConvolution(3, 4).double(), _x()
    order = torch.tensor(list(order))
    expected = _by_torch(convolution, x)
    out = convolution(x[:, :, order], x[:, :, order], q_positions=order, kv_positions=order) @ x[:, :, order]
    torch.testing.assert_close(out, expected[:, :, order])
    gaps = convolution(x, x, q_positions=3 * torch.arange(9), kv_positions=3 * torch.arange(9)) @ x
    torch.testing.assert_close(
        gaps, x * convolution.weight[:, :1, None] + F.pad(x, (0, 0, 1, 0))[:, :, :9] * convolution.weight[:, 3:, None]
    )


def test_documents_begin_anew_and_padding_is_not_read():
    convolution, x = ShortConvolution(3, 4).double(), _x()
    packed = convolution(x, x, mask=masks.Documents([4, 5], rule=CAUSAL)) @ x
    alone = torch.cat([_by_torch(convolution, part) for part in x.split([4, 5], 2)], 2)
    torch.testing.assert_close(packed, alone)
    spoiled = x.clone()
    spoiled[0, :, :3] = torch.nan
    padded = convolution(spoiled, spoiled, mask=masks.Padding([6, 9], side="left", padded_len=9)) @ spoiled
    torch.testing.assert_close(padded[:1, :, 3:], _by_torch(convolution, x[:1, :, 3:]))
    torch.testing.assert_close(padded[1:], _by_torch(convolution, x[1:]))


def test_wrong_inputs_are_refused():
    convolution, x = ShortConvolution(3, 4).double(), _x()
    with pytest.raises(ValueError, match="heads must be equal to the 3 channels"):
        convolution(x[:, :2], x[:, :2])
    with pytest.raises(UnsupportedError, match="the mask differs between heads"):
        convolution(x, x, mask=torch.rand(2, 3, 9, 9) < 0.5)
    with pytest.raises(ValueError, match="width must be an int of at least 1"):
        ShortConvolution(3, 0)


def _mha(**options):
    torch.manual_seed(0)
    options = {"mask": CAUSAL, "rotary": Rotary(4), "short_convolution": 3} | options
    return MultiHeadAttention(16, 4, num_kv_heads=2, **options).double().eval()


LAYERS = {
    "softmax": _mha,
    "norms, gate, window": lambda: _mha(qk_norm=QKNorm(), output_gate=True, mask=masks.sliding_window(2)),
    "without positions": lambda: _mha(rotary=None),
    "delta": lambda: Recurrence(16, 4, Delta(), decay="token", short_convolution=4).double().eval(),
    "decays": lambda: Recurrence(16, 4, GatedLinear(), decay="channel", short_convolution=2).double().eval(),
    "ssd": lambda: Recurrence(16, 4, SSD(4), short_convolution=4).double().eval(),
}
EACH = pytest.mark.parametrize("name", LAYERS)


def test_a_layer_is_its_definition():
    mha = _mha(rotary=None)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    parts = [part(x) for part in (mha.query_projection, mha.key_projection, mha.value_projection)]
    whole = F.silu(_by_torch(mha.convolution.mechanism, torch.cat(parts, 2).mT[..., None])[..., 0].mT)
    plain = _mha(rotary=None, short_convolution=None)
    plain.load_state_dict({k: v for k, v in mha.state_dict().items() if not k.startswith("convolution")})
    q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in whole.split([16, 8, 8], 2))
    out = (plain.mechanism(q, k, mask=CAUSAL) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mha(x), mha.output_projection(out))


@EACH
def test_packed_is_alone(name):
    layer, x = LAYERS[name](), torch.randn(2, 12, 16, dtype=torch.float64)
    packed = layer(x, mask=masks.Documents([5, 3, 4]))
    torch.testing.assert_close(packed, torch.cat([layer(part) for part in x.split([5, 3, 4], 1)], 1))


@EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_any_split_of_a_ragged_batch_is_each_item_alone(name, side):
    layer, x = LAYERS[name](), torch.randn(3, 15, 16, dtype=torch.float64)
    lengths = [7, 2, 4]
    cache, positions = layer.new_cache(), padded_positions(lengths, side=side)
    parts = [layer(x[:, :7], cache=cache, positions=positions)]
    parts += [layer(part, cache=cache) for part in x[:, 7:].split([1, 3, 1, 1, 2], 1)]
    out = torch.cat(parts, 1)
    for item in range(3):
        real = torch.cat([(positions[item] >= 0).nonzero()[:, 0], torch.arange(7, 15)])
        torch.testing.assert_close(out[item, real], layer(x[item : item + 1, real])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_of_keys_has_the_convolution_beside_it(kind):
    """The layer's output is that of the cache alone, on tokens that were convolved before."""
    mha = _mha(rotary=None) if kind == "turned" else _mha()
    x, make = torch.randn(1, 20, 16, dtype=torch.float64), KINDS[kind]
    cache, alone = Cache([make(), mha.convolution.new_cache()]), make()
    heads = mha._heads(x, None, None, None, *[((None,) * 3)], None)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 16), (16, 17), (17, 20)):
        out = mha(x[:, start:stop], cache=cache)
        q, k, v = (part[:, :, start:stop] for part in heads[:3])
        expected = alone.attend(mha.mechanism, q, k, v, mask=CAUSAL)
        torch.testing.assert_close(out, mha.output_projection(expected.transpose(1, 2).flatten(2)))


@EACH
def test_forks_files_and_reordered_caches_go_on_as_if_alone(name, tmp_path):
    layer, x = LAYERS[name](), torch.randn(2, 12, 16, dtype=torch.float64)
    cache = layer.new_cache()
    layer(x[:, :7], cache=cache)
    fork = cache.fork()
    layer(x[:, 9:], cache=fork)
    save_cache(cache, tmp_path / "cache")
    again, other = load_cache(tmp_path / "cache"), cache.fork()
    expected = layer(x)[:, 7:]
    torch.testing.assert_close(layer(x[:, 7:], cache=cache), expected)
    torch.testing.assert_close(layer(x[:, 7:], cache=again), expected)
    other.reorder([1, 1, 0])
    rows = torch.tensor([1, 1, 0])
    torch.testing.assert_close(layer(x[rows, 7:], cache=other), expected[rows])


@EACH
def test_a_call_that_fails_changes_no_cache(name, monkeypatch):
    layer, x = LAYERS[name](), torch.randn(1, 9, 16, dtype=torch.float64)
    cache = layer.new_cache()
    layer(x[:, :4], cache=cache)

    def interrupted(self, call):
        raise KeyboardInterrupt("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(type(cache[0]), "advance", interrupted)
        with pytest.raises(KeyboardInterrupt, match="stopped"):
            layer(x[:, 4:6], cache=cache)
    assert [part.length for part in cache.flat] == [4, 4]
    torch.testing.assert_close(layer(x[:, 4:], cache=cache), layer(x)[:, 4:])


def test_a_crop_that_the_convolution_cannot_undo_is_refused_for_both():
    layer, x = _mha(), torch.randn(1, 9, 16, dtype=torch.float64)
    cache = layer.new_cache()
    layer(x, cache=cache)
    with pytest.raises(UnsupportedError, match="it has evicted tokens"):
        cache.crop(4)
    assert [part.length for part in cache.flat] == [9, 9]
    cache.crop(0)
    torch.testing.assert_close(layer(x, cache=cache), layer(x))


def test_nested_items_are_each_alone():
    mha, items = _mha(), [torch.randn(length, 16, dtype=torch.float64) for length in (3, 5)]
    out = mha(torch.nested.nested_tensor(items, layout=torch.jagged))
    for own, item in zip(out.unbind(), items, strict=True):
        torch.testing.assert_close(own, mha(item[None])[0])


def test_in_decoder_layers_and_models():
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    layer = DecoderLayer(_mha(), FeedForward(16, 8), cross_attention=MultiHeadAttention(16, 2)).double()
    cache, context = layer.new_cache(), torch.randn(1, 4, 16, dtype=torch.float64)
    assert [type(part) for part in cache.flat] == [KVCache, SinkWindowCache, CrossCache]
    parts = [layer(part, context, cache=cache) for part in x.split([3, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, context))
    config = DecoderConfig(
        vocab_size=20, max_len=30, embed_dim=16, num_heads=2, num_layers=2, feed_forward_dim=8, short_convolution=4
    )
    model, tokens = Decoder(config).double().eval(), torch.randint(20, (2, 11))
    caches = model.new_cache()
    logits = [model(part, cache=caches) for part in tokens.split([6, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens))


def test_layers_and_caches_that_do_not_fit_are_refused():
    mha, x = _mha(), torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"cache must be a Cache of two layer caches(.|\n)*new_cache\(\)"):
        mha(x, cache=KVCache())
    with pytest.raises(ValueError, match="key must be None in a layer with a short convolution"):
        mha(x, x + 1)
    with pytest.raises(ValueError, match="key must be None in a layer with a short convolution"):
        mha.matrix(x, x + 1)
