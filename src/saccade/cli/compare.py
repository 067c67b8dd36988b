"""``saccade compare``: how far approximate attention is from exact attention, on what a trained model attends with."""

from pathlib import Path
from typing import Annotated, NoReturn, cast

import torch
import typer
from torch import Tensor

from saccade import viz
from saccade.comparison import compare as compare_tensors
from saccade.mechanisms import Linear, Linformer, Mechanism, Nystrom, Performer
from saccade.models import Encoder, minilm
from saccade.nn import EncoderLayer
from saccade.text import visible

__all__ = ["compare"]


def compare(
    text: Annotated[
        list[str], typer.Argument(metavar="TEXT", help="The text; several arguments are joined by spaces.")
    ],
    layer: Annotated[int, typer.Option(help="The layer whose queries and keys are taken, counted from 0.")] = 0,
    features: Annotated[int, typer.Option(min=1, help="Random features of the Performer.")] = 256,
    landmarks: Annotated[int, typer.Option(min=1, help="Landmarks of Nystrom, and slots of Linformer.")] = 32,
    out: Annotated[Path | None, typer.Option(help="The file for a picture of error against time.")] = None,
) -> None:
    """Compare Linear, Performer, Linformer and Nystrom with exact attention.

    Queries, keys and values are those of a layer of a trained model (all-MiniLM-L6-v2) as it reads the text: at most
    512 tokens, the rest is left out. Nothing is trained here: Linear and Linformer would be.
    """
    joined = " ".join(text)
    if not joined.strip():
        _refuse("TEXT must have at least one word; got nothing to read")
    try:
        model = minilm()
    except (ImportError, ValueError) as error:
        typer.echo(f"saccade compare: {error}", err=True)
        raise typer.Exit(1) from None
    if not 0 <= layer < model.config.num_layers:
        _refuse(f"--layer must be from 0 to {model.config.num_layers - 1}; got {layer}")
    query, key, value = _read(model, joined, layer)
    length = key.shape[2]
    mechanisms: list[Mechanism] = [
        Linear(),
        Performer(features),
        Performer(features, kind="hyperbolic"),
        Linformer(length, min(landmarks, length)),
        Nystrom(landmarks),
        Nystrom(landmarks, iterations=None),
    ]
    comparison = compare_tensors(query, key, value, mechanisms)
    typer.echo(str(comparison))
    if out is not None:
        figure = viz.tradeoff(comparison, title=f"Layer {layer} of all-MiniLM-L6-v2, {length} tokens")
        try:
            path = viz.save(figure, out)
        except (OSError, ValueError) as error:
            _refuse(f"--out must be a picture file that can be written; got {out} ({error})")
        typer.echo(f"wrote {visible(str(path))}")


def _read(model: Encoder, text: str, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer, ``[1, heads, tokens, head_dim]``."""
    assert model.tokenizer is not None, "the published model has one"
    tokens = torch.tensor([model.tokenizer.encode(text).ids[: model.config.max_len]])
    attention = cast(EncoderLayer, model.layers[layer]).attention
    seen: list[Tensor] = []
    with torch.no_grad(), attention.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model(tokens)
        query, key, value = (
            project(seen[0]).unflatten(2, (attention.num_heads, attention.head_dim)).transpose(1, 2)
            for project in (attention.query_projection, attention.key_projection, attention.value_projection)
        )
    return query, key, value


def _refuse(sentence: str) -> NoReturn:
    """End with one line that says what was wrong with the arguments."""
    typer.echo(f"saccade compare: {visible(sentence)}.", err=True)
    raise typer.Exit(2)
