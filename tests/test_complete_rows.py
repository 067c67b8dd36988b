"""Columns in as few ranges as can be."""

from saccade.complete_rows import joined


def test_neighbouring_ranges_of_one_step_become_one() -> None:
    assert joined((range(3), range(3, 5), range(6, 7))) == (range(5), range(6, 7))
    assert joined((range(1, 8, 3), range(10, 14, 3))) == (range(1, 14, 3),)
    assert joined((range(0, 4, 2), range(4, 6))) == (range(0, 4, 2), range(4, 6))
    assert joined(()) == ()
