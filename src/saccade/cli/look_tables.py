"""Print the output of ``saccade look``. Words come from the user, so they are styled but never parsed as markup."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from saccade.cli.text_windows import Window
from saccade.statistics import Head, Summary
from saccade.statistics.information import position_information, unexplained_information
from saccade.statistics.mass import PARTS
from saccade.support.language import translated
from saccade.text import Word, shorten, visible
from saccade.text.labels import legible

_MOST, _LEAST = 4, 0.05  # listed words that one word attends to: maximum number and minimum weight
_WIDEST = 32  # maximum width of a word in columns
_NAMED = 12  # maximum number of unknown words listed


class Statistic(Enum):
    """The statistic that ``saccade look`` uses to rank attention heads."""

    POSITION = "position"
    UNEXPLAINED = "unexplained"

    @property
    def label(self) -> str:
        """The name that is displayed for the statistic."""
        return translated(
            {"position": "position mutual information", "unexplained": "unexplained information"}[self.value]
        )

    @property
    def meaning(self) -> str:
        """A short description of the statistic."""
        meanings = {
            "position": "how much the position of a word says about where it attends",
            "unexplained": "attention explained neither by distance nor by generally popular words",
        }
        return translated(meanings[self.value])

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """The function that computes the statistic from weights, ``[..., q_len, kv_len]`` to float64 ``[...]``."""
        return {"position": position_information, "unexplained": unexplained_information}[self.value]


def print_choice(
    console: Console,
    model: str,
    ranking: Sequence[Head],
    statistic: Statistic,
    *,
    special: Sequence[str],
    lost: float,
    is_requested: bool,
) -> None:
    """Print which attention head is shown and why.

    Args:
        console: the console to print to.
        model: the model's name.
        ranking: the ranked heads, starting with the shown head.
        statistic: the statistic that ranks the heads.
        special: tokens that the tokenizer added.
        lost: the share of the words' attention that goes to special tokens and that the statistic leaves out.
        is_requested: whether the user specified the head.
    """
    best = ranking[0]
    requested, ranked = (
        "layer {layer}, head {head} of {model}, as requested",
        "layer {layer}, head {head} of {model}, the most informative of {count}",
    )
    values = {"layer": best.layer, "head": best.head, "model": visible(model), "count": len(ranking)}
    console.print(Text(translated(requested if is_requested else ranked, **values), "bold"))
    measured = {"statistic": statistic.label, "value": best.value, "meaning": statistic.meaning}
    console.print(translated("{statistic}: {value:.2f} nats ({meaning})", **measured))
    if len(ranking) > 1:
        second = ranking[1]
        message = "runner-up: layer {layer}, head {head} with {value:.2f} nats"
        console.print(translated(message, layer=second.layer, head=second.head, value=second.value))
    if special:
        one = "{names} gets {lost:.0%} of the words' attention; the statistic leaves it out"
        several = "{names} get {lost:.0%} of the words' attention; the statistic leaves them out"
        names = translated(" and ").join(map(visible, dict.fromkeys(special)))
        console.print(translated(several if len(special) > 1 else one, names=names, lost=lost))


def print_parts(console: Console, summary: Summary, head: int) -> None:
    """Print how a head divides its attention among the parts of a text, compared with uniform attention.

    Args:
        console: the console to print to.
        summary: the summary of the head's layer, with parts, for one batch item.
        head: the index of the head.
    """
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(translated("part"))
    for name in ("share", "uniform"):
        table.add_column(translated(name), justify="right")
    table.add_column(translated("what it is"), style="dim")
    for name in PARTS:
        part = summary.named(f"{name}_part")
        shares = (f"{x[0, head].item():.0%}" for x in (part.values, part.uniform))
        table.add_row(translated(name), *shares, translated(part.meaning))
    console.print(table)


def print_words(
    console: Console, words: Sequence[Word], weights: torch.Tensor, *, looked_at: Sequence[Word] | None = None
) -> None:
    """Print a table of words, each with the words that it attends to.

    Args:
        console: the console to print to.
        words: the words of the rows and columns.
        weights: ``[words, words]``, or ``[words, looked_at]``.
        looked_at: the words of the columns, if they differ from the rows.
    """
    names = _names(words if looked_at is None else looked_at)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("#", justify="right", style="dim")
    table.add_column(translated("word"), style="bold")
    table.add_column(translated("looks at"))
    for number, (word, row) in enumerate(zip(words, weights, strict=True), start=1):
        values, keys = row.topk(min(_MOST, len(names)))
        shown = [
            Text.assemble(names[key], (f" {value:.0%}", "cyan"))
            for value, key in zip(values.tolist(), keys.tolist(), strict=True)
            if value >= _LEAST or key == int(keys[0])
        ]
        mark = Text(" ?", "yellow") if word.unknown else Text()
        table.add_row(str(number), Text.assemble(_shown(word), mark), Text("  ").join(shown))
    console.print(table)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes about the figures of ``saccade look``."""
    for note in notes:
        console.print(Text.assemble((translated("note: "), "yellow"), visible(note)))


def print_unknown(console: Console, model: str, words: Sequence[Word], token: str) -> None:
    """Print the words that the model does not know, if any.

    Args:
        console: the console to print to.
        model: the model's name.
        words: all shown words.
        token: the model's token for unknown words.
    """
    unknown = list(dict.fromkeys(_shown(word) for word in words if word.unknown))
    if not unknown:
        return
    named = ", ".join(unknown[:_NAMED])
    if len(unknown) > _NAMED:
        named = translated("{words} and {more} more", words=named, more=len(unknown) - _NAMED)
    one = (
        "{words} - {model} does not know it, or a part of it; it read {token} instead, so the attention of this word "
        "means little"
    )
    several = (
        "{words} - {model} does not know them, or a part of them; it read {token} instead, so the attention of these "
        "words means little"
    )
    values = {"words": named, "model": visible(model), "token": visible(token)}
    message = translated(several if len(unknown) > 1 else one, **values)
    console.print(Text.assemble((translated("? unknown: "), "yellow"), message))


def which_window(model: str, windows: Sequence[Window], shown: int, most: int) -> str:
    """Return a sentence that says which window of the text is shown, or "" if it is the full text."""
    if len(windows) == 1:
        return ""
    window, last = windows[shown], len(windows) - 1
    values = {"tokens": windows[-1].stop, "model": visible(model), "most": most, "shown": shown, "count": len(windows)}
    values |= {"first": window.start, "last": window.stop - 1, "end": last}
    message = (
        "the text has {tokens:,} tokens, {model} reads {most:,} at a time; window {shown} of {count:,} is shown "
        "(tokens {first:,} to {last:,}), --window 0 to {end:,} chooses"
    )
    return translated(message, **values)


def _shown(word: Word) -> str:
    return shorten(legible(word.text), _WIDEST)


def _names(words: Sequence[Word]) -> list[str]:
    """Return the words for a printed table; a word that occurs more than once is marked with its row number."""
    shown = [_shown(word) for word in words]
    counts = Counter(shown)
    return [word if counts[word] == 1 else f"{word} #{number}" for number, word in enumerate(shown, start=1)]
