"""Error against time."""

import pytest

from saccade import viz
from saccade.mechanisms.comparison import Compared, Comparison


def _comparison(*rows: Compared) -> Comparison:
    return Comparison(rows, (1, 2, 64, 64), 2e-3, 1e6, (64,), False)


def test_a_point_for_each_mechanism_that_has_an_error(tmp_path):
    rows = [
        Compared("one $x^{$", error_median=0.02, seconds=1e-3),
        Compared("two", error_median=0.5, seconds=4e-3),
        Compared("exact in its limit", error_median=0.0, seconds=4e-3),
        Compared("refused", reasons=("no",)),
    ]
    figure = viz.tradeoff(_comparison(*rows), title="Measured")
    axes = figure.axes[0]
    points = axes.collections[0].get_offsets().tolist()
    assert points[:2] == [[1.0, 0.02], [4.0, 0.5]]
    assert 0 < points[2][1] < 0.01
    assert axes.get_ylim()[0] < points[2][1]
    said = [text.get_text() for text in axes.texts]
    assert said == ["1  one $x^{$", "2  two", "3  exact in its limit", "1", "2", "3", "exact", "close", "rough"]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.lines[0].get_xdata()[0] == 2.0
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [0.01, 0.1]
    assert viz.save(figure, tmp_path / "tradeoff.png").is_file()


def test_points_too_close_for_two_numbers_share_a_label():
    rows = [
        Compared("one", error_median=0.5, seconds=1e-3),
        Compared("two", error_median=0.1, seconds=1e-3),
        Compared("three", error_median=0.52, seconds=1.02e-3),
        Compared("four", error_median=0.5, seconds=2e-3),
    ]
    axes = viz.tradeoff(_comparison(*rows)).axes[0]
    numbers = {
        text.get_text(): text.xy for text in axes.texts if text.get_text()[0].isdigit() and "  " not in text.get_text()
    }
    assert numbers == {"1, 3": (1.0, 0.5), "2": (1.0, 0.1), "4": (2.0, 0.5)}


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"tradeoff: comparison must be a result of saccade\.compare; got list"):
        viz.tradeoff([])
    with pytest.raises(ValueError, match="tradeoff: comparison must contain a mechanism with an error; got none"):
        viz.tradeoff(_comparison(Compared("refused", reasons=("no",))))
