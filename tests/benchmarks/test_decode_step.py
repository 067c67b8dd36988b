"""The question of one token of a model, at tiny sizes."""

import pytest
import torch
from benchmarks.measuring import Pair, Rounds

from benchmarks import decode_step
from saccade.models import Decoder


@pytest.fixture(scope="module")
def its() -> decode_step.Case:
    return decode_step.small_case()


def test_a_step_leaves_the_cache_as_it_was(its: decode_step.Case) -> None:
    first, second = its.step(), its.step()
    assert torch.equal(first, second)
    assert its.cache.length == decode_step.SMALL_CONTEXT


def test_the_operators_give_the_logits_of_the_model(its: decode_step.Case) -> None:
    decode_step.check(its, decode_step.Operators(its))


def test_another_weight_is_noticed(its: decode_step.Case) -> None:
    operators = decode_step.Operators(its)
    operators.weights[0] = operators.weights[0]._replace(output=2 * operators.weights[0].output)
    with pytest.raises(AssertionError, match="not close"):
        decode_step.check(its, operators)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_weights_and_the_whole_cache_are_read(dtype: torch.dtype) -> None:
    its = decode_step.case(17, 2, 32, 1, 16, dtype)
    weights = sum(x.numel() for x in its.model.parameters())
    assert sum(x.nbytes for x in its.tensors) == (weights + 2 * 2 * 17 * 16) * dtype.itemsize


@pytest.mark.parametrize(("seconds", "met"), [(0.012, True), (0.014, False)])
def test_times_that_reading_takes(
    its: decode_step.Case, monkeypatch: pytest.MonkeyPatch, seconds: float, met: bool
) -> None:
    measured = Pair(seconds, 0.01, 0.01 / seconds, 1.0, True)
    monkeypatch.setattr(decode_step, "compare", lambda *sides, **options: measured)
    row = decode_step.beside_reading(its, referee=None, name="float32")
    assert row.met is met
    assert row.measured.startswith(f"{seconds * 100:.2f}x")
    lacking = decode_step.beside_reading(its, referee=None, name="float32", but="no AVX-512")
    assert (lacking.met, lacking.target) == (None, "at most 1.3x; not asked: no AVX-512")


@pytest.mark.parametrize(("seconds", "met"), [(190e-6, True), (210e-6, False)])
def test_python_is_the_rest_of_a_step(
    its: decode_step.Case, monkeypatch: pytest.MonkeyPatch, seconds: float, met: bool
) -> None:
    times = [[1.0 + seconds, 1.0], [3.0 + seconds, 3.0], [2.1, 2.0]]
    monkeypatch.setattr(decode_step, "in_turn", lambda calls, **options: Rounds(times, 1.0, True))
    row = decode_step.in_python(its, referee=None)
    assert row.figures["per_layer_s"] == pytest.approx(seconds / decode_step.SMALL_LAYERS)
    assert row.met is met


def test_the_compiled_model_is_checked(its: decode_step.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    other = decode_step.case(decode_step.SMALL_CONTEXT + 1, 1, decode_step.SMALL_WIDTH, 2, decode_step.SMALL_DIM)

    def changed(model: Decoder) -> Decoder:
        torch.manual_seed(1)
        return Decoder(model.config).eval()

    monkeypatch.setattr(torch, "compile", changed)
    with pytest.raises(AssertionError, match="not close"):
        decode_step.beside_compiled(other, referee=None, name="float32")
