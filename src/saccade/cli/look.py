"""``saccade look``: what a trained model attends to in a text."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from saccade import viz
from saccade.cli.loading import MINILM, NAMED, load
from saccade.cli.report import print_choice, print_notes, print_words
from saccade.cli.telling import Head, Statistic, rank_heads
from saccade.models import Decoder, Encoder
from saccade.text import Word, merge, visible, words

__all__ = ["look"]

_ANNOTATED_AT_MOST = 24  # words: the numbers of a larger map are too small to read on a screen


def look(
    text: Annotated[
        list[str], typer.Argument(metavar="TEXT", help="The text; several arguments are joined by spaces.")
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Take every argument as one word, exactly as given.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option(help="The layer to show, counted from 0; by default the most telling.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="The head to show, counted from 0; by default the most telling.")
    ] = None,
    by: Annotated[
        Statistic, typer.Option(help="What the most telling head is chosen by.", case_sensitive=False)
    ] = Statistic.UNEXPLAINED,
    model_name: Annotated[
        str, typer.Option("--model", metavar="NAME|FOLDER", help="A model by name, or the folder of one.")
    ] = MINILM,
    out: Annotated[Path, typer.Option(help="The folder for heatmap.png and mosaic.png.")] = Path("out/look"),
) -> None:
    """Show what a trained model attends to in a text: an encoder of BERT's form, or a language model.

    Word pieces are merged to words. Which head is the most telling is decided among words, without special tokens
    such as [CLS] and [SEP], by what neither distance nor everybody's favourite words explain or, with --by position,
    by position mutual information (how much the place of a word says about where it looks).
    """
    model = _load(model_name)
    name = model_name if model_name in NAMED else Path(model_name).name
    encoded, found = _read(model, name, text, given=tokens)
    _check_range("--layer", layer, model.config.num_layers)
    _check_range("--head", head, model.config.num_heads)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(f"--out must be a folder that can be written; got {out} ({error.strerror})")

    weights = _weights(model, encoded, found)
    ordinary = [number for number, word in enumerate(found) if not word.special]
    among_words = weights[:, :, ordinary][..., ordinary]
    ranking = rank_heads(among_words, by, layer=layer, head=head)
    best = ranking[0]
    chosen = weights[best.layer, best.head]

    console = Console(highlight=False, markup=False, emoji=False)
    lost = 1 - float(among_words[best.layer, best.head].sum(-1).mean())
    special = [word.text for word in found if word.special]
    print_choice(console, name, ranking, by, special=special, lost=lost, is_asked=None not in (layer, head))
    print_words(console, found, chosen)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", viz.MissingGlyphsWarning)
        files = _draw(found, weights, best, out)
    print_notes(console, found, [str(one.message) for one in told])
    for path, what in files:
        console.print(f"wrote {visible(str(path))}  ({what})", soft_wrap=True)


def _load(name: str) -> Encoder | Decoder:
    try:
        return load(name)
    except (ImportError, ValueError, NotImplementedError, OSError) as error:
        typer.echo(f"saccade look: {str(error).removeprefix('load: ')}", err=True)
        raise typer.Exit(1) from None


def _read(
    model: Encoder | Decoder, name: str, text: Sequence[str], *, given: bool
) -> tuple[torch.Tensor, tuple[Word, ...]]:
    """Tokens ``[1, len]`` of the text, and its words."""
    if model.tokenizer is None:
        _refuse(f"--model must have a tokenizer.json; got {name}")
    joined = " ".join(text)
    if not joined.strip():
        _refuse("TEXT must have at least one word; got nothing to look at")
    if any("\ud800" <= character <= "\udfff" for character in joined):
        _refuse("TEXT must be valid UTF-8; got bytes that are not")
    encoding = model.tokenizer.encode(list(text) if given else joined, is_pretokenized=given)
    if len(encoding.ids) > model.config.max_len:
        got = f"{len(encoding.ids)}, {name} reads no more"
        _refuse(f"TEXT must have at most {model.config.max_len} tokens; got {got}")
    try:
        found = words(encoding, list(text) if given else joined)
    except ValueError as error:
        _refuse(str(error).removesuffix("."))
    if all(word.special for word in found):
        _refuse("TEXT must have at least one word; got only characters that the model does not read")
    return torch.tensor([encoding.ids]), found


def _weights(model: Encoder | Decoder, tokens: torch.Tensor, found: Sequence[Word]) -> torch.Tensor:
    """Weights between words, ``[layers, heads, words, words]``."""
    with torch.no_grad():
        return torch.stack([merge(matrix.to_dense()[0], found) for matrix in model.matrices(tokens)])


def _draw(found: Sequence[Word], weights: torch.Tensor, best: Head, out: Path) -> list[tuple[Path, str]]:
    labels = [word.text for word in found]
    where = f"layer {best.layer}, head {best.head}"
    heatmap = viz.heatmap(
        weights[best.layer, best.head],
        x_labels=labels,
        y_labels=labels,
        annotate=len(found) <= _ANNOTATED_AT_MOST,
        title=f"What each word (row) looks at (column): {where}",
        x_name="looked at",
        y_name="word",
    )
    mosaic = viz.mosaic(
        weights,
        highlight=(best.layer, best.head),
        title="Every head (H) of every layer (L): what each word (row) looks at (column). "
        "Each map runs from white, nothing, to its own largest weight.",
    )
    try:
        return [
            (viz.save(heatmap, out / "heatmap.png"), f"what each word looks at in {where}"),
            (viz.save(mosaic, out / "mosaic.png"), "every head of every layer"),
        ]
    except OSError as error:
        _refuse(f"--out must be a folder that can be written; got {out} ({error.strerror})")


def _check_range(option: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        _refuse(f"{option} must be from 0 to {count - 1}; got {value}")


def _refuse(sentence: str) -> NoReturn:
    """End with one line that says what was wrong with the arguments."""
    typer.echo(f"saccade look: {visible(sentence)}.", err=True)
    raise typer.Exit(2)
