"""``saccade compare``: measure the error of masks and approximate attention on tensors of a trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from saccade import viz
from saccade.caches import Int8Cache, QuantizedCache
from saccade.cli.exit_status import loaded, refuse, refuse_combination
from saccade.cli.learn import learn
from saccade.cli.loading import OptionalModelName, default_encoder_name, load, shown_name
from saccade.cli.output_files import save_figure
from saccade.learning import QUESTIONS, quality_on
from saccade.learning.training import DEFAULT
from saccade.masks import Mask, parse
from saccade.matrix import AttentionMatrix
from saccade.mechanisms import Linear, Linformer, Mechanism, Nystrom, Performer
from saccade.mechanisms.comparison import compare as compare_tensors
from saccade.models import Decoder, Encoder
from saccade.nn import DecoderLayer, EncoderLayer, MultiHeadAttention
from saccade.support.language import translated
from saccade.text import visible

_RUNS = Path("saccade-runs")
DEFAULT_MASKS = ["window(64)", "window(64) | global(0)"]


def compare(
    context: typer.Context,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="The text; several arguments are joined by spaces.")
    ] = None,
    model_name: OptionalModelName = None,
    layer: Annotated[int, typer.Option(help="The layer whose queries and keys are used, counted from 0.")] = 0,
    features: Annotated[int, typer.Option(min=1, help="Number of random features of the Performer.")] = 256,
    landmarks: Annotated[
        int, typer.Option(min=1, help="Number of landmarks of Nystrom and of slots of Linformer.")
    ] = 32,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="MASK",
            help="Also compare exact attention under this mask, such as 'sliding(64)'; may be repeated. By default, "
            "'window(64)' and 'window(64) | global(0)'.",
        ),
    ] = None,
    with_caches: Annotated[
        bool,
        typer.Option(
            "--caches",
            help="Also read the text from caches in 8, 4 and 2 bits, and print their size and error; for language "
            "models.",
        ),
    ] = False,
    quality: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="Also train a small model for each row on this task, such as MQAR, and print its accuracy; takes half "
            "a minute per row.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file for a figure: error against time, or training results; by default none is drawn."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train small models on recall instead, one for each token mixer.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Train only this mixer, or only on this task; may be repeated. By default all."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of training runs of each model, with different seeds.")] = 3,
    steps: Annotated[
        int, typer.Option(min=1, help="Maximum number of steps of a training run, one batch per step.")
    ] = DEFAULT.steps,
    runs: Annotated[Path, typer.Option(help="The folder of trained runs; a later call continues them.")] = _RUNS,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of parallel training runs; by default one per core.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the training results as Markdown.")] = False,
) -> None:
    """Compare masks, Linear, Performer, Linformer and Nystrom with exact attention, or train models with each mixer.

    Each row shows an error, a time and a memory size; torch's scaled_dot_product_attention also has a row. Queries,
    keys and values come from a layer of a trained model that reads the text, a BERT-like encoder or a language model;
    text beyond the model's length is left out. Nothing is trained, although Linear and Linformer usually are. Limits of
    a mechanism, such as no causal mask, are reported.

    With --train: small models that differ only in attention, mask, recurrence or convolution learn recall, copying,
    ListOps and passkeys. One training takes half a minute on one core; the whole list takes hours.
    """
    if not train:
        others = ("--only", "--seeds", "--steps", "--runs", "--workers", "--markdown")
        refuse_combination(context, "TEXT", others, "trains nothing; --train does")
        words = text or []
        masks = _parsed(rules or DEFAULT_MASKS)
        measure = None if quality is None else _quality(quality)
        name = model_name or default_encoder_name("".join(words))
        _compare(words, name, layer, features, landmarks, masks, measure, out, with_caches=with_caches)
        return
    why = "reads no text"
    refuse_combination(
        context, "--train", ("--model", "--layer", "--features", "--landmarks", "--mask", "--caches", "--quality"), why
    )
    if text:
        refuse("compare", f"TEXT must be left out if --train is given, which {why}")
    learn(only or [], seeds, steps, runs, workers, out, as_markdown=markdown)


def _parsed(rules: Sequence[str]) -> list[Mask]:
    """Parse the masks of the --mask options."""
    try:
        return [parse(rule) for rule in rules]
    except (TypeError, ValueError) as error:
        refuse("compare", str(error).replace("compare: text must", "--mask must", 1))


def _quality(task: str) -> Callable[[Mechanism | Mask], float]:
    """Return a function that trains a small model with a mechanism or mask on a task, and returns its accuracy."""
    if task not in QUESTIONS:
        refuse("compare", f"--quality must be one of {', '.join(QUESTIONS)}; got {visible(task)}")
    return quality_on(task)


def _compare(
    text: list[str],
    model_name: str,
    layer: int,
    features: int,
    landmarks: int,
    masks: list[Mask],
    quality: Callable[[Mechanism | Mask], float] | None,
    out: Path | None,
    *,
    with_caches: bool,
) -> None:
    """Compare masks, mechanisms and caches on a text, and draw a figure if ``out`` is given."""
    joined = " ".join(text)
    if not joined.strip():
        refuse("compare", "TEXT must have at least one word; got an empty text")
    model = loaded("compare", load, model_name)
    if model.tokenizer is None:
        refuse("compare", f"--model must have a tokenizer.json; got {model_name}")
    if not 0 <= layer < model.config.num_layers:
        refuse("compare", f"--layer must be from 0 to {model.config.num_layers - 1}; got {layer}")
    tokens = model.tokenizer.encode(joined).ids
    query, key, value, mask = _run_layer(model, tokens[: model.config.max_len], layer)
    length = key.shape[2]
    typer.echo(_read_part(shown_name(model_name), layer, length, len(tokens)))
    mechanisms: list[Mechanism | Mask] = [
        *masks,
        Linear(),
        Performer(features),
        Performer(features, kind="hyperbolic"),
        Linformer(length, min(landmarks, length)),
        Nystrom(landmarks),
        Nystrom(landmarks, iterations=None),
    ]
    caches = [Int8Cache(), QuantizedCache(4), QuantizedCache(2)] if with_caches else []
    comparison = compare_tensors(query, key, value, mechanisms, mask=mask, quality=quality, caches=caches)
    typer.echo(str(comparison))
    if out is not None:
        values = {"layer": layer, "model": visible(shown_name(model_name)), "length": length}
        title = translated("Layer {layer} of {model}, {length} tokens", **values)
        save_figure("compare", viz.tradeoff(comparison, title=title), out)


def _read_part(model_name: str, layer: int, length: int, total: int) -> str:
    """Return a line of text that names the layer and the model, and says how many of the tokens the model reads."""
    values = {"model": visible(model_name), "layer": layer, "length": length, "total": total}
    if length == total:
        return translated("layer {layer} of {model}, {length:,} tokens", **values)
    words = "layer {layer} of {model}, the first {length:,} of {total:,} tokens: the model reads no more"
    return translated(words, **values)


def _run_layer(model: Encoder | Decoder, ids: list[int], layer: int) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
    """Run a model on tokens; return a layer's queries, keys and values, ``[1, heads, tokens, head_dim]``, and mask."""
    if not ids:
        refuse("compare", "TEXT must have at least one token; got only characters that the model does not read")
    tokens = torch.tensor([ids])
    layers = model.layers if isinstance(model, Encoder) else model.stack.layers
    attention = cast("MultiHeadAttention", cast("EncoderLayer | DecoderLayer", layers[layer]).attention)
    inputs: list[Tensor] = []
    with torch.no_grad(), attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        model(tokens)
        matrix = cast(AttentionMatrix, attention.matrix(inputs[0]))
        value = attention.value_projection(inputs[0]).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
    return matrix.inputs.query, matrix.inputs.key, value, attention.mask
