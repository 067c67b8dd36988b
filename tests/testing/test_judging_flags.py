"""Kernels of ``f(q, k, v, causal)``: the flag is read from the signature, and each law is tried on a case they take."""

import itertools
import sys
import types

import pytest
import torch

from saccade.testing import adapters
from saccade.testing.judging import Declaration, Source, judge
from saccade.testing.judging.judgement import CORE_LAWS
from saccade.testing.judging.signature import mask_settings

KERNELS = """
import torch

def mine(q, k, v, causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v

def buggy(q, k, v, causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(2 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v

def flagged(q, k, v, is_causal=False):
    return mine(q, k, v, is_causal)

def banded(q, k, v, causal, window_size):
    return mine(q, k, v, causal)

def masked(q, k, v, attn_mask, is_causal=False):
    return mine(q, k, v, is_causal)

def full(q, k, v, scale=None):
    return (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1) @ v

def always_causal(q, k, v):
    return mine(q, k, v, True)
"""
PLAIN = Declaration(groups=False, decoding=False, dtypes=("float64",), empty=False)


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return lambda name: Source.parse(f"mine.py::{name}")


@pytest.mark.parametrize(
    "name, inferred",
    [
        ("mine", 'masks = "causal"'),
        ("flagged", 'masks = "causal", mask_name = "is_causal"'),
        ("banded", 'masks = "window"'),
        ("masked", ""),
    ],
)
def test_a_flag_without_a_mask_is_read_from_the_signature(source, name, inferred):
    found = judge(source(name).load(), PLAIN, laws=["oracle"], cases=["causal"], seed=0)
    assert found.inferred == inferred
    assert (f"settings = {{ {inferred} }}" in str(found)) == bool(inferred)
    assert found.ok == bool(inferred)


@pytest.mark.parametrize(
    "kernel, settings",
    [
        (lambda q, k, v: q, {"masks": "none"}),
        (lambda q, k, v, scale=None: q, {"masks": "none"}),
        (lambda q, k, v, dropout=0.0, training=True: q, {"masks": "none"}),
        (lambda q, k, v, **options: q, {"masks": "none"}),
        (lambda q, k, v, allowed: q, {}),
        (lambda q, k, v, m=None: q, {}),
        (lambda q, k, v, my_mask=None, causal=False: q, {}),
        (lambda *arguments: arguments, {}),
        (lambda q, k, v, dropout_p=0.0, attn_mask=None: q, {"mask_name": "attn_mask"}),
        (lambda q, k, v, *, mask: q, {"mask_name": "mask"}),
        (lambda q, k, v, scale=None, causal=False: q, {"masks": "causal"}),
        (lambda q, k, v, causal=False, mask_value=-1e4: q, {"masks": "causal"}),
        (torch.nn.functional.scaled_dot_product_attention, {}),
    ],
)
def test_how_a_mask_is_passed_is_read_from_the_signature(kernel, settings):
    assert mask_settings(kernel) == settings


def test_a_kernel_without_a_mask_is_judged_on_full_attention_alone(source):
    laws = ["oracle", "causality", "scale"]
    right = judge(source("full").load(), PLAIN, source=source("full"), laws=laws, cases=["causal", "full"], seed=0)
    assert right.inferred == 'masks = "none"'
    assert "its signature has no mask and no causal flag: judged on full attention alone" in str(right)
    assert [right.verdict(law) for law in right.report.laws] == ["kept", "not tried", "kept"]
    assert right.ok, right
    wrong = judge(source("always_causal").load(), PLAIN, laws=["oracle"], cases=["causal", "full"], seed=0)
    assert {result.case for result in wrong.unexpected} == {"full"}


def test_what_the_claims_say_is_not_overruled(source):
    claims = Declaration.of(vars(PLAIN) | {"settings": {"masks": "none"}})
    assert judge(source("mine").load(), claims, laws=["oracle"], cases=["full"], seed=0).inferred == ""


def test_a_right_kernel_is_right_and_a_bug_in_its_mask_is_found(source):
    right = judge(source("mine").load(), PLAIN, source=source("mine"), laws=[*CORE_LAWS, "sensitivity"], seed=0)
    assert right.ok, right
    wrong = judge(source("buggy").load(), PLAIN, source=source("buggy"), laws=list(CORE_LAWS), seed=0)
    assert {result.law for result in wrong.unexpected} >= {"oracle", "causality"}


def test_core_laws_are_tried_before_the_time_is_up(source, monkeypatch):
    looks = itertools.count()  # each look at the clock takes a second
    clock = types.SimpleNamespace(monotonic=lambda: float(next(looks)))
    monkeypatch.setattr(sys.modules["saccade.testing.judging.judge"], "time", clock)
    found = judge(source("mine").load(), PLAIN, minutes=2.0, seed=3)
    verdicts = {law.name: found.verdict(law) for law in found.report.laws}
    assert [verdicts[name] for name in CORE_LAWS] == ["kept"] * 3
    assert found.skipped > 0


def test_a_law_that_was_not_reached_is_told_apart_from_one_that_is_not_offered(source):
    claims = Declaration.of(vars(PLAIN) | {"settings": {"masks": "none"}})
    refused = judge(source("flagged").load(), claims, laws=["oracle", "pure"], cases=["causal", "full"], seed=0)
    assert refused.ok, refused  # no mask at all is taken
    refused = judge(source("flagged").load(), claims, laws=["oracle", "linear"], cases=["causal"], seed=0)
    assert not refused.ok
    assert refused.incomplete.startswith("not offered by the kernel: takes no mask")
    whole = judge(source("mine").load(), PLAIN, laws=["linear", "oracle"], cases=["causal"], minutes=0.0, seed=0)
    assert "not reached in the time (0 of 1 trials ran)" in str(whole)


def test_a_judgement_without_the_oracle_is_incomplete(source):
    claims = Declaration.of(vars(PLAIN) | {"settings": {"masks": "none"}})
    found = judge(source("flagged").load(), claims, laws=["oracle", "declined"], cases=["causal", "biased"], seed=0)
    assert found.verdict(found.report.laws[0]) == "not tried"
    assert found.report.kept, found
    assert not found.ok
    assert found.summary.startswith("Incomplete: the law oracle was not tried, not offered by the kernel")


def test_queries_that_see_no_key_are_the_last_choice(source):
    claims = Declaration.of(vars(PLAIN) | {"decoding": True})
    found = judge(source("buggy").load(), claims, source=source("buggy"), laws=["oracle"], seed=0)
    (example,) = found.counter_examples
    lengths = [int(part.split(",")[2]) for part in example.inputs.split("[")[1:3]]
    assert lengths[0] <= lengths[1], example.inputs  # aligned to the last key, so that every query sees one
    assert "mine.py" in example.script


def test_paths_in_scripts_are_relative_to_the_current_folder(source, tmp_path):
    lines = "\n".join(source("mine").lines())
    assert str(tmp_path) not in lines
    assert "'./mine.py'" in lines


def test_options_of_the_adapter_are_refused_by_check_with_the_call_that_takes_them():
    form = adapters.layout(lambda q, k, v, mask: torch.zeros_like(q))
    with pytest.raises(TypeError, match=r"adapters.layout\(kernel, gqa=False\).check\(\)"):
        form.check(gqa=False)
