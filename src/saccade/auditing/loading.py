"""Models to be audited: from a folder with weights, or from a configuration alone, with random ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from saccade.errors import missing_extra, value_error

__all__ = ["model_of"]

_HEADS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")


def model_of(path: Path, *, seed: int = 0) -> nn.Module:
    """A transformers model in evaluation mode.

    Args:
        path: a folder with config.json and safetensors; or a config.json alone, with random weights: enough to find
            a leak.
        seed: of random weights.

    Raises:
        ImportError: transformers is not installed.
        ValueError: no configuration of a model that transformers knows.
    """
    try:
        import transformers  # noqa: PLC0415  optional
        from transformers.utils import logging  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("audit", "transformers", "transformers") from None
    folder = path if path.is_dir() else path.parent
    has_weights = path.is_dir() and any(folder.glob("*.safetensors"))
    own = {"local_files_only": True, "trust_remote_code": False}
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, **own)
        names = (
            _HEADS if not has_weights else tuple(json.loads((folder / "config.json").read_text())["architectures"][:1])
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name in names:
                maker = getattr(transformers, name)
                try:
                    if has_weights:
                        found = maker.from_pretrained(folder, use_safetensors=True, **own)
                    else:
                        found = maker.from_config(config)
                except ValueError:  # an Auto class that does not know this configuration
                    continue
                return found.eval()
        raise ValueError(f"no class of transformers makes a model of {type(config).__name__}")
    except Exception as error:  # what a folder of any content makes of so much code: anything
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise value_error("audit", "MODEL", "be a configuration that transformers knows", f"{path} ({first})") from None
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
