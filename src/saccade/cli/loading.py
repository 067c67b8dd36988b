"""Models by the name or folder that a user gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from saccade.errors import value_error
from saccade.models import Decoder, Encoder, manuals, minilm

__all__ = ["MANUALS", "MINILM", "NAMED", "load"]

MINILM, MANUALS = "all-MiniLM-L6-v2", "manuals"
NAMED: dict[str, Callable[[], Encoder | Decoder]] = {MINILM: minilm, MANUALS: manuals}
"""Models that come with a package."""


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
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise value_error("load", "config.json", "be a JSON object", f"{config} ({error})") from None
    return Encoder.from_pretrained(folder) if kind == "bert" else Decoder.from_pretrained(folder)
