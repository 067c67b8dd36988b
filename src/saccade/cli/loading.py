"""Models by the name or folder that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from saccade.errors import value_error
from saccade.finite import is_finite
from saccade.models import Decoder, Encoder, manuals, minilm
from saccade.models.folder import read_config

__all__ = ["MANUALS", "MINILM", "NAMED", "ModelName", "check_numbers", "load", "shown_name"]

MINILM, MANUALS = "all-MiniLM-L6-v2", "manuals"
NAMED: dict[str, Callable[[], Encoder | Decoder]] = {MINILM: minilm, MANUALS: manuals}
"""Models that come with a package."""

ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME|FOLDER", help="A model by name, or the folder of one.")
]
"""The option that names a model."""


def shown_name(model: str) -> str:
    """A model's name, or that of its folder."""
    return model if model in NAMED else Path(model).name


def load(model: str) -> Encoder | Decoder:
    """A model that comes by name, or one from a folder: an encoder of BERT's form, or a decoder.

    Raises:
        ValueError: neither a name nor the folder of a model, or a model that cannot be read.
        ImportError: a package that the model needs is not installed.
        UnsupportedError: a form of model that is not known.
    """
    if model in NAMED:
        return NAMED[model]()
    folder = Path(model)
    config = folder / "config.json"
    if not config.is_file():
        names = ", ".join(NAMED)
        rule = f"be {names}, or a folder with config.json, safetensors and tokenizer.json"
        raise value_error("load", "--model", rule, model)
    kind = read_config("load", folder).get("model_type")
    return Encoder.from_pretrained(folder) if kind == "bert" else Decoder.from_pretrained(folder)


def check_numbers(model: nn.Module) -> None:
    """Refuse a model that makes nothing but NaN of whatever it reads.

    Raises:
        ValueError: a weight is NaN or infinite; the first one is named.
    """
    for name, weight in model.named_parameters():
        if not is_finite(weight) and not bool(weight.isfinite().all()):  # a sum may overflow
            raise value_error("load", "--model", "have finite weights", f"NaN or inf in {name}")
