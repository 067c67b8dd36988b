"""The judge: claims, cases that fit them, shrinking, expected failures and scripts."""

import time

import pytest
import torch

import saccade as sc
from saccade.masks import Causal, Documents, Padding, Window
from saccade.testing import CASES
from saccade.testing.case import Case
from saccade.testing.judging import Declaration, Source, judge, read_claims
from saccade.testing.judging.declaration import kinds_of
from saccade.testing.judging.fitting import fitted
from saccade.testing.judging.recorded_calls import copied
from saccade.testing.judging.script_checks import definition
from saccade.testing.judging.shrinking import shrunk
from saccade.testing.oracle import attention

ORACLE = {"laws": ["oracle"], "dtypes": [torch.float32], "seed": 0}


def right(query, key, value, mask, *, scale=None):
    return sc.attention(query, key, value, mask, scale=scale)


def _dense(mask, length=8, batch=2):
    return mask.to_dense(length, length, batch=batch, heads=2)


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (sc.masks.Full(), ["none"]),
        (Causal(), ["causal"]),
        (Causal() & Window(2, 0), ["causal", "window"]),
        (Window(2, 1), ["window"]),
        (Padding((5, 8)), ["padding"]),
        (Documents((3, 5)), ["documents"]),
        (Documents((3, 5), rule=Causal()), ["causal", "documents"]),
        (Causal() & sc.masks.Strided(2), None),
    ],
    ids=str,
)
def test_the_kinds_of_a_mask_are_read_from_its_pairs(mask, kinds):
    assert kinds_of(_dense(mask)) == (None if kinds is None else set(kinds))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"dtypes": ("bfloat16",)}, "claims only bfloat16"),
        ({"dtypes": ("bfloat16", "float16")}, "claims only bfloat16 and float16"),
        ({"masks": ()}, "claims no masks"),
        ({"masks": ("window",)}, "claims only window masks"),
        ({"widths": (16, 64)}, "claims only widths 16, 64"),
        ({"lengths": {"multiple": 16}}, "claims lengths multiple 16"),
        ({"lengths": {"max": 7}}, "claims lengths max 7"),
        ({"gradients": False}, "claims no gradients"),
    ],
)
def test_what_is_not_claimed_has_a_reason(claims, reason):
    query = torch.randn(2, 2, 8, 4, requires_grad=True)
    assert Declaration(**claims).reasons(query, query, query, _dense(Causal())) == (reason,)
    assert Declaration().reasons(query, query, query, _dense(Causal())) == ()


def test_cases_are_fitted_to_claimed_widths_and_lengths():
    claims = Declaration(widths=(64, 128), lengths={"multiple": 16}, value_widths="same")
    by_name = {case.name: case for case in CASES}
    causal = fitted(by_name["causal"], claims)
    assert (causal.head_dim, causal.value_dim, causal.q_len, causal.kv_len) == (64, 64, 16, 16)
    assert causal.allowed.shape == (2, 4, 16, 16)
    documents = fitted(by_name["documents"], claims)
    assert (documents.head_dim, documents.q_len) == (64, 7)  # its mask has 7 tokens
    biased = fitted(by_name["biased-keys"], claims)
    assert biased.bias == (2, 1, 1, 16)


@pytest.mark.ci
def test_a_right_kernel_of_few_sizes_is_judged_and_right():
    def narrow(query, key, value, mask):
        assert query.shape[3] == 16
        assert query.shape[2] % 4 == 0
        return right(query, key, value, mask)

    claims = Declaration(widths=(16,), value_widths="same", lengths={"min": 4, "multiple": 4})
    found = judge(narrow, claims, **ORACLE | {"laws": ["oracle", "half_precision", "polarity", "scale"]})
    assert found.ok, found
    assert len(found.report.kept) > 20


def test_shrinking_ends_at_the_least_case_that_is_still_broken():
    case = Case("large", Causal(), batch=3, num_heads=8, num_kv_heads=4, q_len=70, kv_len=70, head_dim=32, value_dim=32)
    found = shrunk(case, lambda case: case.kv_len >= 33 and case.num_heads > 1, time.monotonic() + 30)
    assert (found.batch, found.num_heads, found.q_len, found.kv_len, found.head_dim) == (1, 2, 1, 33, 1)
    assert found.mask is None


