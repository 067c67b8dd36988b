"""The first call of a process or of a mask runs, as seen by the caller's modes, exactly what every later call runs."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import saccade as sc
from saccade import masks, positions
from saccade.engine.first_use_check import results
from saccade.engine.kernels import aten_flash, native, native_arguments
from saccade.engine.kernels.tiled import Tiled
from saccade.masks import plan_cache
from saccade.mechanisms import Performer

MASKS = {
    "none": None,
    "causal": masks.Causal(),
    "strided": masks.Causal() & (masks.Window(5, 0) | masks.Strided(7)),
    "documents": masks.Documents([[10, 30], [40]], rule=masks.Causal()),
    "random blocks": masks.bigbird(4, random_blocks=2),
}
OPTIONS = {
    "plain": {},
    "bias": {"bias": positions.ALiBi(4)},
    "dropout": {"dropout_p": 0.25},
    "softcap": {"softcap": 30.0},
}


class Checked(Tiled):
    """A kernel whose first use is compared with the definition."""

    name = "checked"
    is_checked = True


class Operations(TorchDispatchMode):
    """Record the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear all caches, as in a fresh process."""
    cached = (
        aten_flash.is_available,
        aten_flash.reads_groups,
        native.abilities,
        native_arguments._full_plan,
        plan_cache._cached_plan,
    )
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(results, "_RECORDS", {})
    yield
    for function in cached:
        function.cache_clear()


def inputs(**options: object) -> Tensor:
    return torch.randn(2, 4, 40, 16, **options)


def operations(run: Callable[[], object]) -> list[str]:
    with Operations() as seen:
        run()
    return seen.names


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference", pytest.param(Checked(), id="checked"), NATIVE])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_first_call_runs_the_operations_of_every_other(mask, options, impl):
    x = inputs(requires_grad=True)

    def run() -> None:
        out = sc.attention(x, x[:, :2], x[:, :2], MASKS[mask], impl=impl, **OPTIONS[options])
        torch.autograd.grad(out.sum(), x)

    assert operations(run) == operations(run)


@pytest.mark.parametrize("mask", MASKS)
def test_the_first_question_runs_the_operations_of_every_other(mask):
    x = inputs()

    def run() -> None:
        sc.AttentionMatrix(x, x, MASKS[mask]).entropy()

    assert operations(run) == operations(run)


def test_the_first_draw_of_directions_is_not_seen():
    x, performer = inputs(), Performer(8)
    assert operations(lambda: performer(x, x) @ x) == operations(lambda: performer(x, x) @ x)


@pytest.mark.parametrize("impl", ["auto", "tiled", NATIVE])
@pytest.mark.parametrize("mask", MASKS)
def test_selective_checkpointing_in_a_fresh_process(mask, impl):
    aten_ops = torch.ops.aten
    flash = aten_ops._scaled_dot_product_flash_attention_for_cpu.default
    saved = [flash, aten_ops.bmm.default, aten_ops.mm.default, aten_ops.le.Tensor, aten_ops.arange.start_step]
    x = inputs(requires_grad=True)
    context = functools.partial(create_selective_checkpoint_contexts, saved)

    def run(x: Tensor) -> Tensor:
        return sc.attention(x, x, x, MASKS[mask], impl=impl)

    (found,) = torch.autograd.grad(checkpoint(run, x, use_reentrant=False, context_fn=context).square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(run(x).square().sum(), x)[0])


@pytest.mark.parametrize("impl", ["auto", "reference", pytest.param(Checked(), id="checked"), NATIVE])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_fake_tensors_get_shapes_and_leave_nothing_behind(mask, options, impl):
    with torch._subclasses.FakeTensorMode():
        x = inputs(requires_grad=True)
        out = sc.attention(x, x[:, :2], x[:, :2], MASKS[mask], impl=impl, **OPTIONS[options])
        assert out.shape == x.shape
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    x = inputs()
    given = {name: value for name, value in OPTIONS[options].items() if name != "dropout_p"}
    found = sc.attention(x, x[:, :2], x[:, :2], MASKS[mask], impl=impl, **given)
    expected = sc.attention(x, x[:, :2], x[:, :2], MASKS[mask], impl="reference", **given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", ["auto", "tiled", NATIVE])
@pytest.mark.parametrize("mask", MASKS)
def test_a_first_call_without_gradients_serves_later_calls_with_them(mask, impl):
    x = inputs()
    with torch.inference_mode():
        before = sc.attention(x, x, x, MASKS[mask], impl=impl)
    x.requires_grad_()
    found = sc.attention(x, x, x, MASKS[mask], impl=impl)
    torch.testing.assert_close(found, before)
    assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()


def test_a_first_call_draws_no_random_numbers():
    x, before = inputs(), torch.get_rng_state()
    sc.attention(x, x, x, MASKS["strided"], impl=Checked())
    Performer(8)(x, x)
    assert torch.equal(torch.get_rng_state(), before)
