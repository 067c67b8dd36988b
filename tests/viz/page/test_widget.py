"""The page in a notebook holds what the page in a file holds."""

import sys

import pytest
from tests.viz.page.layer_kinds import attention
from tests.viz.page.page_reader import Page, elements_of

from saccade import masks
from saccade.viz import report, report_widget

anywidget = pytest.importorskip("anywidget")


def test_its_traits_are_what_a_file_holds(tmp_path):
    matrix, options = attention(6, 6, masks.Causal()), {"tokens": list("abcdef"), "title": "It", "size": 4_000_000}
    options |= {"batch": 1, "heads": [(0, 2)], "language": "zh", "names": ("one", "two"), "other": attention(6, 6)}
    page = Page(report(matrix, tmp_path / "page.html", other_tokens=list("uvwxyz"), **options))
    widget = report_widget(matrix, other_tokens=list("uvwxyz"), height=500, **options)
    assert isinstance(widget, anywidget.AnyWidget)
    assert widget.parts == page.parts
    assert widget.height == 500
    assert widget.style == next(text for tag, _, text in elements_of(page.text) if tag == "style")
    for name in ("parts", "style", "height"):
        assert widget.has_trait(name)
        assert widget.traits(sync=True)[name] is not None
    assert "export default { render };" in widget._esm


def test_two_widgets_are_two():
    one, other = report_widget(attention(3, 3)), report_widget(attention(4, 4))
    assert one.parts != other.parts
    assert one.height == 760


def test_without_anywidget_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(ImportError, match=r"report_widget: anywidget must be installed") as caught:
        report_widget(attention(3, 3))
    assert "pip install 'saccade-attention[notebook]'" in str(caught.value)
