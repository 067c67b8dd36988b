"""Mixtures of experts: equal to their definition, and the same whether values can be read or not."""

import pytest
import torch
from torch.func import functional_call, vmap

import saccade as sc
from saccade.models import Decoder, DecoderConfig, LayerPattern
from saccade.nn import MixtureOfExperts

CONFIG = DecoderConfig(
    vocab_size=20,
    max_len=32,
    embed_dim=16,
    num_heads=2,
    num_layers=2,
    feed_forward_dim=24,
    num_experts=4,
    num_chosen_experts=2,
    expert_dim=12,
    layers=(LayerPattern(uses_experts=False), LayerPattern()),
)


def defined(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The definition, token by token and expert by expert."""
    rows = []
    for token in x.flatten(0, -2):
        scores = layer.router.weight @ token
        total = layer.shared(token)
        for number in scores.argsort(descending=True)[: layer.num_chosen]:
            total = total + layer.experts[number](token / (1 + torch.exp(-scores[number])))
        rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("chosen", [1, 3])
def test_output_and_gradients_are_those_of_the_definition(chosen: int) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 12, 5, num_chosen=chosen).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    for run in (layer, lambda x: vmap(layer)(x[None])[0]):
        out, expected = run(x), defined(layer, x)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
        probe = torch.randn_like(out)
        leaves = [x, *layer.parameters()]
        ours, theirs = (torch.autograd.grad(y, leaves, probe, materialize_grads=True) for y in (out, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


@torch.no_grad()
def test_exported_and_compiled_layers_are_equal() -> None:
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(8, 12, 4, num_chosen=2), torch.randn(2, 7, 8)
    exported = torch.export.export(layer, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), layer(x))
    torch.testing.assert_close(functional_call(layer, dict(layer.named_parameters()), (x,)), layer(x))


def test_costs_count_the_chosen_experts_only() -> None:
    two, three = (
        sc.cost(DecoderConfig(**{**vars(CONFIG), "num_chosen_experts": count}), 30).forward.flops for count in (2, 3)
    )
    assert three - two == 30 * 6 * 16 * 12


def test_small_initial_weights_reach_every_expert() -> None:
    experts = Decoder(CONFIG).stack.layers[1].feed_forward.experts
    assert all(each.contract.weight.std() < each.expand.weight.std() < 0.03 for each in experts)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"num_experts": None, "expert_dim": None}, "num_experts must be an int if num_chosen_experts"),
        ({"gated": False}, "num_experts must be None unless gated is True"),
        ({"num_experts": 0}, "num_experts must be"),
        ({"num_chosen_experts": 5}, "num_chosen_experts must be at most num_experts 4; got 5"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        DecoderConfig(**{**vars(CONFIG), **options})


def test_more_chosen_experts_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_chosen must be"):
        MixtureOfExperts(8, 12, 2, num_chosen=3)


def test_tokens_of_another_width_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        MixtureOfExperts(8, 12, 2)(torch.randn(2, 7, 4))
