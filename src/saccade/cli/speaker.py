"""Speaker: prints a text while its tokens are still coming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from saccade.text import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Speaker", "visible_text"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character reads as while some of its bytes are still to come
_AT_ONCE = 512  # tokens up to which each is said as it comes


class Speaker:
    """Prints a text to the standard output, as far as its tokens are known.

    Args:
        tokenizer: makes text of tokens.
        tokens: what the text begins with; it is said with the first token that comes.

    Cost: every token reads the whole text again, since what a token says depends on those before it. In a long text a
    few are therefore awaited, so that to say it stays cheaper than to make it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]):
        self._tokenizer, self._tokens = tokenizer, list(tokens)
        self._said, self._awaited = "", 0

    def hear(self, token: int) -> None:
        """One more token."""
        self._tokens.append(token)
        self._awaited += 1
        if self._awaited > len(self._tokens) // _AT_ONCE:
            self._say(self._text().rstrip(_UNFINISHED))

    def finish(self) -> None:
        """Say what is left, and end the line."""
        text = self._text()
        # Some tokenizers join words in the end that stood apart: what has been said cannot be taken back.
        self._say(text if text.startswith(self._said) else f"{self._said}\n{text}")
        typer.echo()

    def break_off(self) -> None:
        """End the line, if there is one."""
        if self._said:
            typer.echo()

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens)

    def _say(self, text: str) -> None:
        if text.startswith(self._said):
            typer.echo(visible_text(text[len(self._said) :]), nl=False)  # and flushed
            self._said, self._awaited = text, 0


def visible_text(text: str) -> str:
    """The text as it is, but for characters that a terminal would obey."""
    return re.sub(r"[^\n\t]+", lambda found: visible(found.group()), text)
