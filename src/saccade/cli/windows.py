"""A text that is longer than the model reads, cut into windows that it reads one at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from saccade.support.errors import value_error
from saccade.text import Word

CALLED_AS = "look"  # in errors


class Window(NamedTuple):
    """What the model reads at once. Tokens of two windows never see each other.

    Attributes:
        tokens: their numbers, with the tokens that the tokenizer puts around every text.
        words: what the tokens are, in order.
        own: which of the tokens are the text's, ``tokens[own]``.
        start: which token of the text the first of them is, counted from 0.
    """

    tokens: list[int]
    words: tuple[Word, ...]
    own: slice
    start: int

    @property
    def stop(self) -> int:
        """The token of the text behind the last one."""
        return self.start + self.own.stop - self.own.start


def windows_of(tokens: Sequence[int], words: Sequence[Word], most: int) -> list[Window]:
    """Cut a text between words, as late as possible each time; a text that is short enough is one window.

    A word of more tokens than a window has room for is cut inside.

    Args:
        tokens: the whole text, with what the tokenizer puts in front and behind.
        words: which cover the tokens.
        most: tokens of a window, those around it included.

    Raises:
        ValueError: no room for a token of the text.
    """
    text = [number for number, word in enumerate(words) if not word.special]
    front, back = words[: text[0]], words[text[-1] + 1 :]
    first, last = words[text[0]].start, words[text[-1]].stop
    room = most - first - (len(tokens) - last)
    if room < 1:
        around = most - room
        raise value_error("tokens read at a time", f"be more than the {around} around every text", most)
    found = []
    for group in _groups(words[text[0] : text[-1] + 1], room):
        start, stop = group[0].start, group[-1].stop
        own = slice(first, first + stop - start)
        inside = _moved(group, first - start)
        behind = _moved(back, own.stop - last)
        numbers = [*tokens[:first], *tokens[start:stop], *tokens[last:]]
        found.append(Window(numbers, (*front, *inside, *behind), own, start - first))
    return found


def _groups(words: Sequence[Word], room: int) -> Iterator[list[Word]]:
    """Neighbouring words of at most ``room`` tokens together."""
    group: list[Word] = []
    for word in words:
        for start in range(word.start, word.stop, room):
            part = replace(word, start=start, stop=min(start + room, word.stop))
            if group and part.stop - group[0].start > room:
                yield group
                group = []
            group.append(part)
    yield group


def _moved(words: Sequence[Word], by: int) -> list[Word]:
    return [replace(word, start=word.start + by, stop=word.stop + by) for word in words]
