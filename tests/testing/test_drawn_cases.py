"""Cases that are drawn: from their seed alone, and of sizes that no list has."""

import pytest

from saccade import testing
from saccade.testing.drawn_cases import DRAWN_CASES, drawn

KNOWN = {(case.q_len, case.kv_len, case.head_dim) for case in (*testing.CASES, *testing.SIZE_CASES)}


def sizes(case):
    return case.q_len, case.kv_len, case.head_dim, case.num_heads, str(case.mask)


@pytest.mark.parametrize("case", DRAWN_CASES, ids=str)
def test_a_case_is_drawn_from_its_seed(case):
    assert sizes(drawn(case)) == sizes(drawn(case))
    assert sizes(drawn(case.with_seed(1000))) != sizes(drawn(case))
    assert (drawn(case).name, drawn(case).seed) == (case.name, case.seed)


def test_most_drawn_sizes_are_in_no_list():
    chosen = [drawn(case.with_seed(seed)) for seed in range(0, 800, 8) for case in DRAWN_CASES]
    unknown = [case for case in chosen if (case.q_len, case.kv_len, case.head_dim) not in KNOWN]
    assert len(unknown) > 0.95 * len(chosen)
    assert {type(case.mask).__name__ for case in chosen} >= {"NoneType", "Causal", "Window", "Padding", "Documents"}
    assert all(case.q_len <= case.kv_len and case.num_heads % case.num_kv_heads == 0 for case in chosen)
