"""Split a text that is too long for a model into windows, which the model reads one at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from saccade.support.errors import value_error
from saccade.text import Word

CALLED_AS = "look"  # the name in error messages


class Window(NamedTuple):
    """A part of a text that the model reads in one pass. Tokens in different windows never see each other.

    Attributes:
        tokens: token ids, including the tokens that the tokenizer adds around every text.
        words: the words of the tokens, in order.
        own: the slice such that ``tokens[own]`` are the tokens that belong to the text.
        start: the index in the text of the first token of ``tokens[own]``.
    """

    tokens: list[int]
    words: tuple[Word, ...]
    own: slice
    start: int

    @property
    def stop(self) -> int:
        """The index in the text after the window's last token."""
        return self.start + self.own.stop - self.own.start


def windows_of(tokens: Sequence[int], words: Sequence[Word], most: int) -> list[Window]:
    """Split a text into windows between words, each as long as possible; a short text is a single window.

    A word with more tokens than fit in a window is split.

    Args:
        tokens: the full text, including the tokens that the tokenizer adds around it.
        words: the words that cover the tokens.
        most: maximum number of tokens in a window, including the tokens around it.

    Raises:
        ValueError: a window has no room for any token of the text.
    """
    text = [number for number, word in enumerate(words) if not word.special]
    front, back = words[: text[0]], words[text[-1] + 1 :]
    first, last = words[text[0]].start, words[text[-1]].stop
    room = most - first - (len(tokens) - last)
    if room < 1:
        around = most - room
        raise value_error("tokens read at a time", f"be more than the {around} special tokens around every text", most)
    found = []
    for group in _groups(words[text[0] : text[-1] + 1], room):
        start, stop = group[0].start, group[-1].stop
        own = slice(first, first + stop - start)
        inside = _shifted(group, first - start)
        behind = _shifted(back, own.stop - last)
        token_ids = [*tokens[:first], *tokens[start:stop], *tokens[last:]]
        found.append(Window(token_ids, (*front, *inside, *behind), own, start - first))
    return found


def _groups(words: Sequence[Word], room: int) -> Iterator[list[Word]]:
    """Yield the words of each window, as groups of adjacent words with at most ``room`` tokens in total."""
    group: list[Word] = []
    for word in words:
        for start in range(word.start, word.stop, room):
            part = replace(word, start=start, stop=min(start + room, word.stop))
            if group and part.stop - group[0].start > room:
                yield group
                group = []
            group.append(part)
    yield group


def _shifted(words: Sequence[Word], by: int) -> list[Word]:
    return [replace(word, start=word.start + by, stop=word.stop + by) for word in words]
