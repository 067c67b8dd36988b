"""The benchmark of code bases notices attention that is missing or wrong, and writes its verdicts."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.code_bases.__main__ import COMMAND, main
from benchmarks.code_bases.case import CASES, Case
from benchmarks.code_bases.cases_in import load
from benchmarks.code_bases.recorded import judge_record
from benchmarks.code_bases.replaced import judge_replacement
from benchmarks.code_bases.table import counts, rates, written
from benchmarks.code_bases.truth import true_weights
from benchmarks.generated_part import generated
from torch import nn


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(8, 24), attend

    def forward(self, x):
        return self.attend(*self.qkv(x).chunk(3, -1))


def plain(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def case(attend, attentions=1, **options):
    def make():
        return nn.Sequential(Attention(attend)), lambda model: model(torch.randn(2, 5, 8))

    return Case("base", "model", make, attentions, **options)


def a_part(q, k, v):
    return plain(q, k, v) + (q @ k.mT).softmax(-1)[:, :, :2] @ v[:, :2]


def test_right():
    judged = judge_record(case(plain))
    assert (judged.verdict, judged.degrees, judged.right) == ("right", ("scores",), 1)


def test_partial_and_reported():
    judged = judge_record(case(a_part, 2))
    assert (judged.verdict, judged.right, judged.attentions) == ("partial", 1, 2)
    assert "could not be recorded" in judged.why


def test_none():
    judged = judge_record(case(lambda q, k, v: (q @ k.mT).softmax(-1)[:, :, :2] @ v[:, :2]))
    assert judged.verdict == "none"


def test_silently_partial():
    def by_hand(q, k, v):
        return plain(q, k, v) + (plain(q, k, v).softmax(-1)[..., None] * v[..., None]).sum(-1)

    assert judge_record(case(by_hand, 3)).verdict == "silent"


def test_wrong():
    truth = lambda model, run: [torch.full((2, 5, 5), 0.2)]  # noqa: E731
    assert judge_record(case(plain, truth=truth)).verdict == "wrong"


def test_a_wrong_count_raises():
    with pytest.raises(AssertionError, match="2 attention calls expected, and 1 found"):
        judge_record(case(plain, 2))


def test_truth_of_torch_functions():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    own = layer(x, x, x, average_attn_weights=False)[1]
    found = true_weights(layer, lambda layer: layer(x, x, x, need_weights=False))
    torch.testing.assert_close([one.rows for one in found], [own])
    q, k, v = torch.randn(3, 2, 2, 5, 8)

    class Sdpa(nn.Module):
        def forward(self):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    (one,) = true_weights(Sdpa(), lambda model: model())
    torch.testing.assert_close(one.rows.float() @ v, Sdpa()())


@pytest.mark.parametrize(("change", "verdict"), [(None, "silent"), (0.5, "wrong"), (TypeError("no"), "broken")])
def test_replacements_that_do_something_else(monkeypatch, change, verdict):
    def replace(model):
        if isinstance(change, Exception):
            raise change
        if change is not None:
            model[0].attend = lambda q, k, v: change * plain(q, k, v)

    monkeypatch.setattr("saccade.replace_attention", replace)
    assert judge_replacement(case(plain)).verdict == verdict


def test_replaced_layers():
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(layer), lambda model: model(torch.randn(2, 5, 8))

    assert judge_replacement(Case("torch", "layer", make, 1)).verdict == "equal"


def test_styles_have_one_name_each():
    load()
    assert len({one.code_base for one in CASES.values()}) >= 45
    assert sum(one.is_rewritten for one in CASES.values()) >= 30


@pytest.mark.ci
def test_every_rewritten_style_is_recorded(tmp_path):
    load()
    for one in CASES.values():
        if one.is_rewritten:
            assert judge_record(one).verdict == "right", one.key


@pytest.mark.ci
def test_the_command(tmp_path):
    path = tmp_path / "results.json"
    assert main(["minGPT", "nanoGPT", "--only", "record", "--results", str(path), "--jobs", "1"]) == 0
    verdicts = {key: one["record"]["verdict"] for key, one in json.loads(path.read_text("utf-8"))["cases"].items()}
    assert verdicts == dict.fromkeys(("minGPT: CausalSelfAttention", "nanoGPT: CausalSelfAttention with SDPA"), "right")


def test_the_table():
    right = {"verdict": "right", "degrees": ["scores", "calls"], "right": 1, "attentions": 1, "why": ""}
    one = {
        "code_base": "A",
        "name": "a",
        "is_rewritten": False,
        "record": right,
        "replace": {"verdict": "equal", "why": ""},
    }
    two = {
        **one,
        "name": "b",
        "record": {**right, "verdict": "partial"},
        "replace": {"verdict": "refused", "why": "no"},
    }
    results = {"versions": {"torch": "2"}, "cases": {"A: a": one, "A: b": two}}
    assert rates(results, "record") == (1, 2, 0, 1)
    english, chinese = written(results, "en"), written(results, "zh")
    assert "| A | a, b | 1 right, 1 partly, reported | scores, calls | 1 equal, 1 refused |" in english
    assert "Recorded right: 1 of 2 models (50%), 0 of 1 code bases." in english
    assert "记录正确：2 个模型中的 1 个（50%）" in chinese


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured():
    return json.loads((ROOT / "docs" / "code-bases.json").read_text("utf-8"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_what_was_measured(measured, language):
    page = (ROOT / "docs" / language / "code-bases.md").read_text("utf-8")
    assert generated(page, COMMAND) == written(measured, language)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_says_what_was_measured(measured, name):
    (recorded, models, _, bases), (replaced, *_) = (rates(measured, what) for what in ("record", "replace"))
    readme = (ROOT / name).read_text("utf-8")
    figures = (f"[{bases} ", f"{models} ", f"{recorded} ", f"{replaced} ")
    sentence = next(part for part in readme.split("\n\n") if "code-bases.md" in part)
    assert all(figure in sentence for figure in figures)
    assert set(counts(measured)["replace"]) == {"equal", "refused"}
