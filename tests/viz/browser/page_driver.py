"""Helpers that find places on the screen of a page and wait for its reactions."""

import time

from playwright import sync_api

__all__ = ["at", "pixel", "until"]


def until(page, expression, seconds=20.0):
    """Poll until an expression is true: the policy of a page forbids a browser to do so by itself."""
    end = time.monotonic() + seconds
    while not _is_true(page, expression):
        assert time.monotonic() < end, f"never: {expression}"
        page.wait_for_timeout(20)


def _is_true(page, expression):
    try:
        return page.evaluate(expression)
    except sync_api.Error as error:
        if "navigation" in error.message:  # the page reads itself anew
            return False
        raise


def at(page, query, key):
    """Return the middle of a pair's cell on the screen."""
    return page.evaluate(
        """([query, key]) => {
          const map = saccade.mapView, [x, y, w, h] = map.view, { box } = map;
          const { left, top } = map.canvas.getBoundingClientRect();
          return [left + box.x + (key + 0.5 - x) * box.w / w, top + box.y + (query + 0.5 - y) * box.h / h];
        }""",
        [query, key],
    )


def pixel(page, query, key):
    """Return the colour in the middle of a pair's cell."""
    until(page, "!saccade.mapView.waiting")
    return page.evaluate(
        """([query, key]) => {
          const { canvas, box, view: [x, y, w, h] } = saccade.mapView, ratio = window.devicePixelRatio;
          const across = box.x + (key + 0.5 - x) * box.w / w, down = box.y + (query + 0.5 - y) * box.h / h;
          const place = [across, down].map((one) => Math.round(one * ratio));
          return [...canvas.getContext("2d").getImageData(...place, 1, 1).data].slice(0, 3);
        }""",
        [query, key],
    )
