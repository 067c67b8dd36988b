"""Second derivatives through every door, and through transforms and compilers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade as sc
import saccade.integrations.transformers
from saccade import masks
from saccade.engine.kernels import tiled_cost
from saccade.engine.memory_accounting import counted
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, as it begins jvp

X = torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
V = torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(1, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def scalar(x: Tensor, impl: str = "auto", bias: Tensor = BIAS) -> Tensor:
    return sc.attention(x, x * 2, x.sin(), masks.Causal(), bias=bias, impl=impl).cos().sum()


def exact(x: Tensor) -> Tensor:
    return scalar(x, "reference")


HESSIAN = torch.autograd.functional.hessian(exact, X)
TIMES_V = (HESSIAN.reshape(30, 30) @ V.reshape(30)).reshape(X.shape)


def by_hand(x: Tensor, function: Callable[[Tensor], Tensor] = scalar) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad((first * V).sum(), x)[0]


def mixed(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad((grad(scalar)(x) * V).sum(), x)[0]


def compiled(x: Tensor) -> Tensor:
    torch._dynamo.reset()
    return by_hand(x, torch.compile(scalar, backend="eager", fullgraph=True))


PRODUCTS = {
    "torch.autograd": by_hand,
    "torch.func": grad(lambda x: (grad(scalar)(x) * V).sum()),
    "torch.func, then torch.autograd": mixed,
    "forward over reverse": lambda x: jvp(grad(scalar), (x,), (V,))[1],
    "torch.autograd.functional": lambda x: torch.autograd.functional.hvp(scalar, x, V)[1],
    "compiled": compiled,
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_products_with_a_hessian(way):
    torch.testing.assert_close(PRODUCTS[way](X), TIMES_V)


HESSIANS = {
    "torch.autograd.functional": lambda x: torch.autograd.functional.hessian(scalar, x),
    "torch.func.hessian": hessian(scalar),
    "jacrev of jacrev": jacrev(jacrev(scalar)),
    "jacrev of jacrev, one at a time": jacrev(jacrev(scalar), chunk_size=1),
}


@pytest.mark.parametrize("way", HESSIANS)
def test_whole_hessians(way):
    torch.testing.assert_close(HESSIANS[way](X), HESSIAN)


def test_hessian_products_of_samples_side_by_side():
    samples = torch.stack([X, X + 1.0, X.sin()])
    biases = torch.stack([BIAS, BIAS.cos(), -BIAS])

    def product(x: Tensor, bias: Tensor, impl: str) -> tuple[Tensor, ...]:
        return grad(lambda *own: (grad(scalar)(own[0], impl, own[1]) * V).sum(), (0, 1))(x, bias)

    got = vmap(lambda *own: product(*own, "auto"))(samples, biases)
    for number in range(3):
        want = product(samples[number], biases[number], "reference")
        for own, other in zip(got, want, strict=True):
            torch.testing.assert_close(own[number], other)


def test_fourth_derivatives():
    def fourth(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = X.clone().requires_grad_()
        value = function(x)
        for _ in range(3):
            value = (torch.autograd.grad(value, x, create_graph=True)[0] * V).sum()
        return torch.autograd.grad(value, x)[0]

    torch.testing.assert_close(fourth(scalar), fourth(exact))


def third(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return grad(lambda x: (grad(lambda y: (grad(function)(y) * V).sum())(x) * V).sum())


def test_third_derivatives_inside_of_transforms_are_refused_with_a_way_out():
    with pytest.raises(sc.UnsupportedError, match='but no third ones\nHint: impl="reference" has all of them'):
        third(scalar)(X)
    assert third(exact)(X).isfinite().all()


def test_gradients_batched_by_autograd_are_refused_with_a_way_out():
    with pytest.raises(sc.UnsupportedError, match=r"one gradient at a time\nHint: vectorize=False, or torch.func.jac"):
        torch.autograd.functional.jacobian(lambda x: sc.attention(x, x, x), X, vectorize=True)
    with pytest.raises(sc.UnsupportedError, match=r"one gradient at a time\nHint: vectorize=False, or torch.func.jac"):
        torch.autograd.functional.hessian(scalar, X, vectorize=True)


def own_layer() -> tuple[nn.Module, nn.Module]:
    reference = Softmax(impl="reference")
    return tuple(MultiHeadAttention(16, 2, mask=masks.Causal(), mechanism=x).double() for x in (Softmax(), reference))


def replaced() -> tuple[nn.Module, nn.Module]:
    options = {"dropout": 0.0, "batch_first": True, "activation": "gelu", "dtype": torch.float64}
    ours, theirs = (nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(2))
    sc.replace_attention(ours)
    return ours, theirs


def transformers_model(door: Callable[[nn.Module], object]) -> Callable[[], tuple[nn.Module, nn.Module]]:
    def both() -> tuple[nn.Module, nn.Module]:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        sizes |= {"intermediate_size": 32, "vocab_size": 8}
        # "eager" takes the softmax of float64 in float32. Doors change the configuration, so each model has its own.
        configs = [transformers.LlamaConfig(**sizes, attn_implementation="sdpa") for _ in range(2)]
        ours, theirs = (transformers.LlamaModel(config).double() for config in configs)
        door(ours)
        return Embedded(ours), Embedded(theirs)

    return both


class Embedded(nn.Module):
    """A model of transformers that reads vectors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def installed(model: nn.Module) -> None:
    model.set_attn_implementation(sc.integrations.transformers.install())


DOORS = {
    "layer": own_layer,
    "replace_attention, torch": replaced,
    "replace_attention, transformers": transformers_model(sc.replace_attention),
    "install": transformers_model(installed),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_penalty_through_every_door(door):
    ours, theirs = DOORS[door]()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)

    def penalties(model: nn.Module) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):  # of torch, the others have none
            (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], materialize_grads=True)

    for got, want in zip(penalties(ours), penalties(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_an_inner_step_of_training_is_trained_through():
    ours, theirs = own_layer()
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(2, 3, 5, 16, dtype=torch.float64)

    def trained(model: nn.Module) -> dict[str, Tensor]:
        def outer(weights: dict[str, Tensor]) -> Tensor:
            inner = grad(lambda own: functional_call(model, own, (x,)).square().sum())(weights)
            stepped = {name: own - 0.1 * inner[name] for name, own in weights.items()}
            return functional_call(model, stepped, (y,)).square().sum()

        return grad(outer)(dict(model.named_parameters()))

    torch.testing.assert_close(trained(ours), trained(theirs))


@pytest.mark.usefixtures("without_native")
def test_memory_of_second_derivatives_is_that_of_blocks(monkeypatch):
    monkeypatch.setattr(tiled_cost, "_ENTRIES", 1 << 12)

    def held(length: int) -> int:
        x = torch.randn(1, 1, length, 8, requires_grad=True)
        (first,) = torch.autograd.grad(sc.attention(x, x, x, masks.Causal()).square().sum(), x, create_graph=True)
        return counted(lambda: torch.autograd.grad(first.square().sum(), x)).most

    assert held(1024) < 2.5 * held(512)
    assert held(1024) < 2 * 1024 * 1024  # half of one float for each pair


def test_a_gradient_that_is_not_differentiated_keeps_nothing_for_it():
    x = torch.randn(1, 1, 512, 8, requires_grad=True)

    def held(**options: bool) -> int:
        out = sc.attention(x, x, x, masks.Causal())
        return counted(lambda: torch.autograd.grad(out.sum(), x, **options)).left

    assert held() == x.nbytes
