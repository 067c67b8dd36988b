"""Models by the name or folder that a user gives."""

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

CALLED_AS = "load"  # in errors

MINILM, CHINESE_ENCODER, SMALL_DECODER = "all-MiniLM-L6-v2", "chinese-encoder", "small-decoder"
NAMED: dict[str, Callable[[], Encoder | Decoder]] = {
    MINILM: minilm,
    CHINESE_ENCODER: chinese_encoder,
    SMALL_DECODER: small_decoder,
}
"""Models that come with a package."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME|FOLDER", help="A model by name, or the folder of one.")
]
"""The option that names a model."""
FittingModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER",
        help="A model by name, or the folder of one.",
        show_default=f"{MINILM}, or {CHINESE_ENCODER} where most of TEXT is Chinese",
    ),
]
"""The same, where the text decides what is meant when nothing is said."""


def fitting_name(text: str) -> str:
    """The encoder that knows most characters of a text."""
    chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return CHINESE_ENCODER if 2 * chinese > sum(not character.isspace() for character in text) else MINILM


def shown_name(model: str) -> str:
    """A model's name, or that of its folder."""
    return model if model in NAMED else Path(model).name


def check_name(model: str) -> None:
    """Refuse what is neither a model that comes by name nor the folder of one.

    Raises:
        ValueError: it is neither; what could be a name on the Hugging Face hub gets the hint how to fetch it.
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
        got = f"{model}, and there is no such folder"
        if here is not None:
            hint = f"it comes along: --model {here}"
        elif _HUB_NAME.fullmatch(model):
            fetch = f"hf download {model} --local-dir {last}"
            hint = f"nothing is downloaded here; if it is on the Hugging Face hub, `{fetch}` makes a folder of it"
    raise value_error("--model", rule, got, hint=hint)


def load(model: str) -> Encoder | Decoder:
    """A model that comes by name, or one from a folder: an encoder of BERT's form, or a decoder.

    Raises:
        ValueError: a model that cannot be read.
        ImportError: a package that the model needs is not installed.
        UnsupportedError: a form of model that is not known.
    """
    if model in NAMED:
        return NAMED[model]()
    folder = Path(model)
    kind = read_config(folder).get("model_type")
    return Encoder.from_pretrained(folder) if kind == "bert" else Decoder.from_pretrained(folder)


def check_numbers(model: nn.Module) -> None:
    """Refuse a model that makes nothing but NaN of whatever it reads.

    Raises:
        ValueError: a weight is NaN or infinite; the first one is named.
    """
    for name, weight in model.named_parameters():
        if not is_finite(weight) and not bool(weight.isfinite().all()):  # a sum may overflow
            raise value_error("--model", "have finite weights", f"NaN or inf in {name}")
