"""Sameness of modules that nobody knows: what they raise, what they keep, and what a user may get wrong."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.auditing import model_zoo as zoo
from torch import Tensor, nn

from saccade import audit, masks
from saccade.auditing.equivalence import check_equivalence
from saccade.auditing.runner import Runner


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Plain(nn.Module):
    """A token sees the mean of the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 8)

    def forward(self, ids: Tensor) -> Any:
        count = torch.arange(1, ids.shape[1] + 1)[:, None]
        return {"rows": self.embedding(ids).cumsum(1) / count}


def test_a_plain_module_is_run_whole_and_in_batches() -> None:
    pairs = check_equivalence(Plain(), zoo.tokens(), **zoo.EVERYTHING, outputs=lambda out: out["rows"])
    assert zoo.named(pairs, "held") == {"one by one = in a batch", "in training, without dropout", "float32 = float64"}
    assert {pair.why for pair in pairs if pair.name in zoo.CACHE} == {"the model has no cache"}


@pytest.mark.parametrize("batch", [1, 3])
def test_any_number_of_rows(batch: int) -> None:
    assert not zoo.named(check_equivalence(zoo.decoder(), zoo.tokens(batch), **zoo.EVERYTHING), "broken")


class Raising(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        raise KeyError("red\x1b[31m\nsecond line")


def test_an_error_of_a_model_is_no_result() -> None:
    pairs = check_equivalence(Raising(), zoo.tokens(), **zoo.EVERYTHING)
    assert zoo.named(pairs, "not answered") == {pair.name for pair in pairs}
    assert len(pairs) > 10
    assert {pair.why for pair in pairs} == {r"KeyError: 'red\x1b[31m\nsecond line'"}


def test_only_the_first_line_of_an_error_is_reported() -> None:
    class Other(Raising):
        def forward(self, ids: Tensor) -> Tensor:
            raise RuntimeError("red\x1b[31m\nsecond line")

    assert {pair.why for pair in check_equivalence(Other(), zoo.tokens())} == {r"RuntimeError: red\x1b[31m"}


@pytest.mark.parametrize(
    "wrong, error, match",
    [
        (
            {"model": 3},
            TypeError,
            "check_equivalence: model must be a torch.nn.Module or a saccade.auditing Runner; got int",
        ),
        ({"ids": [1, 2]}, TypeError, "check_equivalence: ids must be a tensor; got list"),
        ({"ids": torch.ones(2, 5)}, TypeError, "check_equivalence: ids must be int64 or int32; got torch.float32"),
        (
            {"ids": torch.full((2, 5), 101)},
            ValueError,
            "check_equivalence: ids must be from 0 to 100, the vocabulary; got 101",
        ),
        (
            {"ids": zoo.tokens(2, 1)},
            ValueError,
            r"check_equivalence: ids must be at least one row of two tokens; got \[2, 1\]",
        ),
        (
            {"packed": [9, 9]},
            ValueError,
            r"check_equivalence: packed must be lengths that sum to the 23 tokens of a row; got",
        ),
        ({"packed": [23, 0]}, ValueError, "check_equivalence: packed must be an int of at least 1; got 0"),
        ({"padded": 1}, TypeError, "check_equivalence: padded must be"),
        ({"cache": "yes"}, TypeError, "check_equivalence: cache must be"),
        ({"against": "eager"}, TypeError, "check_equivalence: against must be a list of names; got 'eager'"),
        ({"factor": 0}, ValueError, "check_equivalence: factor must be"),
        ({"seed": -1}, ValueError, "check_equivalence: seed must be an int of at least 0; got -1"),
        (
            {"outputs": lambda out: 3},
            ValueError,
            r"check_equivalence: outputs must return floats \[2, 23, \.\.\.\] from the model.s result; got int",
        ),
        (
            {"outputs": lambda out: out[:, 0]},
            ValueError,
            r"check_equivalence: outputs must return floats .*; got torch.float32 \[2, 101\]",
        ),
        (
            {"outputs": lambda out: out.argmax(-1)},
            ValueError,
            r"check_equivalence: outputs must return floats .*; got torch.int64 \[2, 23\]",
        ),
        (
            {"outputs": lambda out: out.no},
            ValueError,
            "check_equivalence: outputs must return floats .*; got AttributeError",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_wrong_argument_is_an_error(wrong: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_equivalence(**{"model": zoo.decoder(), "ids": zoo.tokens(), **wrong})


def test_an_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"check_equivalence: against must be among eager, .*; got 'egaer'"):
        check_equivalence(zoo.llama(), zoo.tokens(), against=["egaer"])


def _state(model: nn.Module) -> list[Any]:
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    random_numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    tensors = {name: tensor.clone().tolist() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.tolist() for name, tensor in model.named_buffers()}
    gradients = [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
    flags = [(part.training, getattr(part, "p", None)) for part in model.modules()]
    told = copy.deepcopy(vars(model.config)) if hasattr(model, "config") else None
    return [hooks, random_numbers, tensors, buffers, gradients, flags, repr(told)]


class Counting(Plain):
    """Has a buffer that it changes, and draws random numbers."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.fails = fails

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.calls = self.calls * 2
        torch.rand(1), random.random(), np.random.rand()
        if self.fails and self.calls[0] > 5:
            raise RuntimeError("after some calls")
        return super().forward(ids)["rows"]


@pytest.mark.ci
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [zoo.llama, zoo.decoder, Counting, lambda: Counting(fails=True)],
    ids=["llama", "decoder", "counting", "failing"],
)
def test_everything_is_as_before(make: Callable[[], nn.Module], training: bool) -> None:
    model = make().train(training)
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    before = _state(model)
    check_equivalence(model, zoo.tokens(), **zoo.EVERYTHING, against=["eager"])
    assert _state(model) == before


def test_everything_is_as_before_a_wrong_argument() -> None:
    model = Counting().train()
    before = _state(model)
    with pytest.raises(ValueError, match="outputs must return"):
        check_equivalence(model, zoo.tokens(), outputs=lambda out: 3)
    assert _state(model) == before


def test_a_runner_says_what_it_cannot_do() -> None:
    class FullRun(Runner):
        pass

    pairs = check_equivalence(FullRun(nn.Sequential(nn.Embedding(101, 8))), zoo.tokens(), **zoo.EVERYTHING)
    assert zoo.named(pairs, "not answered") >= zoo.CACHE | {
        "packed",
        *zoo.BESIDE,
        "padded at the left",
        "padded at the right",
    }


class Reader(nn.Module):
    """A GRU that may drop the first of its state's channels between calls."""

    def __init__(self, dropped: int) -> None:
        super().__init__()
        self.embedding, self.layer, self.dropped = nn.Embedding(101, 8), nn.GRU(8, 8, batch_first=True), dropped

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, state = self.layer(self.embedding(ids), state)
        state = state.clone()
        state[..., : self.dropped] = 0
        return rows, state


class ReaderRunner(Runner):
    def start(self) -> None:
        return None

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model(ids, state)

    def packed_inputs(self, ids: Tensor, lengths: Any) -> tuple[dict[str, Any], str]:
        return {"ids": ids}, "nothing"


@pytest.mark.parametrize("dropped, verdict", [(0, "held"), (1, "broken")])
def test_an_audit_runs_any_module_as_its_runner_does(dropped: int, verdict: str) -> None:
    runner = ReaderRunner(Reader(dropped), outputs=lambda out: out[0])
    report = audit(runner, masks.Causal(), length=12, cache=True, claims=["states", "batch"], tests=2)
    assert report["steps: two halves"].verdict == verdict, str(report)
    assert report["states"].finding.module == "layer"  # no argument separates the texts
    assert report["batch"].verdict == report["reach"].verdict == "held"


def test_outputs_are_those_of_the_runner() -> None:
    runner = ReaderRunner(Reader(0), outputs=lambda out: out[0])
    with pytest.raises(ValueError, match="outputs must be left out with a Runner"):
        audit(runner, masks.Causal(), length=12, outputs=lambda out: out[0] * 2)
    with pytest.raises(ValueError, match="outputs must be left out with a Runner"):
        check_equivalence(runner, torch.arange(12)[None], outputs=lambda out: out[0] * 2)
