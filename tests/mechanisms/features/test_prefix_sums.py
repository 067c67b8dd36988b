"""Tests of sums over earlier keys against all pairs written out."""

import itertools

import pytest
import torch
from torch import Tensor

from saccade.mechanisms.features import chunks
from saccade.mechanisms.features.chunks import Line
from saccade.mechanisms.features.prefix_sums import prefix_sums
from saccade.testing.laws.memory import largest_tensor

N, F64 = 11, torch.float64
SEGMENTS = {
    "one": None,
    "shared": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3]]),
    "own": torch.tensor([[0] * 6 + [1] * 5, [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4]]),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 4)


def _pairs(line: Line, reverse: bool) -> Tensor:
    """Return the weight of each key in each row: ``[2, groups | 1, N, N]``."""
    pairs = torch.ones(2, 1, N, N, dtype=F64).tril()
    pairs = pairs.mT if reverse else pairs
    if line.segments is not None:
        pairs = pairs * (line.segments[:, :, None] == line.segments[:, None])[:, None]
    if line.key_logs is not None and line.row_logs is not None:
        pairs = torch.where(pairs > 0, (line.key_logs[:, :, None] - line.row_logs[..., None]).exp(), 0.0)
    return pairs


def _line(groups: int, weighted: bool, segments: Tensor | None, reverse: bool) -> Line:
    if not weighted:
        return Line(segments=segments)
    logs = 100 * torch.randn(2, groups, N, dtype=F64)
    logs[0, :, :2] = -torch.inf
    seen = _pairs(Line(segments=segments), reverse) > 0
    peak = torch.where(seen, logs[:, :, None], -torch.inf).amax(-1)
    return Line(peak.masked_fill(peak == -torch.inf, 0.0), logs, segments)


def _inputs(groups: int) -> tuple[Tensor, ...]:
    shapes = ((2, 4, N, 3), (2, groups, N, 3), (2, groups, N, 2))
    return tuple(torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize(
    "groups, weighted, segments, reverse", list(itertools.product([1, 2, 4], [False, True], SEGMENTS, [False, True]))
)
def test_sums_and_gradients_are_those_of_all_pairs(groups: int, weighted: bool, segments: str, reverse: bool) -> None:
    a, b, c = _inputs(groups)
    line, share = _line(groups, weighted, SEGMENTS[segments], reverse), 4 // groups
    pairs = _pairs(line, reverse)
    pairs = pairs if pairs.shape[1] == 1 else pairs.repeat_interleave(share, 1)
    expected = (a @ b.repeat_interleave(share, 1).mT * pairs) @ c.repeat_interleave(share, 1)
    out = prefix_sums(a, b, c, line, reverse=reverse)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    own, other = (torch.autograd.grad(x, (a, b, c), grad) for x in (out, expected))
    torch.testing.assert_close(own, other)


@pytest.mark.ci
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives(weighted: bool) -> None:
    a, b, c = (x[:, :, :6].detach()[:1, :2].requires_grad_() for x in _inputs(2))
    line = _line(2, weighted, SEGMENTS["shared"], False)
    line = Line(*(None if x is None else x[:1, ..., :6] for x in line))
    assert torch.autograd.gradgradcheck(lambda a, b, c: prefix_sums(a, b, c, line), (a, b, c))


def test_no_tensor_is_larger_than_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 64)
    a, b = (torch.rand(1, 2, 1024, 32, requires_grad=True) for _ in range(2))
    c = torch.randn(1, 2, 1024, 32, requires_grad=True)
    assert largest_tensor(lambda: prefix_sums(a, b, c).sum().backward()) <= a.nbytes


def test_the_backward_pass_saves_only_inputs() -> None:
    inputs = _inputs(4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        prefix_sums(*inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}
