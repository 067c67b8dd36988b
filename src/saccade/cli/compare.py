"""``saccade compare``: how far approximate attention is from exact attention, on what a trained model attends with."""

from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from saccade import viz
from saccade.attention import AttentionMatrix
from saccade.cli.loading import MINILM, ModelName, load, shown_name
from saccade.cli.refusal import loaded, refuse
from saccade.cli.writing import writing
from saccade.masks import Mask
from saccade.mechanisms import Linear, Linformer, Mechanism, Nystrom, Performer
from saccade.mechanisms.comparison import compare as compare_tensors
from saccade.models import Decoder, Encoder
from saccade.nn import DecoderLayer, EncoderLayer, MultiHeadAttention
from saccade.text import visible

__all__ = ["compare"]


def compare(
    text: Annotated[
        list[str], typer.Argument(metavar="TEXT", help="The text; several arguments are joined by spaces.")
    ],
    model_name: ModelName = MINILM,
    layer: Annotated[int, typer.Option(help="The layer whose queries and keys are taken, counted from 0.")] = 0,
    features: Annotated[int, typer.Option(min=1, help="Random features of the Performer.")] = 256,
    landmarks: Annotated[int, typer.Option(min=1, help="Landmarks of Nystrom, and slots of Linformer.")] = 32,
    out: Annotated[Path | None, typer.Option(help="The file for a picture of error against time.")] = None,
) -> None:
    """Compare Linear, Performer, Linformer and Nystrom with exact attention.

    Queries, keys and values are those of a layer of a trained model as it reads the text, an encoder of BERT's form or
    a language model; what is longer than the model reads is left out. Nothing is trained here: Linear and Linformer
    would be. What a mechanism cannot do, such as hide later tokens, is said.
    """
    joined = " ".join(text)
    if not joined.strip():
        refuse("compare", "TEXT must have at least one word; got nothing to read")
    model = loaded("compare", load, model_name)
    if model.tokenizer is None:
        refuse("compare", f"--model must have a tokenizer.json; got {model_name}")
    if not 0 <= layer < model.config.num_layers:
        refuse("compare", f"--layer must be from 0 to {model.config.num_layers - 1}; got {layer}")
    query, key, value, mask = _read(model, joined, layer)
    length = key.shape[2]
    mechanisms: list[Mechanism] = [
        Linear(),
        Performer(features),
        Performer(features, kind="hyperbolic"),
        Linformer(length, min(landmarks, length)),
        Nystrom(landmarks),
        Nystrom(landmarks, iterations=None),
    ]
    comparison = compare_tensors(query, key, value, mechanisms, mask=mask)
    typer.echo(str(comparison))
    if out is not None:
        title = f"Layer {layer} of {visible(shown_name(model_name))}, {length} tokens"
        figure = viz.tradeoff(comparison, title=title)
        try:
            with writing("compare", "--out", out, "picture file"):
                path = viz.save(figure, out)
        except ValueError as error:
            refuse("compare", f"--out must be a picture file that can be written; got {out} ({error})")
        typer.echo(f"wrote {visible(str(path))}")


def _read(model: Encoder | Decoder, text: str, layer: int) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
    """Queries, keys and values of a layer, ``[1, heads, tokens, head_dim]``, and its mask."""
    assert model.tokenizer is not None, "it has been looked for"
    tokens = torch.tensor([model.tokenizer.encode(text).ids[: model.config.max_len]])
    if not tokens.numel():
        refuse("compare", "TEXT must have at least one token; got nothing that the model reads")
    layers = model.layers if isinstance(model, Encoder) else model.stack.layers
    attention = cast("MultiHeadAttention", cast("EncoderLayer | DecoderLayer", layers[layer]).attention)
    seen: list[Tensor] = []
    with torch.no_grad(), attention.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        model(tokens)
        matrix = cast(AttentionMatrix, attention.matrix(seen[0]))
        value = attention.value_projection(seen[0]).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
    return matrix.ingredients.query, matrix.ingredients.key, value, attention.mask
