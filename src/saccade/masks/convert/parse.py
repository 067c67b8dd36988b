"""Parse masks from text: a command-line option (``causal & window(128, 0)``), or a mask as Python prints it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from saccade import masks
from saccade.masks.algebra import And, Or
from saccade.masks.convert.interop import from_sliding_window
from saccade.masks.mask import Mask
from saccade.masks.presets import longformer, streaming
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.global_tokens import Global
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window
from saccade.support.errors import escaped, value_error
from saccade.support.validation import check_type

_TOKEN = re.compile(r"[0-9]+|[^\W\d]\w*|'\w*'|\"\w*\"|\S")
_MAX_DIGITS = 19  # the number of digits of 2**62; Python refuses to convert thousands of digits
_MAX_BRACKETS = 64  # limit of nested brackets, since each is a recursive call
_SHOWN = 32  # characters shown on either side of an error
_CONSTANTS: Mapping[str, object] = {"None": None, "True": True, "False": False}
_INCOMPLETE = ("Dense", "Predicate")  # masks that do not print all of their contents


class _Name(NamedTuple):
    """A mask name that the parser accepts: its syntax, and the function that builds the mask from numbers."""

    form: str
    of: Callable[..., Mask]


def _window(*widths: int) -> Mask:
    return Window(*(widths * 2 if len(widths) == 1 else widths))


def _longformer(*numbers: Any) -> Mask:
    return longformer(numbers[0], numbers[1:]) if len(numbers) > 1 else longformer(*numbers)


_NAMES: Mapping[str, _Name] = {
    "causal": _Name("causal", Causal),
    "full": _Name("full", Full),
    "window": _Name("window(left, right) or window(each_side)", _window),
    "sliding": _Name("sliding(window)", from_sliding_window),
    "documents": _Name("documents(length, ...)", lambda *lengths: Documents(lengths)),
    "padding": _Name("padding(length, ...)", lambda *lengths: Padding(lengths)),
    "prefix": _Name("prefix(length)", Prefix),
    "global": _Name("global(position, ...)", lambda *positions: Global(positions)),
    "strided": _Name("strided(step)", Strided),
    "streaming": _Name("streaming(sink_tokens, window)", streaming),
    "longformer": _Name("longformer(each_side, position, ...)", _longformer),
}


def parse(text: str) -> Mask:
    """Parse a mask from text; the text is never executed as code.

    Names are combined with ``&`` (both), ``|`` (either) and ``~`` (not) and grouped by brackets. ``~`` has the highest
    precedence, then ``&``, then ``|``, as in Python. Numbers are ints with the same meaning as in the constructors:

    ====================================  =========================================================
    ``causal``, ``full``                  ``Causal()``, ``Full()``
    ``window(4, 0)``, ``window(4)``       ``Window(4, 0)``; ``Window(4, 4)``: a single number is for each side
    ``sliding(5)``                        ``Window(4, 0)``: transformers' window includes the query
    ``documents(128, 200)``               ``Documents([128, 200])``: lengths
    ``padding(5, 7)``                     ``Padding([5, 7])``: tokens of each batch item
    ``prefix(10)``, ``strided(4)``        ``Prefix(10)``, ``Strided(4)``
    ``global(0, 5)``                      ``Global([0, 5])``: positions
    ``streaming(4, 1024)``                ``streaming(4, 1024)``: first tokens, and a window
    ``longformer(256, 0)``                ``longformer(256, [0])``: keys on each side, and positions
    ====================================  =========================================================

    A mask may also be written as Python prints it, such as ``Window(left=4, right=0)``, with arguments composed of
    ints, strings, tuples, lists and masks. `Dense` and `Predicate` print only part of their contents, so they cannot
    be parsed.

    Example:
        >>> parse("causal & (window(2, 0) | global(0))")
        Causal() & (Window(left=2, right=0) | Global(positions=(0,), sees=True, seen=True))
        >>> parse(str(Causal() & Window(4, 0))) == Causal() & Window(4, 0)
        True
        >>> parse("causal & windw(2)")
        Traceback (most recent call last):
        ValueError: parse: text must name known masks; got windw.
            causal & windw(2)
                     ^
        Hint: use causal, full, window, sliding, documents, padding, prefix, global, strided, streaming, longformer

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: the text is invalid, or a mask does not accept its numbers. The message points at the error.

    Cost: O(len(text)), plus the cost of the masks.
    """
    return _Parser(check_type("text", text, str, "be a string")).read()


class _Parser:
    """A recursive-descent parser of masks written as text, with one method for each level of precedence."""

    def __init__(self, text: str):
        self.text = text
        self.tokens = [(match.group(), match.start()) for match in _TOKEN.finditer(text)] + [("", len(text))]
        self.tuples = _tuples(word for word, _ in self.tokens)
        self.index = 0
        self.brackets = 0

    def read(self) -> Mask:
        mask = self.union()
        if self.word:
            raise self.error_at("continue with & or |, or end")
        return mask

    @property
    def word(self) -> str:
        return self.tokens[self.index][0]

    def consume(self, word: str) -> bool:
        """Consume the next token of the mask text if it equals ``word``; return whether a token was consumed."""
        is_next = self.word == word
        self.index += is_next
        return is_next

    def union(self) -> Mask:
        index, parts = self.index, [self.intersection()]
        while self.consume("|"):
            parts.append(self.intersection())
        return self.combine(Or, parts, index)

    def intersection(self) -> Mask:
        index, parts = self.index, [self.complement()]
        while self.consume("&"):
            parts.append(self.complement())
        return self.combine(And, parts, index)

    def combine(self, kind: type[And | Or], parts: list[Mask], index: int) -> Mask:
        try:
            return kind(tuple(parts)) if len(parts) > 1 else parts[0]
        except ValueError as error:  # masks with different numbers of batch items
            raise self.error_at("join masks that fit together", index, cause=error) from error

    def complement(self) -> Mask:
        is_inverted = False
        while self.consume("~"):
            is_inverted = not is_inverted
        mask = self.operand()
        while self.word == "." and self.next_word == "after":
            self.index += 2
            mask = self.build(mask.after, self.index - 1, "after(length)", *self.arguments())
        return ~mask if is_inverted else mask

    def operand(self) -> Mask:
        if not self.consume("("):
            return self.printed_mask() if self.is_printed else self.named_mask()
        self.open_bracket()
        mask = self.union()
        if not self.consume(")"):
            raise self.error_at("close each bracket with )")
        self.brackets -= 1
        return mask

    def open_bracket(self) -> None:
        self.brackets += 1
        if self.brackets > _MAX_BRACKETS:
            raise self.error_at(f"nest at most {_MAX_BRACKETS} brackets")

    @property
    def next_word(self) -> str:
        return self.tokens[min(self.index + 1, len(self.tokens) - 1)][0]

    @property
    def is_printed(self) -> bool:
        """Whether the next tokens are the name of a mask class and an opening bracket, as Python prints masks."""
        is_class = self.word[:1].isupper() and self.word in masks.__all__ and self.word != "Mask"
        return is_class and self.next_word == "("

    def printed_mask(self) -> Mask:
        index, name = self.index, self.word
        if name in _INCOMPLETE:
            hint = "pass the mask itself to the Python function"
            raise self.error_at("contain masks that print all of their contents", hint=hint)
        self.index += 1
        kind = getattr(masks, name)
        form = f"{name}({', '.join(inspect.signature(kind).parameters)})"
        return self.build(kind, index, form, *self.arguments())

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Parse the arguments of a mask as Python prints them: positional values, then keyword arguments."""
        if not self.consume("("):
            raise self.error_at("have a bracket here")
        self.open_bracket()
        positional: list[Any] = []
        named: dict[str, Any] = {}
        while not self.consume(")"):
            if self.word.isidentifier() and self.next_word == "=":
                name = self.word
                if name in named:
                    raise self.error_at("give each argument once")
                self.index += 2
                named[name] = self.value()
            elif named:
                raise self.error_at("name every argument after a named one")
            else:
                positional.append(self.value())
            self.separator(")")
        self.brackets -= 1
        return positional, named

    def value(self) -> Any:
        """Parse one argument of a printed mask: an int, a string, a constant, a list, a tuple or a mask."""
        word = self.word
        if word == "[" or self.index in self.tuples:
            return self.sequence("]" if word == "[" else ")")
        if word in _CONSTANTS or (len(word) > 1 and word[0] in "'\""):
            self.index += 1
            return _CONSTANTS[word] if word in _CONSTANTS else word[1:-1]
        if word == "-" or word[:1].isdigit():
            return -self.number() if self.consume("-") else self.number()
        return self.union()

    def sequence(self, end: str) -> list[Any] | tuple[Any, ...]:
        self.index += 1
        self.open_bracket()
        items: list[Any] = []
        while not self.consume(end):
            items.append(self.value())
            self.separator(end)
        self.brackets -= 1
        return items if end == "]" else tuple(items)

    def separator(self, end: str) -> None:
        if not self.consume(",") and self.word != end:
            raise self.error_at(f"continue with a comma or close the bracket with {end}")

    def build(
        self, function: Callable[..., Mask], index: int, form: str, numbers: list[Any], named: dict[str, Any]
    ) -> Mask:
        try:
            return function(*numbers, **named)
        except (TypeError, ValueError) as error:
            rule = "contain numbers that the mask accepts"
            raise self.error_at(rule, index, cause=error, hint=f"write {form}") from error

    def named_mask(self) -> Mask:
        index, hint = self.index, f"use {', '.join(_NAMES)}"
        if self.word not in _NAMES:
            is_name = self.word.isidentifier()
            raise self.error_at("name known masks" if is_name else "have a mask here", hint=hint)
        name = _NAMES[self.word]
        self.index += 1
        return self.build(name.of, index, name.form, self.numbers() if self.consume("(") else [], {})

    def numbers(self) -> list[int]:
        """Parse the numbers in brackets after the name of a mask. The opening bracket is already consumed."""
        numbers: list[int] = []
        if self.consume(")"):
            return numbers
        while True:
            numbers.append(self.number())
            if self.consume(")"):
                return numbers
            if not self.consume(","):
                raise self.error_at("continue with a comma or close the bracket with )")

    def number(self) -> int:
        if not (self.word.isascii() and self.word.isdigit()):
            raise self.error_at("have a whole number here")
        if len(self.word.lstrip("0")) > _MAX_DIGITS:
            raise self.error_at(f"contain numbers of at most {_MAX_DIGITS} digits")
        self.index += 1
        return int(self.tokens[self.index - 1][0].lstrip("0") or "0")

    def error_at(
        self, rule: str, index: int | None = None, *, cause: Exception | None = None, hint: str | None = None
    ) -> ValueError:
        """Return the error for invalid mask text. It shows the text and points at a token (by default, the next)."""
        word, start = self.tokens[self.index if index is None else index]
        before = ("..." if start > _SHOWN else "") + escaped(self.text[max(start - _SHOWN, 0) : start])
        after = self.text[start : start + _SHOWN] + ("..." if len(self.text) > start + _SHOWN else "")
        got = word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."
        facts = [before + escaped(after), " " * len(before) + "^"]
        facts += [] if cause is None else [str(cause).split("\n", 1)[0]]
        return value_error("text", rule, escaped(got) or "the end", facts=facts, hint=hint)


def _tuples(words: Iterable[str]) -> set[int]:
    """Return the indices of brackets that open a tuple, because they are empty or directly contain a comma."""
    found: set[int] = set()
    opened: list[int] = []
    before = ""
    for index, word in enumerate(words):
        if word in ("(", "["):
            opened.append(index)
        elif word == "," and opened:
            found.add(opened[-1])
        elif word in (")", "]") and opened:
            start = opened.pop()
            found |= {start} if before == "(" else set()
        before = word
    return found
