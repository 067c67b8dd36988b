"""Attention under ``make_fx``, ``functionalize`` and functional tensors: one operation with the eager numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import saccade as sc
from saccade import masks, mechanisms
from saccade.support.errors import UnsupportedError

CAUSAL = masks.Causal()
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: sc.attention(x, x, x, CAUSAL),
    "lse": lambda x: sc.attention_with_lse(x, x, x, CAUSAL)[1],
    "matrix": lambda x: sc.AttentionMatrix(x, x, CAUSAL) @ x,
    "padding": lambda x: sc.attention(x, x, x, masks.Padding([3, 6])),
    "bool tensor": lambda x: sc.attention(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril()),
    "linear": lambda x: mechanisms.Linear()(x, x, mask=CAUSAL) @ x,
    "delta rule": lambda x: mechanisms.Delta()(x, x, mask=CAUSAL) @ x,
}


def _functional(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FunctionalTensorMode():
        return torch._from_functional_tensor(call(FunctionalTensor.to_functional(x)).elem)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "functional tensors": _functional,
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "real": lambda call, x: make_fx(call)(x)(x),
    "fake": lambda call, x: make_fx(call, tracing_mode="fake")(x)(x),
    "symbolic": lambda call, x: make_fx(call, tracing_mode="symbolic")(x)(x),
}


@pytest.mark.ci
@pytest.mark.parametrize(("name", "way"), sampled([pytest.param(name, way) for name in CALLS for way in WAYS], 4))
def test_recorded_operations_give_the_numbers_of_eager_runs(name: str, way: str) -> None:
    if way == "functional tensors" and name == "bool tensor":
        pytest.skip("the pattern of a bool tensor is a value, which a functional tensor does not show")
    for wants_gradient in (False, True):
        x = torch.randn(2, 2, 6, 4, requires_grad=wants_gradient)
        with torch.set_grad_enabled(wants_gradient):
            torch.testing.assert_close(WAYS[way](CALLS[name], x), CALLS[name](x))


def test_a_recorded_program_contains_one_operation() -> None:
    graph = make_fx(CALLS["attention"], tracing_mode="fake")(torch.randn(2, 2, 6, 4)).graph
    assert [str(node.target) for node in graph.nodes].count("saccade.product.default") == 1


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_statistics_cannot_be_recorded(mode: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be one operation of a graph"):
        make_fx(lambda x: sc.AttentionMatrix(x, x).entropy(), tracing_mode=mode)(torch.randn(1, 2, 4, 4))


TABLES: dict[str, Callable[[], masks.Mask]] = {
    "padding": lambda: masks.Padding([5, 2]),
    "documents": lambda: masks.Documents([[2, 3], [1, 4]]),
    "tree": lambda: masks.Tree([-1, 0, 0, 1, 1]),
    "blocks": lambda: masks.Blocks([[True, False, True], [True, True, False], [True, True, True]], 2),
    "global": lambda: masks.Global([1]) | CAUSAL,
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fake": FakeTensorMode,
    "functional": FunctionalTensorMode,
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_masks_fit_every_mode(name: str, mode: str) -> None:
    (q, k), outside = torch.randn(2, 2, 2, 5, 4), TABLES[name]()
    expected = masks.Dense(TABLES[name]().to_dense(5, batch=2))
    with MODES[mode]():
        inside, x = TABLES[name](), torch.randn(2, 2, 5, 4)
        if mode != "functional":
            for mask in (inside, outside):
                assert sc.AttentionMatrix(x, x, mask).entropy().shape == (2, 2, 5)
                assert sc.attention(x, x, x, mask).shape == x.shape
    for mask in (inside, outside):
        torch.testing.assert_close(sc.attention(q, k, k, mask), sc.attention(q, k, k, expected))
        torch.testing.assert_close(
            sc.AttentionMatrix(q, k, mask).entropy(), sc.AttentionMatrix(q, k, expected).entropy()
        )
