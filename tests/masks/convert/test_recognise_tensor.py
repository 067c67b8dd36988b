"""Tests of rules found in bool tensors: the right rule is found, and it behaves like the tensor."""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.masks.convert import recognise_tensor as finding
from saccade.testing import oracle

N = 12
TRIL = torch.ones(N, N, dtype=torch.bool).tril()
LENGTHS = torch.tensor([12, 5, 1, 0])
RIGHT = (torch.arange(N) < LENGTHS[:, None])[:, None, None]
LEFT = (torch.arange(N) >= N - LENGTHS[:, None])[:, None, None]
DOCUMENT = torch.tensor([0] * 5 + [1] + [2] * 6)
TOGETHER = DOCUMENT[:, None] == DOCUMENT
DISTANCE = torch.arange(N)[:, None] - torch.arange(N)
EVERYONE = torch.ones(N, N, dtype=torch.bool)
TWO_PADDED, PACKED = (
    "Padding(lengths=(12, 5, 1, 0), side='{}', padded_len={})",
    "Documents(lengths=((5, 1, 6),), rule={})",
)
RIGHT_PADDED, LEFT_PADDED = TWO_PADDED.format("right", None), TWO_PADDED.format("left", N)
SAID: dict[str, tuple[Tensor, str]] = {
    "everyone": (EVERYONE, "Full()"),
    "nobody": (~EVERYONE, "~Full()"),
    "causal": (TRIL, "Causal()"),
    "causal, the last rows": (TRIL[-5:], "Causal()"),
    "causal, more rows than keys": ((DISTANCE >= 4)[:, :8], "Causal()"),
    "causal, written out": (TRIL.expand(4, 1, N, N).contiguous(), "Causal()"),
    "causal, expanded": (TRIL.expand(4, 3, N, N), "Causal()"),
    "causal for each head": (TRIL.expand(2, 3, N, N).contiguous(), "Causal()"),
    "causal, transposed": (EVERYONE.triu().T, "Causal()"),
    "sliding": ((DISTANCE >= 0) & (DISTANCE < 4), "Window(left=3, right=0)"),
    "band": ((DISTANCE >= -2) & (DISTANCE < 4), "Window(left=3, right=2)"),
    "ahead": (DISTANCE >= -2, "Window(left=None, right=2)"),
    "diagonal": (DISTANCE == 0, "Window(left=0, right=0)"),
    "padding": (RIGHT, RIGHT_PADDED),
    "padding, expanded": (RIGHT.expand(4, 1, N, N), RIGHT_PADDED),
    "padding, written out": (RIGHT.expand(4, 1, N, N).contiguous(), RIGHT_PADDED),
    "padding on the left": (LEFT, LEFT_PADDED),
    "padding of one": (RIGHT[1], "Prefix(length=5)"),
    "causal and padding": (RIGHT & TRIL, f"Causal() & {RIGHT_PADDED}"),
    "causal and padding on the left": (LEFT & TRIL, f"Causal() & {LEFT_PADDED}"),
    "band and padding": (RIGHT & (DISTANCE < 4) & (DISTANCE > -2), f"Window(left=3, right=1) & {RIGHT_PADDED}"),
    "documents": (TOGETHER, PACKED.format(None)),
    "causal documents": (TOGETHER & TRIL, PACKED.format("Causal()")),
    "windows in documents": (TOGETHER & (DISTANCE.abs() < 3), PACKED.format("Window(left=2, right=2)")),
    "documents for each item": (
        torch.stack([TOGETHER, TRIL.new_ones(N, N)])[:, None],
        "Documents(lengths=((5, 1, 6), (12,)), rule=None)",
    ),
    "documents behind an item of one": (
        torch.stack([TRIL.new_ones(N, N), TOGETHER])[:, None],
        "Documents(lengths=((12,), (5, 1, 6)), rule=None)",
    ),
    "documents of fewer tokens": (
        torch.stack([TOGETHER, TOGETHER & (DOCUMENT < 2)])[:, None],
        "Documents(lengths=((5, 1, 6), (5, 1)), rule=None)",
    ),
    "documents of two": (
        torch.stack([EVERYONE[:2, :2], DISTANCE[:2, :2] == 0])[:, None],
        "Documents(lengths=((2,), (1, 1)), rule=None)",
    ),
    "documents that look ahead": (TOGETHER & (DISTANCE <= 0), PACKED.format("Window(left=0, right=None)")),
    "documents, the last rows": (TOGETHER[-7:], "KeyRanges(items=1, rows=7, columns=12, at_most=1)"),
    "padding that sees nothing": (
        (RIGHT & TRIL & RIGHT.mT)[1],
        "Documents(lengths=((5,),), rule=Causal())",
    ),
    "strictly causal": (DISTANCE > 0, "KeyRanges(items=1, rows=12, columns=12, at_most=1)"),
    "sinks": (TRIL & ((DISTANCE < 4) | (torch.arange(N) < 2)), "KeyRanges(items=1, rows=12, columns=12, at_most=2)"),
    "padding with holes": (RIGHT & (torch.arange(N) != 3), "KeyRanges(items=4, rows=1, columns=12, at_most=2)"),
    "causal for each item": (
        torch.stack([TRIL, TRIL.triu(-3), TRIL & (torch.arange(N) > 2), TRIL.T])[:, None],
        "KeyRanges(items=4, rows=12, columns=12, at_most=1)",
    ),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("however_small")
KERNELS = ["fused", "tiled", NATIVE]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list of the tensors that are searched for a rule."""
    seen: list[Tensor] = []
    look = finding._recognise
    monkeypatch.setattr("saccade.masks.convert.recognise_tensor._recognise", lambda x: (seen.append(x), look(x))[1])
    return seen


def _rule(allowed: Tensor) -> masks.Mask:
    """Return the rule found in a tensor, or else the tensor as a mask."""
    mask = masks.Dense(allowed)
    batch, heads, rows, columns = mask.allowed.shape
    return finding.recognise_tensors(mask, (batch, heads, rows, columns), (columns - rows, 0))


def _dense(mask: masks.Mask, like: Tensor) -> Tensor:
    batch, heads, rows, columns = masks.Dense(like).allowed.shape
    return mask.to_dense(rows, columns, batch=batch, heads=heads)


def _inputs(allowed: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, heads, rows, columns = masks.Dense(allowed).allowed.shape
    generator = torch.Generator().manual_seed(0)
    rows = columns if rows == 1 else rows
    return [
        torch.randn(batch, heads, size, 8, generator=generator, dtype=dtype).requires_grad_()
        for size in (rows, columns, columns)
    ]


def _check(out: Tensor, tensors: list[Tensor], allowed: Tensor) -> None:
    """Check that output and gradients are those of the definition."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    seen = masks.Dense(allowed).allowed.expand(*out.shape[:3], wide[1].shape[2])
    expected = oracle.attention(*wide, seen)[0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    ours, theirs = torch.autograd.grad(out.square().sum(), tensors), torch.autograd.grad(expected.square().sum(), wide)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SAID)
def test_a_recognised_rule_equals_the_tensor(name: str) -> None:
    allowed, expected = SAID[name]
    rule = _rule(allowed)
    assert str(rule) == expected
    assert torch.equal(_dense(rule, allowed), masks.Dense(allowed).allowed)
    assert rule.is_value
    assert rule == _rule(allowed.clone())
    assert hash(rule) == hash(_rule(allowed.clone()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SAID)
def test_products_are_those_of_the_tensor(name: str, kernel: str) -> None:
    allowed, _ = SAID[name]
    tensors = _inputs(allowed)
    _check(sc.attention(*tensors, allowed, impl=kernel), tensors, allowed)


@pytest.mark.parametrize("shape", [(80, 80), (1, 3, 9, 9), (0, 4), (4, 0)])
def test_tensors_that_say_nothing_shorter_stay_what_they_are(shape: tuple[int, ...]) -> None:
    assert isinstance(_rule(torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5), masks.Dense)


@pytest.mark.parametrize("join", [lambda x: masks.Causal() & x, lambda x: ~x, lambda x: x | masks.Global([0])])
def test_a_tensor_among_other_masks(join: Callable[[masks.Mask], masks.Mask]) -> None:
    for allowed in (TOGETHER, RIGHT):
        mask = join(masks.Dense(allowed))
        given = sc.AttentionMatrix(*_inputs(allowed)[:2], mask).inputs.current()
        assert not given.rule.tensors()
        expected = mask.to_dense(N, N, batch=len(masks.Dense(allowed).allowed))
        assert torch.equal(given.rule.to_dense(N, N, batch=len(expected)), expected)


def test_outside_of_a_tensor_nothing_is_found() -> None:
    """Rows and keys outside of the tensor stay hidden: no rule, which would show some, replaces it there."""
    query = key = torch.randn(1, 1, N, 8)
    wider = masks.Dense(TRIL[:4, :4]) | masks.Window(0, 0)
    assert torch.equal(sc.AttentionMatrix(query, key, wider).to_dense() > 0, wider.to_dense(N))
    positions = {"q_positions": range(3, 7), "kv_positions": range(2, 9)}
    some = sc.AttentionMatrix(query[:, :, :4], key[:, :, :7], masks.Dense(TRIL), **positions)
    assert torch.equal((some.to_dense() > 0)[0, 0], TRIL[3:7, 2:9])


def test_a_tensor_is_looked_at_once(looks: list[Tensor]) -> None:
    tensors, mask = _inputs(TRIL), TRIL.clone()
    out = sc.attention(*tensors, mask)
    for again in (mask, mask[None], mask[:, :], mask.reshape(1, 1, N, N)):
        assert torch.equal(sc.attention(*tensors, again), out)
    assert len(looks) == 1
    shorter = [x[:, :, :7] for x in tensors]
    for _ in range(2):
        sc.attention(*shorter, mask[:7, :7])
    assert len(looks) == 2
    sc.attention(*tensors, mask.clone())
    assert len(looks) == 3


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda x: x.__setitem__((3, 7), True),
    "a view": lambda x: x[2:5].fill_(False),
    "a flat view": lambda x: x.view(-1)[40:].logical_not_(),
    "a detached one": lambda x: x.detach().copy_(TOGETHER),
    "other memory": lambda x: setattr(x, "data", TOGETHER.clone()),
    "NumPy": lambda x: np.logical_not(x.numpy(), out=x.numpy()),
    "without gradient": torch.no_grad()(lambda x: x.zero_()),
    "in inference mode": torch.inference_mode()(lambda x: x.zero_()),
}


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_write_into_a_mask_is_noticed(kernel: str, writer: str, as_view: bool) -> None:
    owner = TRIL.repeat(2, 1) if as_view else TRIL.clone()
    mask, tensors = owner[:N], _inputs(TRIL)
    matrix = sc.AttentionMatrix(*tensors[:2], mask)
    sc.attention(*tensors, mask, impl=kernel)
    matrix @ tensors[2]
    if writer == "NumPy":
        owner.numpy()  # whoever shares memory with NumPy has said so before
        sc.attention(*tensors, mask)
    WRITERS[writer](mask if as_view or writer == "other memory" else owner)
    _check(sc.attention(*tensors, mask, impl=kernel), tensors, mask.clone())
    if writer != "other memory":
        _check(matrix @ tensors[2], tensors, mask.clone())
        assert torch.equal(matrix.to_dense()[0, 0] > 0, mask)


@pytest.mark.parametrize("kernel", KERNELS)
def test_unnamed_content_is_read_anew_by_each_product(kernel: str) -> None:
    mask = torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    tensors = _inputs(mask)
    matrix = sc.AttentionMatrix(*tensors[:2], mask, impl=kernel)
    matrix @ tensors[2]
    mask.logical_not_()
    _check(matrix @ tensors[2], tensors, mask)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_those_of_what_was_seen(kernel: str) -> None:
    tensors, mask = _inputs(TRIL), TRIL.clone()
    out = sc.attention(*tensors, mask, impl=kernel)
    mask.fill_(True)
    _check(out, tensors, TRIL)


def test_without_a_count_of_changes_each_call_looks(looks: list[Tensor]) -> None:
    with torch.inference_mode():
        mask, tensors = TRIL.clone(), [x.detach() for x in _inputs(TRIL)]
        first = sc.attention(*tensors, mask)
        mask.logical_not_()
        assert not torch.equal(sc.attention(*tensors, mask), first)
    assert len(looks) == 2
    array = TRIL.numpy().copy()
    shared = torch.from_numpy(array)
    first = sc.attention(*tensors, shared)
    array[:] = True
    assert torch.equal(sc.attention(*tensors, shared), sc.attention(*tensors))
    assert len(looks) == 4


def test_tensors_that_collectives_may_write_are_read_on_every_call(
    looks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    tensors, mask = _inputs(TRIL), TRIL.clone()
    for _ in range(2):
        _check(sc.attention(*tensors, mask), tensors, mask)
        mask.data[3:] = TOGETHER[3:]  # as a broadcast does: torch counts neither
    assert len(looks) == 2


@pytest.mark.ci
def test_a_look_leaves_the_tensor_as_it_was() -> None:
    mask = TRIL.clone()
    sc.attention(*_inputs(TRIL), mask)
    assert mask._version == 0
    assert mask.untyped_storage().resizable()  # memory that NumPy shares is not
    assert not mask.__dict__
    kept = len(finding._cache)
    assert mask in finding._cache
    del mask
    gc.collect()
    assert len(finding._cache) == kept - 1


def test_many_views_of_one_tensor_are_not_all_kept() -> None:
    mask, tensors = TRIL.clone(), _inputs(TRIL)
    for size in range(1, N + 1):
        sc.attention(*(x[:, :, :size] for x in tensors), mask[:size, :size])
    assert len(finding._cache[mask].patterns) <= finding._MAX_VIEWS


def test_several_threads() -> None:
    mask, tensors = TRIL.clone(), [x.detach() for x in _inputs(TRIL)]
    expected, wrong = sc.attention(*tensors, masks.Causal()), []

    def run() -> None:
        for _ in range(20):
            if not torch.allclose(sc.attention(*tensors, mask), expected, atol=1e-6):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_compiled_programs(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sc.attention, fullgraph=True, backend=backend)
    inside = torch.compile(lambda q, k, v, m: sc.attention(q, k, v, ~m), fullgraph=True, backend=backend)
    tensors, mask = _inputs(TRIL), TRIL.clone()
    for _ in range(2):
        _check(compiled(*tensors, mask), tensors, mask)
        _check(inside(*tensors, mask), tensors, ~mask)
        mask[3:] = TOGETHER[3:]


def test_under_transforms(looks: list[Tensor]) -> None:
    tensors = [x.detach() for x in _inputs(TRIL)]
    expected = sc.attention(*tensors, masks.Causal())
    for mask in (TRIL.clone(), TRIL.clone()):
        if looks:  # once looked at before, once not
            sc.attention(*tensors, mask)
        run = torch.vmap(lambda x, mask=mask: sc.attention(x, *tensors[1:], mask))
        torch.testing.assert_close(run(tensors[0][None].repeat(3, 1, 1, 1, 1)), expected.expand(3, *expected.shape))
        grad = torch.func.grad(lambda x, mask=mask: sc.attention(x, *tensors[1:], mask).sum())(tensors[0])
        wanted = torch.func.grad(lambda x: sc.attention(x, *tensors[1:], masks.Causal()).sum())(tensors[0])
        torch.testing.assert_close(grad, wanted)


def test_explanations_say_what_was_found() -> None:
    x = torch.zeros(1, 1, N, 8)
    told = sc.AttentionMatrix(x, x, TRIL).explain()
    assert told.mask == "Dense(shape=[1, 1, 12, 12]), the same as Causal()"
    assert told.pairs == sc.AttentionMatrix(x, x, masks.Causal()).explain().pairs
    assert sc.AttentionMatrix(x, x, masks.Causal()).explain().mask == "Causal()"


def test_small_products_are_not_worth_a_look(monkeypatch: pytest.MonkeyPatch, looks: list[Tensor]) -> None:
    monkeypatch.setattr("saccade.masks.convert.recognise_tensor._MIN_PAIRS", N * N + 1)
    mask = TRIL.clone()  # of which nothing is kept yet
    tensors = _inputs(mask)
    sc.attention(*tensors, mask)
    assert not looks
    sc.attention(*(x.repeat(1, 2, 1, 1) for x in tensors), mask)
    assert len(looks) == 1
