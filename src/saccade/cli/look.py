"""``saccade look``: show what a trained model attends to in a text."""

import warnings
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from saccade import viz
from saccade.cli.exit_status import fail, loaded, refuse, refuse_combination
from saccade.cli.loading import OptionalModelName, default_encoder_name, shown_name
from saccade.cli.look_figures import MOST_WINDOWS, draw_full_text, figures, without_special
from saccade.cli.look_formats import PARTS_OF_A_TEXT, Format, format_statistics
from saccade.cli.look_tables import (
    Statistic,
    print_choice,
    print_notes,
    print_parts,
    print_unknown,
    print_words,
    which_window,
)
from saccade.cli.model_reading import Model, Subject, load_model, subject_of
from saccade.cli.output_files import all_or_none, folder_for, writing
from saccade.cli.progress import progress
from saccade.statistics import Head, rank_heads
from saccade.support.language import translated
from saccade.support.numerics import is_finite
from saccade.text import Word, merge, visible

_MOST_WEIGHTS = 1 << 28  # 1 GB in float32


_Text = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="The text; several arguments are joined by spaces.")
]
_File = Annotated[Path | None, typer.Option(help="A file with the text, in UTF-8.")]
_Other = Annotated[
    str | None, typer.Option(help="The output of an encoder-decoder that reads TEXT: shows its cross-attention.")
]
_Tokens = Annotated[bool, typer.Option("--tokens", help="Treat each argument as one word, exactly as typed.")]
_Layer = Annotated[int | None, typer.Option(help="The layer to show, counted from 0; by default the most informative.")]
_Head = Annotated[int | None, typer.Option(help="The head to show, counted from 0; by default the most informative.")]
_By = Annotated[Statistic, typer.Option(help="The statistic that chooses the head.", case_sensitive=False)]
_Stats = Annotated[
    Format | None,
    typer.Option(help="Print only statistics of every head, without pictures.", case_sensitive=False),
]
_Window = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The window to show if the text is longer than the model reads, counted from 0; by default the first.",
    ),
]
_AtOnce = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of tokens read at a time; by default as many as the model can read."),
]
_HideSpecial = Annotated[
    bool, typer.Option("--hide-special", help="Leave special tokens such as [CLS] and [SEP] out of the figures.")
]
_Title = Annotated[str | None, typer.Option(help="The title of the figures, or of the page.")]
_Out = Annotated[Path, typer.Option(help="The folder for the figures.")]
_Html = Annotated[
    Path | None,
    typer.Option(help="Write only a page that shows every head, for a text of any length; it opens in a browser."),
]


def look(
    context: typer.Context,
    text: _Text = None,
    file: _File = None,
    to: _Other = None,
    tokens: _Tokens = False,
    window: _Window = None,
    at_once: _AtOnce = None,
    layer: _Layer = None,
    head: _Head = None,
    by: _By = Statistic.UNEXPLAINED,
    stats: _Stats = None,
    hide_special: _HideSpecial = False,
    title: _Title = None,
    model_name: OptionalModelName = None,
    out: _Out = Path("out/look"),
    html: _Html = None,
) -> None:
    """Show what a trained model attends to in a text: an encoder, a language model, or an encoder-decoder.

    Word pieces are merged into words. The most informative head is shown: among words, without special tokens such as
    [CLS] and [SEP], it has the most attention explained neither by distance nor by generally popular words or, with
    --by position, the most position mutual information (how much the position of a word says about where it attends).

    A text that is longer than the model can read at once is split into windows between words. One is shown, and
    whole.png shows all of them along the diagonal.
    """
    if to is not None:
        refuse_combination(context, "--to", ("--window", "--at-once"), "shows two texts at once")
    if stats is not None:
        drawn = ("--layer", "--head", "--by", "--out", "--hide-special", "--title")
        refuse_combination(context, "--stats", drawn, "prints every head and draws nothing")
    if html is not None:
        refuse_combination(
            context,
            "--html",
            ("--stats", "--layer", "--head", "--by", "--out", "--hide-special"),
            "shows every head in one page",
        )
        if html.is_dir():
            refuse("look", f"--html must be a file that can be written; got {html} (Is a directory)")
    parts = _text_of(text, file)
    model_name = model_name or default_encoder_name("".join(parts))
    model: Model = loaded("look", load_model, model_name)
    name = shown_name(model_name)
    subject = _subject(model, name, parts, to, is_pretokenized=tokens, window=window, at_once=at_once)
    _check_range("--layer", layer, len(subject.matrices))
    _check_range("--head", head, subject.matrices[0].shape[1])
    window_line = which_window(name, subject.windows, subject.shown, subject.most)
    if stats is not None:
        typer.echo(f"{window_line}\n" if window_line else "", err=True, nl=False)
        typer.echo(format_statistics(subject.matrices, name, stats, subject.shown, is_cross=subject.is_cross))
        return
    if html is not None:
        typer.echo(f"{window_line}\n" if window_line else "", nl=False)
        _write_page(subject, title or name, html)
        return
    weights = _weights(subject)
    with folder_for("look", "--out", out):
        among_words = weights[:, :, _word_indices(subject.rows)][..., _word_indices(subject.columns)]
        ranking = rank_heads(by.function(among_words), layer=layer, head=head)
        best = ranking[0]

        console = Console(highlight=False, markup=False, emoji=False)
        lost = 1 - float(among_words[best.layer, best.head].sum(-1).mean())
        special = [word.text for word in subject.columns if word.special]
        if window_line:
            console.print(f"{window_line}\n")
        print_choice(console, name, ranking, by, special=special, lost=lost, is_requested=None not in (layer, head))
        looked_at = subject.columns if subject.is_cross else None
        print_unknown(console, name, [*subject.rows, *(looked_at or ())], subject.unknown)
        if hide_special:
            subject, weights = without_special(subject, weights)
            looked_at = subject.columns if subject.is_cross else None
        print_words(console, subject.rows, weights[best.layer, best.head], looked_at=looked_at)
        matrix = subject.matrices[best.layer]
        if matrix.is_stochastic and not subject.is_cross:  # parts by distance are meaningless between two texts
            print_parts(console, matrix.summary(PARTS_OF_A_TEXT), best.head)
        files, notes = _draw(model, subject, weights, best, out, title)
    print_notes(console, notes)
    for path, what in files:
        console.print(translated("wrote {path}  ({what})", path=visible(str(path)), what=what), soft_wrap=True)


