"""Line breaks in Chinese text, which browsers show as spaces and nobody writes."""

import re

HAN = "\u3400-\u4dbf\u4e00-\u9fff"
# No space belongs between two of these; full-width punctuation brings its own, whatever stands beside it.
_FULL = "\u3000-\u303f\uff00-\uffef"
_WIDE = f"{HAN}{_FULL}\u2014\u2018-\u201d\u2026"
_BREAK = re.compile(rf"(?<=[{_WIDE}])\n(?=[{_WIDE}])|(?<=[{_FULL}])\n|\n(?=[{_FULL}])")


def joined(text: str) -> str:
    """Return a text without the line breaks inside Chinese sentences."""
    return _BREAK.sub("", text)


def joined_pieces(pieces: list[str]) -> list[str]:
    """Return the pieces of a paragraph, each without the line breaks inside Chinese sentences.

    A break may be a piece of its own, or stand at the end of one; the neighbours decide.
    """
    results = []
    for place, piece in enumerate(pieces):
        before = pieces[place - 1][-1:].strip("\n") if place else ""
        after = pieces[place + 1][:1].strip("\n") if place + 1 < len(pieces) else ""
        whole = joined(f"{before}{piece}{after}")
        results.append(whole[len(before) : len(whole) - len(after)])
    return results
