"""Options that a kernel's claims leave open are tried with one call each, and left out with a note if it raises."""

import shlex

import pytest
import torch
from tests.sampled import sampled

import saccade as sc
from saccade.testing.judging import Declaration, judge, read_claims
from saccade.testing.judging.first_calls import first_calls
from saccade.testing.judging.kernel import Kernel

FEW = {
    "laws": ["oracle", "gradients_of_inputs", "zero_lengths"],
    "cases": ["causal", "none", "causal-extend", "widths-differ", "padding", "documents", "no-heads-share"],
    "seed": 0,
}


def right(q, k, v, mask):
    return sc.attention(q, k, v, mask)


def only(condition):
    """Return a right kernel that raises an error unless a condition on its inputs holds."""

    def kernel(q, k, v, mask):
        if not condition(q, k, v, mask):
            raise ValueError("not these inputs")
        return right(q, k, v, mask)

    return kernel


def flagged(q, k, v, causal=False):
    if not causal:
        raise ValueError("causal only")
    return right(q, k, v, sc.masks.Causal())


def from_the_first_key(q, k, v, causal=False):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return right(q, k, v, mask.tril() if causal else mask)


def _is_causal(q, k, v, mask):
    distance = torch.arange(k.shape[2]) - torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    return mask.numel() == 0 or bool(mask.all()) or torch.equal(mask, (distance <= 0).expand_as(mask))


KERNELS = {
    "groups": (only(lambda q, k, v, mask: q.shape[1] == k.shape[1]), {"groups": False}),
    "decoding": (only(lambda q, k, v, mask: q.shape[2] == k.shape[2]), {"decoding": False}),
    "alignment": (from_the_first_key, {"decoding": False}),
    "full": (flagged, {"full": False}),
    "masks": (only(_is_causal), {"masks": ("causal",)}),
    "dtypes": (only(lambda q, *others: q.dtype != torch.float64), {"dtypes": ("float32", "bfloat16", "float16")}),
    "half": (only(lambda q, *others: q.dtype == torch.bfloat16), {"dtypes": ("bfloat16",)}),
    "widths": (only(lambda q, *others: q.shape[3] % 32 == 0), {"widths": (32, 64, 96, 128, 192, 256)}),
    "value_widths": (only(lambda q, k, v, mask: q.shape[3] == v.shape[3]), {"value_widths": "same"}),
    "lengths": (only(lambda q, k, v, mask: q.shape[2] % 64 == k.shape[2] % 64 == 0), {"lengths": {"multiple": 64}}),
    "gradients": (lambda q, k, v, mask: right(q, k, v, mask).detach(), {"gradients": False}),
    "empty": (only(lambda q, k, v, mask: mask.numel() > 0), {"empty": False}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_raises_an_error_is_left_out_with_a_note(name):
    kernel, claims = KERNELS[name]
    found = first_calls(Kernel.of(kernel, Declaration()))
    assert found.declaration == Declaration(**claims)
    (note,) = (note for note in found.notes if "declared for you" in note)
    assert "; claim it with --claim " in note


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(KERNELS, 3))
def test_what_is_left_out_breaks_no_law_and_what_is_claimed_does(name):
    kernel, _ = KERNELS[name]
    found = judge(kernel, **FEW)
    assert found.ok, found
    (note,) = (note for note in found.notes if "declared for you" in note)
    assert str(found).index(note) < str(found).index("verdict")
    assert found.to_json()["notes"] == list(found.notes)
    claims = read_claims(None, shlex.split(note.rpartition("--claim ")[2]))
    claimed = judge(kernel, claims, **FEW)
    assert note not in claimed.notes
    assert claimed.unexpected, claimed


def test_a_kernel_that_takes_everything_gets_no_note():
    found = first_calls(Kernel.of(right, Declaration()))
    assert (found.declaration, found.notes) == (Declaration(), ())


def test_what_is_declared_is_not_called():
    def refusing(q, k, v, mask):
        assert q.shape[1] == k.shape[1] == 2, "grouped"
        assert q.shape[2] == k.shape[2] > 0, "lengths"
        assert q.dtype == torch.float32, "dtype"
        return right(q, k, v, mask)

    claims = Declaration(groups=False, decoding=False, empty=False, dtypes=("float32",))
    found = first_calls(Kernel.of(refusing, claims))
    assert (found.declaration, found.notes) == (claims, ())


def test_a_kernel_that_takes_nothing_is_judged_as_it_is():
    found = judge(only(lambda *inputs: False), laws=["oracle"], cases=["causal"], seed=0)
    assert found.notes == ()
    assert found.unexpected


def test_half_precision_is_tried_by_no_more_laws_than_before():
    kernel, _ = KERNELS["dtypes"]
    found = judge(kernel, laws=["oracle", "dtypes"], cases=["causal"], seed=0)
    dtypes = {law: {r.dtype for r in found.report.results if r.law == law} for law in ("oracle", "dtypes")}
    assert dtypes["oracle"] == {torch.float32}
    assert dtypes["dtypes"] == {torch.float32, torch.bfloat16, torch.float16}


def test_a_law_that_no_trial_kept_gives_the_reason_of_the_trials_that_ran():
    kernel, _ = KERNELS["gradients"]
    found = judge(kernel, Declaration(masks=("causal",)), laws=["gradients_of_inputs"], seed=0)
    (law,) = found.report.laws
    assert found.why(law) == "not offered by the kernel: has no backward pass"
