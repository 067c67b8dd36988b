"""Load the models of the command line by name or folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from saccade.models import Decoder, Encoder, chinese_encoder, minilm, small_decoder
from saccade.models.checkpoint_folder import read_config
from saccade.support.errors import value_error
from saccade.support.numerics import is_finite
from saccade.text.scripts import is_mostly_chinese

CALLED_AS = "load"  # the name in error messages

MINILM, CHINESE_ENCODER, SMALL_DECODER = "all-MiniLM-L6-v2", "chinese-encoder", "small-decoder"
NAMED: dict[str, Callable[[], Encoder | Decoder]] = {
    MINILM: minilm,
    CHINESE_ENCODER: chinese_encoder,
    SMALL_DECODER: small_decoder,
}
"""The models that come with the package."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

ModelName = Annotated[str, typer.Option("--model", metavar="NAME|FOLDER", help="The name of a model, or its folder.")]
"""The command-line option that names a model."""
OptionalModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER",
        help="The name of a model, or its folder.",
        show_default=f"{MINILM}, or {CHINESE_ENCODER} if most of TEXT is Chinese",
    ),
]
"""The same option with a default that depends on the text."""


def default_encoder_name(text: str) -> str:
    """Return the name of the default encoder for the language of a text."""
    return CHINESE_ENCODER if is_mostly_chinese(text) else MINILM


def shown_name(model: str) -> str:
    """Return the name of a bundled model, or the name of a model's folder, for display."""
    return model if model in NAMED else Path(model).name


def check_name(model: str) -> None:
    """Raise an error unless ``model`` is the name or the folder of a model.

    Raises:
        ValueError: it is neither. For a possible name on the Hugging Face hub, a hint says how to download the model.
    """
    folder = Path(model)
    if model in NAMED or (folder / "config.json").is_file():
        return
    rule = f"be {', '.join(NAMED)}, or a folder with config.json, safetensors and tokenizer.json"
    last = model.rpartition("/")[2]
    here = next((name for name in NAMED if name.lower() == last.lower()), None)
    hint = None
    if folder.exists():
        got = f"{model}, which has no config.json" if folder.is_dir() else f"{model}, a file"
    else:
        got = f"{model}, but there is no such folder"
        if here is not None:
            hint = f"it comes with the package: --model {here}"
        elif _HUB_NAME.fullmatch(model):
            fetch = f"hf download {model} --local-dir {last}"
            hint = f"saccade downloads nothing; if it is on the Hugging Face hub, `{fetch}` downloads it into a folder"
    raise value_error("--model", rule, got, hint=hint)


def load(model: str) -> Encoder | Decoder:
    """Load the encoder or decoder that ``--model`` names.

    Raises:
        ValueError: the model cannot be read.
        ImportError: a package that the model needs is not installed.
        UnsupportedError: the kind of model is unknown.
    """
    if model in NAMED:
        return NAMED[model]()
    folder = Path(model)
    kind = read_config(folder).get("model_type")
    return Encoder.from_pretrained(folder) if kind == "bert" else Decoder.from_pretrained(folder)


def check_numbers(model: nn.Module) -> None:
    """Raise an error if a weight of a model is NaN or infinite.

    Raises:
        ValueError: a weight is NaN or infinite; the message names the first of these weights.
    """
    for name, weight in model.named_parameters():
        if not is_finite(weight) and not bool(weight.isfinite().all()):  # a sum may overflow
            raise value_error("--model", "have finite weights", f"NaN or inf in {name}")
