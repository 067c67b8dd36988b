"""The small language model that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saccade.models.decoder import Decoder

__all__ = ["manuals", "manuals_card", "manuals_folder"]


def manuals() -> Decoder:
    """Load a small language model that has read manuals in English and Chinese: a toy that runs anywhere, offline.

    1.4 million weights; it has learned how Python's documentation and the manual pages of Linux sound, and little of
    what they mean. It is there to try things out: to look at attention, to decode, to compare caches. `manuals_card`
    says what it read, how it was trained and how well it predicts text that it has not read.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; about a second the first time, which the import of the tokenizer takes.

    Example:
        >>> from saccade.models import generate
        >>> model = manuals()
        >>> prompt = model.tokenizer.encode("Return a new").ids
        >>> text = generate(model, [prompt], 4, stop=model.config.end_tokens)[0]
        >>> len(text)
        4
    """
    return Decoder.from_pretrained(manuals_folder())


def manuals_card() -> dict[str, Any]:
    """What `manuals` was trained on and how, with licences and measured losses.

    Example:
        >>> [text["language"] for text in manuals_card()["texts"]]
        ['English', 'Chinese']
    """
    return json.loads((manuals_folder() / "card.json").read_text(encoding="utf-8"))


def manuals_folder() -> Path:
    """The folder of the model's files: config.json, model.safetensors, tokenizer.json, card.json."""
    return Path(__file__).parent / "data" / "manuals"