def _word_indices(words: Sequence[Word]) -> list[int]:
    """Return the indices of the words that are not special tokens."""
    return [number for number, word in enumerate(words) if not word.special]


def _text_of(text: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the text to look at, from the arguments of the command or from a file."""
    if not text and file is None:
        refuse("look", "TEXT must be given, or a --file; got neither")
    if file is None:
        return list(text or [])
    if text:
        refuse("look", "TEXT must be left out if --file is given; got both")
    try:
        return [file.read_text(encoding="utf-8-sig")]  # some editors write a byte-order mark
    except OSError as error:
        refuse("look", f"--file must be a file that can be read; got {file} ({error.strerror})")
    except UnicodeDecodeError:
        refuse("look", f"--file must be valid UTF-8; got {file}")


def _subject(model: Model, name: str, text: Sequence[str], to: str | None, **options: Any) -> Subject:
    try:
        return subject_of(model, name, text, to, **options)
    except (ValueError, NotImplementedError) as error:
        refuse("look", str(error).removeprefix("look: ").removesuffix("."))


def _weights(subject: Subject) -> torch.Tensor:
    """Return the attention weights between the words of a text, ``[layers, heads, words, words]``."""
    heads, q_len, kv_len = subject.matrices[0].shape[1:]
    if len(subject.matrices) * heads * q_len * kv_len > _MOST_WEIGHTS:
        got = f"{kv_len:,} tokens in each of {len(subject.matrices) * heads:,} heads"
        hint = f"--at-once {isqrt(_MOST_WEIGHTS // (len(subject.matrices) * heads))} cuts it into windows"
        refuse("look", f"TEXT must be shorter to be drawn; got {got}\nHint: {hint}; --html and --stats take any length")
    with torch.no_grad():
        weights = [merge(matrix.to_dense()[0], subject.rows, subject.columns) for matrix in subject.matrices]
    broken = [str(layer) for layer, one in enumerate(weights) if not is_finite(one)]
    if broken:
        fail(
            "look", f"--model must give finite numbers for TEXT; got NaN in the attention of layer {', '.join(broken)}"
        )
    return torch.stack(weights)


def _write_page(subject: Subject, title: str, path: Path) -> None:
    """Write an HTML page of all heads, creating the folder of the file."""
    tokens = (subject.row_tokens, subject.column_tokens) if subject.is_cross else subject.column_tokens
    with folder_for("look", "--html", path.parent), writing("look", "--html", path, "file"):
        viz.report(subject.matrices, path, tokens=tokens, title=title)
    what = translated("every head of every layer; open it in a browser")
    typer.echo(translated("wrote {path}  ({what})", path=visible(str(path)), what=what))


def _draw(
    model: Model, subject: Subject, weights: torch.Tensor, best: Head, out: Path, title: str | None
) -> tuple[list[tuple[Path, str]], list[str]]:
    """Write the figures of ``saccade look``; return their paths, their descriptions and notes about them."""
    files, notes = [], []
    with warnings.catch_warnings(record=True) as caught, all_or_none("look", "--out", out) as staging:
        warnings.simplefilter("always", viz.MissingGlyphsWarning)
        for name, figure, what in figures(subject, weights, best, title):
            viz.save(figure, staging / name)
            files.append((out / name, what))
        count = len(subject.windows)
        if 1 < count <= MOST_WINDOWS:
            errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
            with progress(errors, "windows", count) as advance:
                viz.save(draw_full_text(model, subject, best, advance, title), staging / "whole.png")
            where = translated("layer {layer}, head {head}", layer=best.layer, head=best.head)
            files.append((out / "whole.png", translated("{where} in all {count} windows", where=where, count=count)))
        elif count > MOST_WINDOWS:
            message = "{count:,} windows are too many for one picture; at most {most} are drawn"
            notes.append(translated(message, count=count, most=MOST_WINDOWS))
    return files, [*notes, *(str(one.message) for one in caught)]


def _check_range(option: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        refuse("look", f"{option} must be from 0 to {count - 1}; got {value}")
