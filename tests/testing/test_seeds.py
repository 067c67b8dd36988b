"""A run of the kit draws its values from one seed, which the report tells."""

import dataclasses

import torch

from saccade import testing
from saccade.testing.plain_kernel import attend

CASE = next(case for case in testing.CASES if case.name == "causal")


def queries_of(seed):
    """The queries that a function gets in a run, and the report."""
    seen = []

    def recording(query, key, value, mask):
        seen.append(query.clone())
        return attend(query, key, value, mask)

    return seen, testing.check(recording, cases=[CASE], laws=["oracle"], dtypes=[torch.float64], seed=seed)


def test_each_run_draws_another_seed():
    (first, report), (second, other) = queries_of(None), queries_of(None)
    assert report.seed != other.seed
    assert not torch.equal(first[0], second[0])


def test_the_seed_of_a_report_repeats_the_run():
    first, report = queries_of(None)
    second, again = queries_of(report.seed)
    assert torch.equal(first[0], second[0])
    assert again == report
    assert f"seed={report.seed} repeats this run" in str(report)


def test_seed_zero_leaves_a_case_as_it_is():
    assert CASE.with_seed(0) is CASE
    assert torch.equal(queries_of(0)[0][0], CASE.inputs().query)


def test_a_case_with_another_seed_keeps_its_pairs():
    fresh = dataclasses.replace(CASE)
    other = fresh.with_seed(3)
    assert other.problem().seed == 3
    assert torch.equal(other.allowed, fresh.allowed)
    assert fresh.with_seed(4).allowed is fresh.allowed
