"""Dropout under ``vmap``: which samples drop the same weights."""

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from torch import Tensor
from torch.func import grad, jacrev, vmap

import saccade as sc
from saccade import masks
from saccade.mechanisms import Performer
from saccade.nn import MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, as it begins jvp

ALIKE = torch.randn(1, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).expand(3, -1, -1, -1, -1)
IMPLS = pytest.mark.parametrize("impl", ["auto", "tiled", NATIVE])


def attended(x: Tensor, impl: str = "auto") -> Tensor:
    return sc.attention(x, x, x, masks.Causal(), dropout_p=0.5, impl=impl)


@IMPLS
def test_different_samples_drop_different_weights(impl):
    out = vmap(lambda x: attended(x, impl), randomness="different")(ALIKE)
    assert len({each.sum().item() for sample in out for each in sample}) == 6


@IMPLS
def test_the_same_weights_are_dropped_in_every_sample(impl):
    out = vmap(lambda x: attended(x, impl), randomness="same")(ALIKE)
    assert out[0].equal(out[1])
    assert out[0].equal(out[2])
    assert not out[0, 0].equal(out[0, 1])  # of items of a batch, others


def test_randomness_is_an_error_as_in_torch():
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(attended)(ALIKE)


def test_samples_that_share_all_inputs_differ_all_the_same():
    out = vmap(lambda x: attended(ALIKE[0]) + 0 * x[0, 0, 0, 0], randomness="different")(ALIKE)
    assert not out[0].equal(out[1])


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_seed_drops_the_same_weights_under_vmap_as_alone(randomness):
    samples = torch.randn(3, 2, 4, 9, 8)

    def run(x: Tensor) -> Tensor:
        return sc.AttentionMatrix(x, x, masks.Causal()).matmul(x, dropout_p=0.5, seed=3)

    torch.testing.assert_close(vmap(run, randomness=randomness)(samples), torch.stack([run(x) for x in samples]))


@pytest.mark.parametrize(
    "outer, inner, count", [("same", "same", 1), ("same", "different", 3), ("different", "same", 2)]
)
def test_samples_of_samples(outer, inner, count):
    samples = ALIKE[:1, None].expand(2, 3, -1, -1, -1, -1)
    out = vmap(vmap(attended, randomness=inner), randomness=outer)(samples)
    assert len({each.sum().item() for each in out.flatten(0, 1)}) == count


@IMPLS
def test_gradients_drop_what_the_product_dropped(impl):
    def run(x: Tensor) -> Tensor:
        return sc.AttentionMatrix(x, x, impl=impl).matmul(x, dropout_p=0.5, seed=3).sum((0, 2))

    x = ALIKE[0, :, :, :3].float()
    whole = jacrev(run)(x)
    for head in range(4):
        for place in range(8):
            one = grad(lambda y, at=(head, place): run(y)[at])(x)
            torch.testing.assert_close(whole[head, place], one)


def test_different_samples_have_gradients_of_their_own():
    def squared(x: Tensor) -> Tensor:
        return attended(x).square().sum()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        found, value = torch.func.grad_and_value(squared)(x)
        return found, value

    found, value = vmap(both, randomness="different")(ALIKE)
    assert len(set(value.tolist())) == 3
    # Attention times t is of third degree in t, and its square of sixth where the weights do not move.
    assert not found[0].equal(found[1])


def test_a_layer_drops_different_weights():
    layer = MultiHeadAttention(8, 2, dropout_p=0.5)
    x = torch.randn(1, 1, 6, 8).expand(3, -1, -1, -1)
    out = vmap(layer, randomness="different")(x)
    assert not out[0].equal(out[1])
    same = vmap(layer, randomness="same")(x)
    assert same[0].equal(same[1])


def test_matrices_that_draw_once_refuse_different_samples():
    performer, x = Performer(8), ALIKE[0]
    with pytest.raises(sc.UnsupportedError, match='randomness="different"'):
        vmap(lambda y: performer(y, y).matmul(y, dropout_p=0.5), randomness="different")(ALIKE)
    assert vmap(lambda y: performer(y, y).matmul(x, dropout_p=0.5), randomness="same")(ALIKE).isfinite().all()