def test_a_failure_is_expected_by_its_pattern_alone():
    def first_half(query, key, value, mask):
        return right(query, key, value, mask & (mask.cumsum(-1) <= 3))

    xfail = {"oracle[causal*]": "known", "oracle[one-token]": "mended"}
    found = judge(first_half, Declaration(xfail=xfail), cases=["causal", "one-token", "full"], **ORACLE)
    assert [result.case for result in found.unexpected] == ["full"]
    assert found.passing_xfail == ("oracle[one-token]",)
    assert "Expected to fail, but kept: oracle[one-token] (mended)" in str(found)
    assert not found.ok


def test_trials_are_repeated_by_a_seed_and_counted_if_time_runs_out():
    both = [judge(right, cases=["causal"], **ORACLE | {"seed": seed}).report for seed in (5, 5)]
    assert both[0].results == both[1].results
    found = judge(right, **ORACLE, minutes=0.0)
    assert found.skipped > 0
    assert found.summary == "No law could be tried."


def test_the_lse_and_mask_objects_of_the_plain_form_are_judged(tmp_path):
    (tmp_path / "mine.py").write_text("from saccade import attention, attention_with_lse", encoding="utf-8")
    claims = Declaration(with_lse="attention_with_lse", mask_objects=True)
    source = Source.parse(f"{tmp_path / 'mine.py'}::attention")
    wanted = {"laws": ["lse", "merge", "relative"], "cases": ["causal", "evicted-cache"], "dtypes": [torch.float32]}
    found = judge(source.load(), claims, source=source, seed=0, **wanted)
    assert found.ok, found
    assert {result.law for result in found.report.kept} >= {"lse", "merge"}


def test_the_definition_of_scripts_is_that_of_the_oracle():
    case = Case("all", Causal(), bias=(1, 4, 7, 7), softcap=2.0, scale=0.3, sink=True)
    query, key, value, bias, sink = case.inputs()
    options = {"bias": bias, "scale": case.scale, "softcap": case.softcap, "sink_logit": sink}
    got = definition(query, key, value, case.allowed, **options)
    torch.testing.assert_close(got, attention(query, key, value, case.allowed, **options)[0])


@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced", "empty"])
def test_recorded_copies_have_the_strides_of_the_call(view):
    x = torch.randn(3, 4, 6)
    views = {"transposed": x.mT, "expanded": x[:1].expand(5, 4, 6), "sliced": x[1:, ::2, 1::2], "empty": x[:0]}
    copy = copied(views[view])
    assert copy.stride() == views[view].stride()
    torch.testing.assert_close(copy, views[view])
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


KERNELS = {
    "varlen": (
        "def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, causal):\n    return 2 * q\n",
        {"form": "varlen"},
    ),
    "recurrent": (
        "def kernel(q, k, v, *, beta, initial_state, output_final_state):\n    return 0 * v, None\n",
        {"form": "recurrent", "settings": {"rule": "delta"}},
    ),
    "paged": (
        "def kernel(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):\n    return 0 * q\n",
        {"form": "paged", "settings": {"page_size": 4}},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_script_holds_the_adapter_of_each_form(name, tmp_path):
    text, fields = KERNELS[name]
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    source = Source.parse(f"{tmp_path / 'mine.py'}::kernel")
    found = judge(source.load(), Declaration.of(fields), source=source, cases=["causal"], **ORACLE)
    (example,) = found.counter_examples
    assert example.shows[0].startswith("call 1: the output"), example
    assert "saccade." not in example.script
    compile(example.script, "script", "exec")


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        (None, ["masks=['round']"], "masks must be among"),
        (None, ["options=['colour']"], "options must be among"),
        (None, ["with_lse='f'", "form='varlen'"], "be left out for forms other than the plain layout"),
        ("claims.toml", [], "claims must be TOML"),
    ],
)
def test_wrong_claims_are_refused(text, more, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims.toml").write_text("not toml", encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_claims(text, more)
