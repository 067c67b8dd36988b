"""Compilers and transforms of torch.func: what they are asked for works, or is refused in our own words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from torch import Tensor, nn
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import saccade as sc
from saccade import masks
from saccade.mechanisms import Delta, GatedLinear, Linear, Mechanism, Performer
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, as it begins jvp

X = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))
SMALL = X[:1, :, :4, :3].double()


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


FACTS = {
    "padding": lambda batch: masks.Padding([1 + i for i in range(batch)]),
    "padding at the left": lambda batch: masks.Padding([3] * batch, side="left", padded_len=6),
    "documents": lambda batch: masks.Documents([[2, 4]] * batch),
    "both": lambda batch: masks.Documents([[2, 4]] * batch, rule=masks.Causal()) & masks.Padding([5] * batch),
    "bool": lambda batch: torch.ones(batch, 1, 1, 6, dtype=torch.bool),
}


# Compilers take seconds.
@pytest.mark.ci
@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize(
    "is_layer, is_marked",
    [
        pytest.param(False, False, id="function-as it comes"),
        pytest.param(True, True, id="layer-marked", marks=pytest.mark.slow),
        pytest.param(False, True, id="function-marked", marks=pytest.mark.slow),
        pytest.param(True, False, id="layer-as it comes", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_varies_compiles(name: str, is_marked: bool, is_layer: bool) -> None:
    layer = MultiHeadAttention(8, 2, mask=masks.Causal()).requires_grad_(False)

    def run(x: Tensor, mask: Any) -> Tensor:
        return layer(x[:, 0], mask=mask) if is_layer else sc.attention(x, x, x, mask)

    compiled = _compiled(run)
    for batch in (2, 3, 5):
        x, mask = torch.randn(batch, 2, 6, 8), FACTS[name](batch)
        if is_marked:
            torch._dynamo.mark_dynamic(x, 0)
            if isinstance(mask, Tensor):
                torch._dynamo.mark_dynamic(mask, 0)
        torch.testing.assert_close(compiled(x, mask), run(x, mask))


def test_a_mask_for_another_batch_is_refused_in_a_compiled_program() -> None:
    compiled = _compiled(lambda x: sc.attention(x, x, x, masks.Padding([3, 4])))
    torch.testing.assert_close(compiled(X), sc.attention(X, X, X, masks.Padding([3, 4])))
    with pytest.raises(ValueError, match="mask must be for 1 or 3 batch items; got 2"):
        compiled(torch.cat([X, X[:1]]))


def test_an_exported_program_keeps_a_dynamic_batch() -> None:
    model = _Model(masks.Causal() & masks.Padding([5]))
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=9)},))
    x = torch.randn(5, 2, 6, 8)
    torch.testing.assert_close(program.module()(x), model(x))


class _Model(nn.Module):
    def __init__(self, mask: masks.Mask, impl: str = "auto"):
        super().__init__()
        self.mask, self.impl = mask, impl

    def forward(self, x: Tensor) -> Tensor:
        return sc.attention(x, x, x, self.mask, impl=self.impl)


CANNOT_CROSS = {
    "its mask is a function": _Model(masks.Predicate(lambda b, h, q, kv: kv <= q)),
    'impl="reference" cannot be one operation': _Model(masks.Causal(), "reference"),
}


@pytest.mark.parametrize("reason", CANNOT_CROSS)
def test_refused_exports_give_the_reason(reason: str) -> None:
    with pytest.raises(sc.UnsupportedError, match=r"attention: torch\.export cannot run these inputs") as refused:
        torch.export.export(CANNOT_CROSS[reason], (X,), strict=False)
    assert refused.value.reasons[0].startswith(reason)


@pytest.mark.ci
@pytest.mark.parametrize("reason", CANNOT_CROSS)
def test_a_graph_that_may_not_break_says_why_it_would(reason: str) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"attention cannot be one operation: {reason}"):
        _compiled(CANNOT_CROSS[reason])(X)
    torch._dynamo.reset()
    broken = torch.compile(CANNOT_CROSS[reason], backend="eager")
    torch.testing.assert_close(broken(X), CANNOT_CROSS[reason](X))


PLACES = torch.stack([torch.arange(6), torch.arange(6) + 3])
ALLOWED = torch.ones(3, 6, 6, dtype=torch.bool).tril()
HIDDEN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]] = {
    "positions": (
        lambda p: sc.attention(X, X, X, masks.Causal(), q_positions=p, kv_positions=p),
        PLACES,
        "q_positions",
    ),
    "positions of a layer": (
        lambda p: MultiHeadAttention(8, 2)(X[:, 0], positions=p),
        PLACES,
        "positions",
    ),
    "bool tensor": (lambda allowed: sc.attention(X, X, X, allowed), ALLOWED, "tensors of the mask"),
    "dense mask": (lambda allowed: sc.attention(X, X, X, masks.Dense(allowed)), ALLOWED, "tensors of the mask"),
    "bool tensor, reference": (
        lambda allowed: sc.attention(X, X, X, allowed, impl="reference"),
        ALLOWED,
        "tensors of the mask",
    ),
    "a question": (lambda allowed: sc.AttentionMatrix(X, X, allowed).entropy(), ALLOWED, "tensors of the mask"),
    "lengths": (lambda n: sc.attention(X, X, X, masks.Padding(n)), torch.tensor([[3, 4], [5, 6]]), "lengths"),
    "documents": (lambda n: sc.attention(X, X, X, masks.Documents(n)), torch.tensor([[3, 3], [5, 1]]), "lengths"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_vmap_over_what_is_read_is_refused(name: str) -> None:
    function, mapped, what = HIDDEN[name]
    with pytest.raises(sc.UnsupportedError, match="vmap cannot run these inputs") as refused:
        vmap(function, randomness="same")(mapped)
    assert refused.value.reasons == (f"the values of {what} are read before anything is computed, and vmap hides them",)


def test_vmap_over_what_a_function_holds_is_refused() -> None:
    def seen(q: Tensor, ahead: Tensor) -> Tensor:
        return sc.attention(q, X, X, lambda b, h, i, j: j <= i + ahead)

    queries, ahead = torch.stack([X, X]), torch.tensor([0, 1])
    for dims in ((0, 0), (None, 0)):
        with pytest.raises(sc.UnsupportedError, match="it may read a mapped tensor"):
            vmap(seen, in_dims=dims)(queries if dims[0] == 0 else X, ahead)
    together = vmap(lambda q: seen(q, torch.tensor(1)))(queries)
    torch.testing.assert_close(together[1], seen(X, torch.tensor(1)))


def test_rotary_turns_by_mapped_positions() -> None:
    rotary = Rotary(8)
    torch.testing.assert_close(vmap(lambda p: rotary(X, p))(PLACES)[1], rotary(X, PLACES[1]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_taken_forwards(name: str) -> None:
    options = OPTIONS[name]
    for place in range(3):

        def attended(x: Tensor, place: int = place) -> Tensor:
            return sc.attention(*(x if i == place else SMALL for i in range(3)), **options)

        torch.testing.assert_close(jacfwd(attended)(SMALL), jacrev(attended)(SMALL))
    forwards = jvp(lambda q: sc.attention(q, SMALL, SMALL, **options), (SMALL,), (SMALL,))[1]
    assert forwards.shape == SMALL.shape

    def total(q: Tensor) -> Tensor:
        return sc.attention(q, SMALL, SMALL, **options).square().sum()

    def defined(q: Tensor) -> Tensor:
        return sc.attention(q, SMALL, SMALL, impl="reference", **options).square().sum()

    torch.testing.assert_close(hessian(total)(SMALL), jacrev(jacrev(defined))(SMALL))


@pytest.mark.parametrize("impl", ["fused", "tiled", NATIVE])
def test_a_kernel_asked_for_by_name_refuses_them(impl: str) -> None:
    with pytest.raises(sc.UnsupportedError, match="it has no forward-mode derivatives, which are needed here"):
        jacfwd(lambda q: sc.attention(q, SMALL, SMALL, impl=impl))(SMALL)


@pytest.mark.parametrize("mechanism", [Linear(), Performer(8), Delta(), GatedLinear.retnet(2)], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_derivatives_of_sums_over_earlier_keys_taken_forwards(mechanism: Mechanism, place: int) -> None:
    def attended(x: Tensor) -> Tensor:
        q, k, v = (x if i == place else SMALL for i in range(3))
        return mechanism(q, k, mask=masks.Causal()) @ v

    torch.testing.assert_close(jacfwd(attended)(SMALL), jacrev(attended)(SMALL))


@pytest.mark.ci
@pytest.mark.parametrize("width", [0, 1, 8], ids=["no decay", "one decay", "a decay for each channel"])
def test_a_recurrence_is_one_node_of_a_compiled_program(width: int) -> None:
    def run(x: Tensor, decay: Tensor | None) -> Tensor:
        key = torch.nn.functional.normalize(x, dim=-1)
        return Delta()(x, key, beta=x.sigmoid().mean(-1), decay=decay, mask=masks.Causal()).matmul(x)

    x = torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    decay = -torch.rand(2, 2, 40, width, dtype=torch.float64) if width else None
    out, expected = _compiled(run)(x, decay), run(x, decay)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_a_recurrence_under_vmap() -> None:
    x = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)

    def run(one: Tensor) -> Tensor:
        return GatedLinear.retnet(2)(one, one, mask=masks.Causal()) @ one

    torch.testing.assert_close(vmap(run)(x), torch.stack([run(one) for one in x]))
    one = x[0]
    wanted = torch.autograd.functional.hessian(lambda y: run(y).square().sum(), one[:, :, :3], vectorize=False)
    torch.testing.assert_close(hessian(lambda y: run(y).square().sum())(one[:, :, :3]), wanted)
