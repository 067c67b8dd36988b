"""Linformer: its definition, the limits in which it is exact, and padding that changes nothing."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.masks import Causal, Mask, Padding
from saccade.mechanisms import Linformer
from saccade.nn import MultiHeadAttention

F64 = torch.float64


def _inputs(q_len: int = 12, kv_len: int = 12, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, q_len, 4), (2, groups, kv_len, 4), (2, groups, kv_len, 3))
    q, k, v = (torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)
    return q, k, v


def _linformer(share: str, groups: int, kv_len: int = 12) -> Linformer:
    module = Linformer(kv_len, 5, share=share, num_kv_heads=groups if share == "none" else None).double()
    for projection in module.parameters():
        torch.nn.init.normal_(projection)
    return module


def _projections(module: Linformer, groups: int) -> tuple[Tensor, Tensor]:
    other = module.key_projection if module.value_projection is None else module.value_projection
    return tuple(x.expand(groups, -1, -1).repeat_interleave(4 // groups, 0) for x in (module.key_projection, other))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(12, 12), (5, 12), (12, 7)], ids=str)
@pytest.mark.parametrize("share", ["none", "heads", "key_value"])
def test_products_and_gradients_are_those_of_the_definition(share: str, lengths: tuple[int, int], groups: int) -> None:
    q, k, v = _inputs(*lengths, groups)
    module = _linformer(share, groups)
    of_key, of_value = (x[..., : lengths[1]] for x in _projections(module, groups))
    pooled = of_key @ k.repeat_interleave(4 // groups, 1)
    slots = (q @ pooled.mT / 2).softmax(-1)
    weights = slots @ of_value
    matrix = module(q, k)
    torch.testing.assert_close(matrix.slots(), slots)
    torch.testing.assert_close(matrix.to_dense(), weights)
    out, expected = matrix @ v, weights @ v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, v), expected)
    x = torch.randn(2, 4, lengths[0], 2, dtype=F64)
    torch.testing.assert_close(matrix.mT @ x, weights.mT @ x)
    given, grad = (q, k, v, *module.parameters()), torch.randn_like(out)
    own, true = (torch.autograd.grad(y, given, grad) for y in (out, expected))
    torch.testing.assert_close(own, true)


def test_exact_as_it_starts_with_as_many_slots_as_keys() -> None:
    q, k, v = _inputs()
    module = Linformer(12, 12)
    torch.testing.assert_close(module(q, k) @ v, sc.attention(q, k, v))
    torch.testing.assert_close(module(q, k).projection, torch.eye(12, dtype=F64)[None, None])


def test_exact_as_it_starts_where_neighbours_are_alike() -> None:
    q, k, v = _inputs(12, 6)
    k, v = (x.repeat_interleave(4, 2) for x in (k, v))
    torch.testing.assert_close(Linformer(24, 6)(q, k) @ v, sc.attention(q, k, v))


def test_the_error_falls_with_the_square_of_the_segment() -> None:
    at = torch.linspace(0, 1, 512, dtype=F64)
    q, k, v = (torch.stack([(at * a).sin(), (at * b).cos()], -1)[None, None] for a, b in ((3, 2), (2, 4), (5, 3)))
    exact = sc.attention(q, k, v)
    errors = [(Linformer(512, rank)(q, k) @ v - exact).norm().item() for rank in (2, 4, 8, 16)]
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(3.5 < ratio < 4.5 for ratio in ratios), ratios


def test_means_need_not_be_of_equally_many() -> None:
    projection = Linformer(5, 2).key_projection[0].detach()
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0, 0], [0, 0, 0, 0.5, 0.5]])
    torch.testing.assert_close(projection, expected)


@pytest.mark.parametrize("share", ["none", "heads", "key_value"])
def test_padding_changes_nothing_whatever_it_holds(share: str) -> None:
    q, k, v = (x.detach() for x in _inputs())
    module = _linformer(share, 2)
    alone = module(q[1:, :, :7], k[1:, :, :7])
    k[1, :, 7:], v[1, :, 7:] = math.nan, math.inf
    matrix = module(q, k, mask=Padding([12, 7]))
    torch.testing.assert_close((matrix @ v)[1:, :, :7], alone @ v[1:, :, :7])
    torch.testing.assert_close(matrix.to_dense()[1:, :, :7, :7], alone.to_dense())
    assert not matrix.to_dense()[1, :, :, 7:].any()
    positions = torch.tensor([list(range(12)), [*range(7), *[-1] * 5]])
    q[1, :, 7:] = math.nan
    placed = module(q, k, q_positions=positions, kv_positions=positions)
    torch.testing.assert_close((placed @ v)[1:, :, :7], alone @ v[1:, :, :7])
    assert not (placed @ v)[1, :, 7:].any()
    assert not placed.to_dense()[1, :, 7:].any()
    x = torch.randn(2, 4, 12, 2, dtype=F64)
    torch.testing.assert_close((placed.mT @ x)[1:, :, :7], alone.mT @ x[1:, :, :7])


def test_no_query_attends_to_slots_without_keys() -> None:
    q, k, v = _inputs()
    module = Linformer(12, 6)
    matrix = module(q, k, mask=Padding([12, 5]))
    assert not matrix.slots()[1, :, :, 3:].any()
    torch.testing.assert_close(matrix.slots().sum(-1), torch.ones(2, 4, 12, dtype=F64))
    nobody = module(q, k, mask=Padding([12, 0])) @ v
    assert not nobody[1].any()
    torch.testing.assert_close(matrix[1, 2, 3], matrix.to_dense()[1, 2, 3])


def test_columns_are_read_at_positions() -> None:
    q, k, v = (x.detach() for x in _inputs())
    module = _linformer("heads", 2)
    whole = module(q, k) @ v
    order = torch.randperm(12)
    torch.testing.assert_close(module(q, k[:, :, order], kv_positions=order) @ v[:, :, order], whole)


@pytest.mark.parametrize("entries", [1, 40])
@pytest.mark.parametrize("share", ["none", "heads"])
def test_blocks_of_any_size(share: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = _inputs()
    matrix = _linformer(share, 2)(q, k, mask=Padding([12, 7]))
    whole = matrix.to_dense()
    monkeypatch.setattr("saccade.mechanisms.linear_time._ENTRIES", entries)
    torch.testing.assert_close(matrix.to_dense(), whole)


def test_it_is_trained_in_a_layer() -> None:
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, mechanism=Linformer(12, 4, share="none", num_kv_heads=2))
    layer(torch.randn(2, 12, 16)).sum().backward()
    assert layer.mechanism.key_projection.grad.any()
    assert layer.mechanism.value_projection.grad.any()
    matrix, value = layer.matrix(torch.randn(2, 12, 16)), torch.randn(2, 2, 12, 3)
    dropped = matrix.matmul(value, dropout_p=0.5, seed=1)
    torch.testing.assert_close(dropped, sc.Matrix.matmul(matrix, value, dropout_p=0.5, seed=1))
    assert not torch.allclose(dropped, matrix @ value)


@pytest.mark.parametrize("mask", [Causal(), masks.Window(1, 1), masks.Documents([4])], ids=str)
def test_masks_that_cannot_be_had(mask: Mask) -> None:
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(sc.UnsupportedError, match="a slot mixes keys of the whole sequence"):
        Linformer(4, 2)(x, x, mask=mask)


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(1, 2, 4, 2)
    with pytest.raises(ValueError, match="Linformer: rank must be at most kv_len 4; got 5"):
        Linformer(4, 5)
    with pytest.raises(TypeError, match=r"Linformer: kv_len must be an int of at least 1; got 4\.0"):
        Linformer(4.0, 5)
    with pytest.raises(ValueError, match="Linformer: share must be one of 'none', 'heads', 'key_value'; got 'all'"):
        Linformer(4, 2, share="all")
    with pytest.raises(ValueError, match="num_kv_heads must be given if and only if share is 'none'; got None"):
        Linformer(4, 2, share="none")
    with pytest.raises(ValueError, match="num_kv_heads must be given if and only if share is 'none'; got 2"):
        Linformer(4, 2, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"Linformer: key heads must be 3 \(num_kv_heads\); got 2"):
        Linformer(4, 2, share="none", num_kv_heads=3)(x, x)
    with pytest.raises(ValueError, match=r"Linformer: keys must be at positions below 3.*got a key at position 3"):
        Linformer(3, 2)(x, x)
    assert not Linformer(4, 2)(x, x).is_stochastic
    with pytest.raises(sc.UnsupportedError, match="is_stochastic is False"):
        Linformer(4, 2)(x, x).entropy()
    assert Linformer(4, 2, share="key_value").value_projection is None
