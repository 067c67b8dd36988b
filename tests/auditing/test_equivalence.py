"""Sameness: right models are not accused, and faults are found where they are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.stepwise_model import Small, SmallRunner
from tests.sampled import sampled
from torch import Tensor, nn

from saccade import masks
from saccade.auditing.equivalence import check_equivalence


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.ci
@pytest.mark.parametrize(
    "make, broken, silent",
    sampled(
        [
            pytest.param(*case)
            for case in [
                (zoo.llama, zoo.LEAKY, set()),
                (zoo.gpt2, zoo.LEAKY, {"positions shifted"}),
                (zoo.mistral, zoo.BESIDE, set()),
                (zoo.gemma3, zoo.BESIDE, set()),
                (zoo.decoder, set(), zoo.BESIDE),
                (lambda: zoo.decoder(position_encoding="alibi"), set(), zoo.BESIDE),
                (lambda: zoo.decoder(position_encoding="learned"), set(), zoo.BESIDE | {"positions shifted"}),
                (lambda: zoo.decoder(position_encoding="relative"), set(), zoo.BESIDE),
                (lambda: zoo.decoder(mask=masks.sliding_window(8)), set(), zoo.BESIDE),
                (zoo.encoder, set(), zoo.NO_CACHE | zoo.BESIDE | {"padded at the left"}),
                (lambda: SmallRunner(Small()), set(), zoo.BESIDE - {zoo.ONES} | {"positions shifted"}),
                # as they are published: what is broken in them is broken
                (zoo.bert, zoo.LEAKY | {"packed"}, zoo.NO_CACHE),
                (zoo.gpt_oss, zoo.LEAKY | {"packed"}, set()),
                (zoo.opt, zoo.LEAKY | {"packed"}, {"positions shifted"}),
                (
                    zoo.falcon_mamba,
                    {"steps: one token first", "steps: two halves", "steps: pieces of 5"},
                    zoo.BESIDE | {"packed", "positions shifted", "cache cropped"},
                ),
            ]
        ],
        2,
    ),
    ids=[
        *["llama", "gpt2", "mistral", "gemma3", "rotary", "alibi", "learned", "relative", "window", "encoder", "small"],
        *["bert", "gpt-oss", "opt", "falcon-mamba"],
    ],
)
def test_models_are_accused_of_what_they_do_and_of_nothing_else(
    make: Callable[[], Any], broken: set[str], silent: set[str]
) -> None:
    pairs = check_equivalence(make(), zoo.tokens(), **zoo.EVERYTHING)
    assert zoo.named(pairs, "broken") == broken
    assert zoo.named(pairs, "not answered") == silent
    assert zoo.STEP_NAMES | {"one by one = in a batch", "in training, without dropout"} <= {pair.name for pair in pairs}
    for pair in pairs:
        assert (pair.where is not None) == (pair.verdict == "broken")
        assert math.isnan(pair.difference) == (pair.verdict == "not answered")


@pytest.mark.parametrize("name", ["packed", zoo.ONES])
def test_a_packed_model_that_reads_across_texts_breaks_where_the_second_begins(name: str) -> None:
    pair = next(pair for pair in check_equivalence(zoo.gpt_oss(), zoo.tokens(), packed=[9, 14]) if pair.name == name)
    assert pair.where == (0, 9)
    assert pair.difference > 0.1
    assert pair.why == "true float64"  # where its experts are computed one by one


def test_windows_are_cut_around() -> None:
    names = {pair.name for pair in check_equivalence(zoo.mistral(), zoo.tokens(), cache=True)}
    assert {f"steps: cut at {cut}, window 8" for cut in (7, 8, 9)} <= names


ALL_STEPS = zoo.STEP_NAMES | {f"steps: cut at {cut}, window 6" for cut in (5, 6, 7)}
FAULTS = {  # claims that break, and the first row that differs in one of them
    "position": (ALL_STEPS, "steps: two halves", (0, 11)),
    "corner": (ALL_STEPS, "steps: two halves", (0, 11)),
    "short": (ALL_STEPS, "steps: one token first", (0, 5)),
    "padding": ({"padded at the left"}, "padded at the left", (0, 0)),
    "texts": ({"packed", zoo.ONES}, "packed", (0, 9)),
    "training": ({"in training, without dropout"}, "in training, without dropout", (0, 1)),
    "batch": (
        ALL_STEPS | {"one by one = in a batch", "padded at the right", "padded at the left", "packed", zoo.ONES},
        "one by one = in a batch",
        (0, 0),
    ),
    "dtype": ({"float32 = float64"}, "float32 = float64", (0, 1)),
    "fork": ({"cache forked"}, "cache forked", (0, 11)),
    "crop": ({"cache cropped"}, "cache cropped", (0, 11)),
    "reorder": ({"cache reordered"}, "cache reordered", (0, 11)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_breaks_its_claims_and_no_others(fault: str) -> None:
    broken, name, where = FAULTS[fault]
    pairs = check_equivalence(SmallRunner(Small(fault)), zoo.tokens(), **zoo.EVERYTHING)
    assert zoo.named(pairs, "broken") == broken
    assert next(pair for pair in pairs if pair.name == name).where == where


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"dtype"}))
def test_faults_are_found_where_there_is_no_float64(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: nn.Module) -> nn.Module:
        raise RuntimeError("no float64 here")

    monkeypatch.setattr(Small, "double", refused)
    pairs = check_equivalence(SmallRunner(Small(fault)), zoo.tokens(), **zoo.EVERYTHING)
    assert zoo.named(pairs, "broken") == FAULTS[fault][0]
    assert all(pair.why == "float32; in float64: RuntimeError: no float64 here" for pair in pairs if pair.where)


def test_one_implementation_of_attention_is_held_against_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {pair.name: pair for pair in check_equivalence(zoo.llama(), zoo.tokens(), against=["eager", "sdpa"])}
    assert pairs["attention by eager"].verdict == "held"
    assert pairs["attention by sdpa"].why == "the model already uses sdpa"
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    right = modeling.eager_attention_forward

    def unscaled(*given: Any, scaling: float, **more: Any) -> Any:
        return right(*given, scaling=1.0, **more)

    monkeypatch.setattr(modeling, "eager_attention_forward", unscaled)
    assert zoo.named(check_equivalence(zoo.llama(), zoo.tokens(), against=["eager"]), "broken") == {
        "attention by eager"
    }


def test_positions_that_are_not_relative_after_all_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    right = modeling.LlamaModel.forward

    def forward(self: nn.Module, *given: Any, position_ids: Tensor | None = None, **more: Any) -> Any:
        places = None if position_ids is None else position_ids.square()
        return right(self, *given, position_ids=places, **more)

    monkeypatch.setattr(modeling.LlamaModel, "forward", forward)
    assert "positions shifted" in zoo.named(check_equivalence(zoo.llama(), zoo.tokens()), "broken")


OURS = [(zoo.llama, True), (zoo.gpt_oss, True), (zoo.bert, True), (zoo.falcon, False)]


@pytest.mark.parametrize("make, is_held", OURS)
def test_a_broken_claim_says_how_our_kernel_holds_it(make: Callable[[], Any], is_held: bool) -> None:
    model, ids = make(), zoo.tokens()
    pairs = {pair.name: pair for pair in check_equivalence(model, ids, packed=[9, 14])}
    assert pairs[zoo.ONES].verdict == "broken"
    assert bool(pairs[zoo.ONES].remedy) == is_held
    assert all(not pair.remedy for pair in pairs.values() if pair.verdict != "broken")
    if is_held:
        assert "mask=Documents([9, 14]))" in pairs[zoo.ONES].remedy
        exec(f"import saccade; from saccade.masks import Documents; {pairs[zoo.ONES].remedy}", {"model": model})
        places = torch.cat([torch.arange(9), torch.arange(14)])[None]
        out = zoo.rows(model(input_ids=ids[:1], position_ids=places, attention_mask=torch.ones(1, 23)))
        model.set_attn_implementation("eager")
        torch.testing.assert_close(out[:, 9:], zoo.rows(model(input_ids=ids[:1, 9:])), atol=2e-5, rtol=1e-4)
