"""report_widget(): an attention report as a notebook widget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import missing_extra
from saccade.support.validation import check_int
from saccade.viz.page.document import code, style
from saccade.viz.page.html_report import Language, checked_options, page_parts
from saccade.viz.page.texts import Tokens


@argument_hints({})
def report_widget(
    given: object,
    *,
    tokens: Tokens = None,
    other: object = None,
    other_tokens: Tokens = None,
    names: tuple[str, str] = ("first", "second"),
    title: str = "Attention",
    batch: int = 0,
    heads: Iterable[tuple[int, int]] | None = None,
    language: Language | None = None,
    size: int = 4_000_000,
    height: int = 760,
) -> Any:
    """Return an attention report as a widget for Jupyter, VS Code, Colab and marimo; see `report`.

    Args:
        given, tokens, other, other_tokens, names, title, batch, heads, language, size: as for `report`.
        height: height of the widget in pixels.

    Returns:
        An ``anywidget.AnyWidget``, which a notebook displays.

    Raises:
        ImportError: anywidget is not installed: ``pip install 'saccade-attention[notebook]'``.
        TypeError, ValueError: as for `report`.

    Cost: the same as for `report`.
    """
    options = checked_options(tokens, title, names, batch, heads, language, size)
    check_int("height", height, 100)
    try:
        import anywidget  # noqa: PLC0415  an optional dependency
        import traitlets  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("anywidget", "notebook") from None

    class Page(anywidget.AnyWidget):
        """A notebook widget that displays an attention page."""

        _esm = code("notebook")
        parts = traitlets.Dict().tag(sync=True)
        style = traitlets.Unicode().tag(sync=True)
        height = traitlets.Int().tag(sync=True)

    return Page(parts=page_parts(options, given, other, other_tokens), style=style(), height=height)
