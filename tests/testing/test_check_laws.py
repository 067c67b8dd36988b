"""The laws find every past bug and every cheat by name, and accuse no correct kernel at the sizes of models."""

import pytest
import torch
from tests.sampled import MANY, sampled
from torch.nn import functional as F

from saccade import testing
from saccade.testing import check_laws
from saccade.testing.cheats import CHEATS
from saccade.testing.past_bugs import PAST_BUGS
from saccade.testing.plain_kernel import attend

EVERY = (*PAST_BUGS, *CHEATS)


@pytest.mark.ci
@pytest.mark.parametrize("bug", sampled(EVERY, 2), ids=lambda bug: bug.mistake)
def test_a_past_bug_is_found(bug):
    found = check_laws.find_bug(bug)
    assert found is not None
    assert found.law in bug.laws


def test_every_law_at_the_sizes_of_models_finds_a_bug():
    assert {law.name for law in testing.SIZE_LAWS} <= {name for bug in EVERY for name in bug.laws}


def test_every_bug_says_what_it_is():
    assert all(bug.mistake.endswith(".") for bug in EVERY)
    assert len({bug.mistake for bug in EVERY}) == len(EVERY)
    assert all("#" in bug.where or bug.where == "made" for bug in PAST_BUGS)
    assert all(bug.where == "cheat" for bug in CHEATS)


def torchs(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def in_blocks(query, key, value, mask):
    """Attention over blocks of 100 keys, with a running maximum."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    high = query.new_full((*query.shape[:3], 1), -torch.inf, dtype=wide)
    total = out = torch.zeros_like(high)
    for first in range(0, key.shape[2], 100):
        block = slice(first, first + 100)
        scores = (query.to(wide) @ key[:, :, block].mT.to(wide)) * query.shape[3] ** -0.5
        scores = scores.masked_fill(~mask[..., block], -torch.inf)
        new = torch.maximum(high, scores.amax(-1, keepdim=True))
        level = new.masked_fill(new.isneginf(), 0.0)
        share, powers = (high - level).exp(), (scores - level).exp()
        out, total, high = out * share + powers @ value[:, :, block].to(wide), total * share + powers.sum(-1, True), new
    return (out / total.masked_fill(total == 0, 1.0)).to(query.dtype)


@pytest.mark.parametrize(
    ("kernel", "dtypes"),
    [
        pytest.param(torchs, [torch.float32], marks=MANY),  # with all dtypes it takes minutes
        *(pytest.param(kernel, None, marks=pytest.mark.slow) for kernel in (torchs, attend, in_blocks)),
    ],
)
def test_a_correct_kernel_is_not_accused(kernel, dtypes):
    report = testing.check(kernel, sizes="models", dtypes=dtypes, seed=0)
    assert [str(result) for result in report.broken] == []
    assert {result.law for result in report.kept} == {law.name for law in testing.SIZE_LAWS}


def test_sizes_choose_the_laws():
    def laws(**options):
        return testing.check(torchs, dtypes=[torch.float32], **options, seed=0).laws

    assert laws(cases=["causal"]) == testing.LAWS
    assert laws(cases=["causal"], laws=["oracle", "large_scores"])[1].name == "large_scores"
    with pytest.raises(ValueError, match=r"^check: sizes must be"):
        laws(sizes="large")
    for other in ({"laws": ["oracle"]}, {"cases": ["causal"]}):
        with pytest.raises(ValueError, match=r"^check: sizes must be None if laws= is given"):
            laws(sizes="models", **other)
