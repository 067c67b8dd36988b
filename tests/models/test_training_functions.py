"""Operations that are one autograd function in ordinary training: equal to torch's operations in every mode."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from saccade.models import Decoder, DecoderConfig, next_token_loss
from saccade.nn import FeedForward, feed_forward, norms
from saccade.positions import Rotary, rotary

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, as it begins jvp


class Case(NamedTuple):
    """A function of float64 tensors, their shapes, and the module that chooses between the two forms."""

    function: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    module: object


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = norms.RMSNorm(x.shape[-1], 1e-3, device=x.device, dtype=x.dtype)
    return torch.func.functional_call(norm, {"weight": weight}, x)


_LAYER = FeedForward(4, 6, activation="silu", gated=True, projection_bias=False)


def _gates(x: Tensor, *weights: Tensor) -> Tensor:
    names = ("gate.weight", "expand.weight", "contract.weight")
    return torch.func.functional_call(_LAYER, dict(zip(names, weights, strict=True)), x)


def _loss(x: Tensor, weight: Tensor) -> Tensor:
    targets = torch.tensor([[3, 0, -100, 8, 2, 7], [-100, 5, 5, 1, 4, 0]])
    return next_token_loss.mean_cross_entropy(lambda rows: rows @ weight.mT, x, targets, 5, 9, weight)


def _rotation(**options: object) -> Callable[[Tensor], Tensor]:
    return lambda x: Rotary(x.shape[3], **options)(x, torch.tensor([0, 4, 2]))


CASES = {
    "norm": Case(_norm, [(2, 3, 5), (5,)], norms),
    "gates": Case(_gates, [(2, 3, 4), (6, 4), (6, 4), (4, 6)], feed_forward),
    "loss": Case(_loss, [(2, 6, 4), (9, 4)], next_token_loss),
    "rotary": Case(_rotation(), [(1, 2, 3, 6)], rotary),
    "rotary, interleaved": Case(_rotation(layout="interleaved"), [(1, 2, 3, 6)], rotary),
    "rotary, partial": Case(_rotation(rotary_dim=4), [(1, 2, 3, 7)], rotary),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def _inputs(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in case.shapes]


def _run(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    out = case.function(*inputs)
    return [out, *torch.autograd.grad(out.sin().sum(), [x for x in inputs if x.requires_grad])]


def _functions(out: Tensor) -> set[str]:
    """Return the names of our autograd functions in the graph of a tensor."""
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            nodes += [other for other, _ in node.next_functions]
    ours = ("_RootMeanSquare", "_GatedSilu", "_Rotation", "LinearCrossEntropy")
    return {name for name in names if name.startswith(ours)}


@pytest.fixture
def plainly(case: Case, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the results of torch's operations."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(case.module, "is_eager_training", lambda *tensors: False)
            assert not _functions(case.function(*inputs))
            return _run(case, inputs)

    return run


def test_results_and_gradients_are_equal(case, plainly):
    inputs = _inputs(case)
    assert _functions(case.function(*inputs))
    torch.testing.assert_close(_run(case, inputs), plainly(inputs), atol=1e-12, rtol=1e-10)


def test_single_precision_agrees_with_double(case):
    inputs = _inputs(case, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    torch.testing.assert_close([x.double() for x in _run(case, inputs)], _run(case, wide), atol=1e-5, rtol=1e-4)


def test_gradients_of_some_inputs_alone(case, plainly):
    for frozen in range(len(case.shapes) if len(case.shapes) > 1 else 0):
        inputs = _inputs(case)
        inputs[frozen].requires_grad_(False)
        torch.testing.assert_close(_run(case, inputs), plainly(inputs), atol=1e-12, rtol=1e-10)


@pytest.mark.ci
def test_first_and_second_derivatives(case):
    inputs = _inputs(case)
    assert torch.autograd.gradcheck(case.function, inputs)
    assert torch.autograd.gradgradcheck(case.function, inputs)


def test_an_input_may_be_computed_from_another(case):
    if len(case.shapes) == 1:
        assert case.module is rotary
    first, *others = _inputs(case)

    def gradient(x: Tensor) -> Tensor:
        scaled = [other * x.mean() for other in others]
        out = case.function(x * 2, *scaled)
        (found,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return found

    assert torch.autograd.gradcheck(gradient, first)


def test_batched_gradients(case):
    inputs = _inputs(case)
    whole = torch.autograd.functional.jacobian(case.function, tuple(inputs), vectorize=True)
    torch.testing.assert_close(whole, torch.autograd.functional.jacobian(case.function, tuple(inputs)))


def test_transforms_of_torch_func(case):
    inputs = _inputs(case)
    expected = _run(case, inputs)[1]
    torch.testing.assert_close(torch.func.grad(lambda *xs: case.function(*xs).sin().sum())(*inputs), expected)
    first, *others = (x.detach() for x in inputs)
    both = torch.func.vmap(lambda x: case.function(x, *others))(torch.stack([first, 2 * first]))
    torch.testing.assert_close(both[1], case.function(2 * first, *others))


def test_forward_mode_derivatives(case):
    first, *others = _inputs(case)
    with forward_ad.dual_level():
        out = case.function(forward_ad.make_dual(first, torch.ones_like(first)), *others)
        along = forward_ad.unpack_dual(out).tangent
    whole = torch.autograd.functional.jacobian(lambda x: case.function(x, *others), first)
    torch.testing.assert_close(along, whole.flatten(out.dim()).sum(-1))


def test_checkpoints(case, plainly):
    inputs = _inputs(case)
    again = case._replace(function=lambda *xs: checkpoint(case.function, *xs, use_reentrant=False))
    torch.testing.assert_close(_run(again, inputs), plainly(inputs), atol=1e-12, rtol=1e-10)


def test_autocast_sees_the_operations(case):
    with torch.autocast("cpu", torch.bfloat16):
        assert not _functions(case.function(*_inputs(case, torch.float32)))


def test_fake_tensors_take_the_same_way(case):
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in _inputs(case)]
        out = case.function(*inputs)
        assert _functions(out)
        assert [x.shape for x in torch.autograd.grad(out.sum(), inputs)] == [x.shape for x in inputs]


def test_a_second_backward_pass_through_the_same_graph(case):
    inputs = _inputs(case)
    out = case.function(*inputs).sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, inputs), first)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_compiled(case, plainly):
    inputs = _inputs(case, torch.float32)
    compiled = case._replace(function=torch.compile(case.function, backend="aot_eager"))
    torch.testing.assert_close(_run(compiled, inputs), plainly(inputs))


def test_nan_in_a_row_without_a_target_stays_there():
    hidden, weight = _inputs(CASES["loss"])
    with torch.no_grad():
        hidden[0, 2] = torch.nan
    out = _loss(hidden, weight)
    grads = torch.autograd.grad(out, [hidden, weight])
    assert out.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0, 2].any()


def test_a_loss_without_targets_is_nan():
    hidden, weight = _inputs(CASES["loss"])
    targets = torch.full((2, 6), -100)
    assert next_token_loss.mean_cross_entropy(lambda x: x @ weight.mT, hidden, targets, 5, 9, weight).isnan()


def _softcapped(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


@pytest.mark.parametrize("change", ["none", "hook", "adapter", "bias", "scale", "softcap", "subclass", "tied"])
def test_the_loss_is_one_function_only_if_logits_are_a_product(change):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "max_len": 8, "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feed_forward_dim": 8}
    options = {"scale": {"logit_scale": 0.5}, "softcap": {"logit_softcap": 3.0}}.get(change, {})
    kind = Decoder
    if change == "subclass":
        kind = type("Capped", (Decoder,), {"logits": lambda self, hidden: _softcapped(Decoder.logits(self, hidden))})
    decoder = kind(DecoderConfig(**sizes, tied=change == "tied", **options)).double()
    if change == "hook":
        decoder.head.register_forward_hook(lambda module, inputs, out: _softcapped(out))
    elif change == "adapter":
        decoder.head = nn.Sequential(decoder.head, nn.Tanh())
    elif change == "bias":
        decoder.head = nn.Linear(8, 30, dtype=torch.float64)
    tokens = torch.randint(30, (1, 8))
    loss = decoder.loss(tokens, chunk_size=3)
    assert ("LinearCrossEntropyBackward" in _functions(loss)) == (change in ("none", "tied"))
    expected = nn.functional.cross_entropy(decoder(tokens)[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(loss, expected)
    weights = list(decoder.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights))
