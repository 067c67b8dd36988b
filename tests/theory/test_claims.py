"""Every verdict stands, and could fall: a mistake in what a check tests turns it red."""

import re

import pytest
import torch
from tests.sampled import sampled
from tests.theory.mutants import MUTANTS

from saccade import theory
from saccade.support.language import in_language, translated
from saccade.theory.claim import VERDICTS
from saccade.theory.tutorials import TUTORIALS, row_in_chinese

EVERY = pytest.mark.parametrize("claim", theory.CLAIMS, ids=lambda claim: claim.name)
TRAINED = {claim.name for claim in theory.CLAIMS if claim.topic == "trained-layers"}
# A core for ten seconds or more. Training is tried by a few of its steps in every run, in test_training.py; of 100,000
# tokens, a window in place of all of them is, below.
LONG = {"a-hundred-thousand-tokens-are-infeasible", *TRAINED}


NAMES = re.compile(
    r"(?<![A-Za-z])(?:logits?|softmax|sigmoid|relu|tanh|exp|log|diag|cos|mqar|delta|nat|lse|inf|NaN|float16|float32|float64"
    "|bfloat16|LSTM|CBAM|Longformer|BigBird|PyTorch|Concat|head|Window|QKᵀ|AV|dS|GB|ln|tr|all-MiniLM-L6-v2)"
    r"(?![A-Za-z])"
)


def untranslated(name):
    """Return the English words of a Chinese name, other than names and formulas."""
    return re.findall(r"[A-Za-z]{3,}", NAMES.sub("", name))


@pytest.mark.ci
@pytest.mark.parametrize(
    "claim",
    [pytest.param(one, marks=[pytest.mark.slow] * (one.name in LONG), id=one.name) for one in theory.CLAIMS],
)
def test_its_verdict_stands(claim):
    measurements = claim.check(7)
    assert measurements
    assert [str(one) for one in measurements if not one.agrees] == []
    told = [said for tutorial in TUTORIALS for said in tutorial.says if said.claim == claim.name]
    assert {said.row for said in told} <= {one.what for one in measurements}
    with in_language("zh"):
        assert {row_in_chinese(said) for said in told} <= {translated(one.what) for one in measurements}
        assert [name for one in measurements if (name := untranslated(translated(one.what)))] == []
    if claim.verdict == "refuted":  # and what it says is among the measurements
        assert "!=" in {one.relation for one in measurements}


@pytest.mark.slow
def test_random_checks_run_with_several_seeds():
    drawn = [claim for claim in theory.CLAIMS if claim.topic in ("scaling", "paths", "features", "information")]
    verification = theory.verify(drawn, seed=100, seeds=2)
    assert [(finding.seed, finding.claim.name) for finding in verification.contradicted] == []


@pytest.mark.slow
def test_no_verdict_falls_by_bad_luck():
    verification = theory.verify(seed=20_000, seeds=20)
    assert [(finding.seed, finding.claim.name) for finding in verification.contradicted] == []
    assert verification.chance < 1e-2


def of_a_mutant(name, mistake):
    return [pytest.mark.slow] if name in TRAINED or (name in LONG and mistake != "a window") else []


@pytest.mark.ci
@pytest.mark.parametrize(
    "name, mistake, wrong",
    sampled([pytest.param(*one, marks=of_a_mutant(*one[:2]), id=f"{one[0]}: {one[1]}") for one in MUTANTS], 5),
)
def test_a_mistake_turns_it_red(name, mistake, wrong):
    measurements = theory.find(name).check(0, **wrong)
    assert measurements
    assert [one.agrees for one in measurements].count(False) > 0, mistake


def test_every_claim_has_a_mutant():
    assert {claim.name for claim in theory.CLAIMS} == {name for name, _, _ in MUTANTS}


@EVERY
def test_it_is_complete(claim):
    assert claim.verdict in VERDICTS
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.name)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", claim.topic)
    assert claim.statement.endswith(".")
    assert claim.latex
    assert claim.source
    assert claim.conditions or claim.verdict == "holds"
    assert not claim.conditions.endswith(".")
    assert claim.ingredients


def test_names_are_unique_and_topics_are_together():
    names = [claim.name for claim in theory.CLAIMS]
    assert len(names) == len(set(names))
    topics = [claim.topic for claim in theory.CLAIMS]
    assert sorted(topics, key=list(dict.fromkeys(topics)).index) == topics


def test_a_check_leaves_random_numbers_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    for name in ("squeeze-and-excitation-is-attention", "recurrent-influence-fades", "dropout-keeps-distributions"):
        theory.find(name).check()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_same_seed_measures_the_same():
    claim = theory.find("variance-of-dot-products")
    assert claim.check(3) == claim.check(3)
    assert claim.check(3) != claim.check(4)


def test_it_runs_where_gradients_are_off():
    with torch.no_grad():
        measurements = theory.find("attention-gradients").check()
    assert all(one.agrees for one in measurements)


@pytest.mark.parametrize(
    "seed, error, sentence",
    [
        (True, TypeError, r"^Claim\.check: seed must be an int of at least 0; got True\."),
        (1.5, TypeError, r"^Claim\.check: seed must be an int of at least 0; got 1\.5\."),
        (-1, ValueError, r"^Claim\.check: seed must be an int of at least 0; got -1\."),
    ],
)
def test_a_wrong_seed(seed, error, sentence):
    with pytest.raises(error, match=sentence):
        theory.find("softmax-jacobian").check(seed)


def test_an_unknown_ingredient():
    sentence = r"^Claim\.check: ingredients of worked-example must be among attention; got scale\."
    with pytest.raises(TypeError, match=sentence):
        theory.find("worked-example").check(scale=1.0)


def test_an_unknown_claim():
    with pytest.raises(ValueError, match=r"^find: name must be the name of a claim; got 'jacobian'\.\nHint: did you"):
        theory.find("jacobian")
    with pytest.raises(ValueError, match=r"Hint: theory\.CLAIMS lists all claims"):
        theory.find("perpetual motion")
    with pytest.raises(TypeError, match=r"^find: name must be a string; got int\."):
        theory.find(3)
