"""live_report(): a page that is updated while a recording is running."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_number, check_type
from saccade.viz.page.html_report import Language, checked_options, checked_path, write
from saccade.viz.page.layers import Recorded
from saccade.viz.page.texts import Tokens, check_tokens

_SHARE = 0.1  # largest fraction of the time that writing may take


@argument_hints({})
class live_report:  # noqa: N801  it is used like a function: with live_report(...)
    """A context manager that keeps an HTML page up to date while a model is recorded; the page reloads itself.

    Within the ``with`` block, a thread regularly writes the page from everything recorded so far. At the end, the page
    is written once more and stops reloading. Reloading preserves the view, which is part of the page's URL.

    Args:
        recording: the recording that `saccade.record` fills, preferably with ``keep="qk"`` for text generation; nothing
            is written before the first layer has run.
        path: path of the HTML file.
        every: seconds between updates of the page; more if writing it would take more than a tenth of the time.
        tokens: as for `report`; or, for a text that grows, a function that returns the tokens whenever the page is
            written. The list may be longer than the text read so far. While the number of tokens does not match, the
            page shows numbers. If it still does not match at the end, the error is raised.
        title, batch, heads, language, size: as for `report`.

    Raises:
        TypeError, ValueError: as for `report`; errors that occur while the page is written are raised at the end.

    Cost: the cost of `report` for each update; in total, at most a tenth of the running time.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> import saccade as sc
        >>> layer = sc.nn.MultiHeadAttention(16, 2)
        >>> with sc.record(layer, keep="qk") as recording, live_report(recording, "/tmp/live.html", every=1.0):
        ...     out = layer(torch.zeros(1, 5, 16))
        >>> Path("/tmp/live.html").exists()
        True
    """

    def __init__(
        self,
        recording: Mapping[str, Recorded],
        path: str | os.PathLike[str],
        *,
        every: float = 5.0,
        tokens: Tokens | Callable[[], Tokens] = None,
        title: str = "Attention",
        batch: int = 0,
        heads: Iterable[tuple[int, int]] | None = None,
        language: Language | None = None,
        size: int = 8_000_000,
    ):
        check_type("recording", recording, Mapping, "be a recording", hint="record(model) as recording")
        self._recording, self._path = recording, checked_path(path)
        self._every = check_number("every", every, least=0.1)
        now = None if callable(tokens) else tokens
        self._options = checked_options(now, title, ("first", "second"), batch, heads, language, size)
        self._tokens = tokens
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_again, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._write(0.0)
        if self._error is not None and error is None:
            raise self._error
        if self._error is not None and error is not None:  # the user's error matters more than a missing page
            error.add_note(str(self._error))

    def _write_again(self) -> None:
        wait = self._every
        while not self._end.wait(wait) and self._error is None:
            began = time.monotonic()
            self._write(self._every)
            wait = max(self._every, (time.monotonic() - began) * (1 / _SHARE - 1))

    def _write(self, live: float) -> None:
        """Write the live page if there is something to show; store the first error, to raise it at the end."""
        layers = dict(self._recording)
        try:
            if layers:
                self._write_layers(layers, live)
        except BaseException as error:
            self._error = self._error or error

    def _write_layers(self, layers: Mapping[str, Recorded], live: float) -> None:
        tokens = self._tokens() if callable(self._tokens) else self._tokens
        check_tokens(tokens)
        if callable(self._tokens) and isinstance(tokens, list):  # the last token was sampled but not read yet
            tokens = tokens[: max(run.shape[3] for run in layers.values())]
        try:
            write(self._path, self._options._replace(tokens=tokens), layers, live=live)
        except ValueError:
            # If the tokens do not match, show numbers; any other error occurs again.
            write(self._path, self._options._replace(tokens=None), layers, live=live)
            if not live:
                raise
