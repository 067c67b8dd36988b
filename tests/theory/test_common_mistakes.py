"""The five common mistakes are found, and it is the mistake that is found."""

import pytest

import saccade as sc
from saccade import testing, theory

EACH = pytest.mark.parametrize("mistake", theory.MISTAKES, ids=lambda mistake: mistake.name)


@EACH
def test_it_is_found(mistake):
    report = mistake.check()
    assert [result.law for result in report.broken] == [mistake.caught_by]
    assert not report.kept


@EACH
def test_without_the_mistake_the_law_holds(mistake):
    right = sc.attention if mistake.case != "full" else lambda query, key, value, mask: sc.attention(query, key, value)
    assert mistake.check(right).ok


@EACH
def test_the_message_is_the_counter_example(mistake):
    assert mistake.message.startswith(f"{mistake.caught_by}[{mistake.case}-float")
    assert " broken: " in mistake.message


def test_each_differs_from_right_attention_in_one_place():
    cases = [case for case in testing.CASES if case.name == "full"]
    laws = [law for law in testing.LAWS if law.name == "oracle"]
    right = theory.MISTAKES[4].function  # wrong in what it stores, not in what it gives
    assert testing.check(right, gqa=False, cases=cases, laws=laws, seed=0).ok
