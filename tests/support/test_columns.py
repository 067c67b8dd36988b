"""Text is padded to the columns that it takes in a terminal."""

from saccade.support.columns import display_width, left_aligned, right_aligned


def test_chinese_characters_take_two_columns():
    assert display_width("窗口 4") == 6
    assert left_aligned("窗口", 6) == "窗口  "
    assert right_aligned("窗口", 6) == "  窗口"
    assert left_aligned("window", 3) == right_aligned("window", 3) == "window"
