"""The layer of native sparse attention: gates, caches, stacks, recordings and what it refuses."""

import itertools

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.caches import CrossCache
from saccade.mechanisms import NativeSparse
from saccade.nn import DecoderLayer, DecoderStack, FeedForward, MultiHeadAttention, NativeSparseAttention
from saccade.positions import ALiBi, Rotary
from saccade.support.errors import UnsupportedError

N, WIDTH = 23, 16


def _layer(**options: object) -> NativeSparseAttention:
    torch.manual_seed(0)
    given = {"num_kv_heads": 2, "rotary": Rotary(4), "mechanism": NativeSparse(4, 2, 5), **options}
    return NativeSparseAttention(WIDTH, 4, **given).double().eval()


def _tokens() -> Tensor:
    return torch.randn(2, N, WIDTH, dtype=torch.float64)


def test_the_output_is_the_projected_sum_of_gated_branches() -> None:
    layer, x = _layer(rotary=None, projection_bias=True), _tokens()
    q, k, v = (
        project(x).view(2, N, -1, 4).transpose(1, 2)
        for project in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    gates = (x @ layer.branch_projection.weight.T).sigmoid().view(2, N, 4, 3).transpose(1, 2)
    A = NativeSparse(4, 2, 5)(q, k, gates=gates, mask=masks.Causal())
    expected = layer.output_projection((A @ v).transpose(1, 2).reshape(2, N, WIDTH))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.matrix(x).to_dense(), A.to_dense())


def test_gradients_reach_every_parameter() -> None:
    layer = _layer()
    layer(_tokens()).sin().sum().backward()
    assert all(own.grad is not None and own.grad.abs().max() > 0 for own in layer.parameters())


@pytest.mark.parametrize("edges", [[0, 9, 10, 11, 12, 13, 23], [0, 1, 22, 23]])
def test_any_split_with_a_cache_is_the_full_run(edges: list[int]) -> None:
    layer, x = _layer(), _tokens()
    cache = layer.new_cache()
    out = [layer(x[:, i:j], cache=cache) for i, j in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(out, 1), layer(x), atol=1e-10, rtol=1e-10)
    copy = cache.fork()
    copy.crop(9)
    torch.testing.assert_close(layer(x[:, 9:], cache=copy), layer(x)[:, 9:], atol=1e-10, rtol=1e-10)


def test_it_is_recorded_as_one_matrix_and_its_cost_is_known() -> None:
    layers = [_layer(), MultiHeadAttention(WIDTH, 4, mask=masks.Causal()).double()]
    stack = DecoderStack([DecoderLayer(one, FeedForward(WIDTH, 8).double()).double() for one in layers]).eval()
    x = _tokens()
    with torch.no_grad(), sc.record(stack, keep="qk") as recording:
        stack(x)
    expected = layers[0].matrix(stack.layers[0].attention_norm(x))
    torch.testing.assert_close(recording["layers.0.attention"].matrix.to_dense(), expected.to_dense())
    told = sc.cost(stack, N, mask=masks.Causal())
    cache = stack.new_cache()
    stack(x[:1], cache=cache)
    assert told.cache_bytes == cache.nbytes
    pairs = [N // 4, 4 + N % 4, 5, N]  # means, one block and the open one, the window; the other layer reads all
    assert sum(step.flops for step in told.decode.steps if step.kernel) == 4 * 4 * 4 * sum(pairs)


def test_padding_on_the_right_is_each_text_alone() -> None:
    layer, x = _layer(), _tokens()
    out = layer(x, mask=masks.Padding([11, N]))
    torch.testing.assert_close(out[:1, :11], layer(x[:1, :11]))
    torch.testing.assert_close(out[1:], layer(x[1:]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias": ALiBi(4)}, "the branches have different scores"),
        ({"mask": masks.Documents([10, 13])}, "Documents is neither Causal nor padding on the right"),
        ({"positions": [[-1, *range(22)], [*range(23)]]}, "blocks are counted from position 0"),
    ],
    ids=["bias", "documents", "positions"],
)
def test_unsupported_calls_say_why(options: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        _layer()(_tokens(), **options)


def test_wrong_arguments_say_what_is_right() -> None:
    with pytest.raises(TypeError, match="mechanism must be a NativeSparse or None"):
        NativeSparseAttention(WIDTH, 4, mechanism=sc.mechanisms.Softmax())
    with pytest.raises(ValueError, match="cache must be that of a self-attention"):
        _layer()(_tokens(), cache=CrossCache())
    with pytest.raises(TypeError, match="context"):
        _layer()(_tokens(), context=_tokens())
