"""Load models for an audit: from a folder with weights, or from a configuration alone, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from saccade.support.errors import missing_extra, value_error

_HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")


def model_of(path: Path, *, seed: int = 0) -> nn.Module:
    """Load a transformers model for an audit, in evaluation mode.

    Args:
        path: a folder with config.json and safetensors, or only a config.json. If there are no weights, random weights
            are used; they suffice to detect a leak.
        seed: seed of random weights.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the path has no configuration that transformers supports.
    """
    with quiet_transformers("audit") as transformers, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _load(transformers, path).eval()
        except Exception as error:  # loading an arbitrary folder may raise any error
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            rule = "be a configuration that transformers supports"
            raise value_error("MODEL", rule, f"{path} ({first})") from None


@contextmanager
def quiet_transformers(command: str) -> Iterator[Any]:
    """Import transformers, and silence its warnings and progress bars within the block.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        import transformers  # noqa: PLC0415  optional
        from transformers.utils import logging  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("transformers", "transformers") from None
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _load(transformers: Any, path: Path) -> nn.Module:
    own = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(path, **own)
    if path.is_dir() and any(path.glob("*.safetensors")):
        name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        maker: Any = getattr(transformers, name, None)
        if not (isinstance(maker, type) and issubclass(maker, transformers.PreTrainedModel)):
            maker = transformers.AutoModel
        return maker.from_pretrained(path, use_safetensors=True, **own)
    heads = ("AutoModelForSeq2SeqLM", *_HEADS) if getattr(config, "is_encoder_decoder", False) else _HEADS
    known = (getattr(transformers, name) for name in heads)
    maker = next((one for one in known if type(config) in one._model_mapping), None)
    if maker is None:
        raise ValueError(f"transformers has no model class for {type(config).__name__}")
    return maker.from_config(config)
