"""Masks and scores as numbers and tensors: what programs are compiled and exported with."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from tests.masks.test_masks import ATOMS

import saccade as sc
from saccade import masks, scores
from saccade.masks.convert.serialize import decode, encode
from saccade.scores.base import Prepared

GRIDS = [
    masks.Neighborhood(3, 3, 1),
    masks.Axial(3, 3, "rows"),
    masks.ShiftedWindows(3, 3, 2, shift=1),
    masks.Neighborhood(2, 4, 1).after(1),
]


@pytest.mark.parametrize("mask", [*(x for x in ATOMS if not isinstance(x, masks.Predicate)), *GRIDS], ids=str)
def test_masks_survive_as_numbers_and_tensors(mask: masks.Mask) -> None:
    joined = ~mask & (masks.Causal() | mask)
    encoded = encode(joined)
    assert encoded is not None
    assert all(isinstance(number, int) for number in encoded[0])
    assert torch.equal(decode(*encoded).to_dense(9, batch=2), joined.to_dense(9, batch=2))


@dataclasses.dataclass(frozen=True)
class Mirror(masks.Mask):
    """A mask of a user's own."""

    center: int
    other: masks.Mask
    shift: float = 0.5

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q + kv >= 2 * self.center + self.shift) | self.other.allows(b, h, q, kv)


def distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A tile function of a user's own."""
    return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


@dataclasses.dataclass(frozen=True)
class Power:
    """One with a number in it."""

    exponent: float

    def __call__(self, q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return -((q[..., :, None, :] - k[..., None, :, :]).abs() ** self.exponent @ weight)


class Apart(scores.Score):
    """A score of a user's own."""

    def __init__(self, exponent: float | None):
        super().__init__()
        self.exponent, self.weight = exponent, torch.nn.Parameter(torch.rand(8))

    def prepare(self, query: torch.Tensor, key: torch.Tensor) -> Prepared:
        if self.exponent is None:
            return Prepared(query, key, distance)
        return Prepared(query, key, Power(self.exponent), (self.weight,))


class Own(torch.nn.Module):
    """A module that attends by them."""

    def __init__(self, mask: masks.Mask, score: scores.Score | None):
        super().__init__()
        self.mask, self.score = mask, score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sc.attention(x, x, x, self.mask, score=self.score)


OWN = {
    "mask": lambda: Own(masks.Causal() & Mirror(3, masks.Window(2, 0)), None),
    "mask of a batch": lambda: Own(Mirror(4, masks.Dense(torch.eye(20, dtype=torch.bool))), None),
    "score": lambda: Own(masks.Causal(), Apart(None)),
    "score with parameters": lambda: Own(Mirror(3, masks.Padding([4, 20])), Apart(1.5)),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWN)
def test_masks_and_scores_of_a_users_own_compile_and_are_exported(name: str) -> None:
    torch.compiler.reset()
    model, x = OWN[name](), torch.randn(2, 2, 20, 8, requires_grad=True)
    expected = model(x)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *([model.score.weight] if name == "score with parameters" else [])]
    for own, other in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(own, other)
    for strict in (True, False):
        exported = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), expected)


def test_a_class_that_is_defined_again_is_another_one() -> None:
    def defined(reach: int) -> masks.Mask:
        @dataclasses.dataclass(frozen=True)
        class Near(masks.Mask):
            step: int

            def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
                return (q - kv).abs() * self.step <= reach

        return Near(1)

    for mask in (defined(1), defined(3)):
        assert torch.equal(decode(*encode(mask)).to_dense(6), mask.to_dense(6))


@pytest.mark.slow
def test_a_program_of_another_process_names_what_is_not_there() -> None:
    written = encode(Mirror(3, masks.Causal()))
    code = f"from saccade.masks.convert.serialize import decode; decode({written[0]}, [])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"it uses Mirror of {__name__}, which is not defined in this process" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__}; {code}"], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


class Bound(scores.Score):
    """A score whose function has variables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(()))

    def prepare(self, query: torch.Tensor, key: torch.Tensor) -> Prepared:
        weight = self.weight
        return Prepared(query, key, lambda q, k: weight * distance(q, k))


class Changing(masks.Mask):
    """A mask that is no value."""

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q >= kv


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model, reason",
    [(Own(Changing(), None), "its mask is a Changing, which cannot be"), (Own(masks.Full(), Bound()), "its score")],
    ids=["mask", "score"],
)
def test_user_masks_that_cannot_be_serialized_say_why(model: Own, reason: str) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(sc.UnsupportedError, match=reason):
        torch.export.export(model, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_every_mask_can_be_written_down() -> None:
    kinds = {x for x in vars(masks).values() if isinstance(x, type) and issubclass(x, masks.Mask)}
    ours = {x for x in kinds if not inspect.isabstract(x) and x is not masks.Predicate}
    tried = {type(mask) for mask in (*ATOMS, *GRIDS)} | {masks.And, masks.Or, masks.Not}
    assert ours <= tried


def test_a_function_cannot_become_numbers() -> None:
    assert encode(masks.Predicate(lambda b, h, q, kv: q == kv) | masks.Causal()) is None
