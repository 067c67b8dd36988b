"""Load models from a folder with transformers, and record them while they run on their own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.loading import quiet_transformers
from saccade.matrix import AttentionMatrix, Matrix
from saccade.models.checkpoint_folder import read_config, read_weights
from saccade.recording import record
from saccade.support.errors import unsupported, value_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CALLED_AS = "look"  # the name in error messages

_CROSS = ("cross", "encdec", "encoder_attn")  # substrings in the names of cross-attention layers


class TransformersModel:
    """A transformers model in evaluation mode, with its tokenizer.

    Attributes:
        module: the transformers model.
        tokenizer: the fast tokenizer of the model.
        unknown: the token for unknown words.
        max_len: maximum number of tokens that the model can read.
        is_encoder_decoder: whether the model is an encoder-decoder.
    """

    def __init__(self, model: Any, tokenizer: Any):
        self.module, self._tokenizer = model.eval(), tokenizer
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()  # the file may enable truncation and padding
        self.tokenizer.no_padding()
        self.unknown: str = tokenizer.unk_token or "[UNK]"
        config = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = getattr(text, "max_position_embeddings", None)
        self.max_len: int = min(limit or 1 << 30, tokenizer.model_max_length, *_position_counts(model))
        self.is_encoder_decoder = bool(config.is_encoder_decoder)

    def matrices(self, tokens: Tensor) -> list[Matrix]:
        """Return a lazy matrix for each layer, or for each encoder layer of an encoder-decoder."""
        return self._recorded(self.module.get_encoder() if self.is_encoder_decoder else self.module, tokens)

    def cross_matrices(self, tokens: Tensor, other: Tensor) -> list[Matrix]:
        """Return the cross-attention from the other text to the first one, as a lazy matrix for each layer."""
        return self._recorded(self.module, tokens, decoder_input_ids=other, use_cache=False)

    @staticmethod
    def _recorded(model: Any, tokens: Tensor, **other: Any) -> list[Matrix]:
        with torch.no_grad(), record(model, keep="qk") as recording:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **other)
        names = [name for name in recording if any(mark in name.lower() for mark in _CROSS) == bool(other)]
        recorded = [recording[name].matrix for name in names]
        matrices: list[Matrix] = [one for one in recorded if isinstance(one, AttentionMatrix)]  # excludes recurrences
        if not matrices:
            reason = "its layers are recurrences, whose weights can be negative"
            raise unsupported(type(model).__name__, [reason], hint="saccade.record gives their matrices")
        return matrices


def _position_counts(model: nn.Module) -> Iterator[int]:
    """Yield the number of usable positions in each position table with a padding index, as in RoBERTa."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            yield module.num_embeddings - module.padding_idx - 1


def load_transformers(folder: Path) -> TransformersModel:
    """Load a model and its tokenizer from safetensors and JSON files in a folder, without running code from it.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder does not contain a model that transformers can read, or has no fast tokenizer.
    """
    with quiet_transformers("look") as transformers:
        _check_layers(folder)
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            model = transformers.AutoModel.from_pretrained(folder, use_safetensors=True, dtype="auto", **local)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        except Exception as error:  # loading an arbitrary folder may raise any exception
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            rule = "contain a safetensors model and a tokenizer that transformers can read"
            raise value_error("--model", rule, f"{folder} ({first})") from None
    if not getattr(tokenizer, "is_fast", False):
        raise value_error("--model", "have a fast tokenizer (tokenizer.json)", f"{folder}")
    return TransformersModel(model, tokenizer)


def _check_layers(folder: Path) -> None:
    """Raise an error if config.json has more layers than tensors, since transformers would allocate them first."""
    config = read_config(folder)
    if not (folder / "model.safetensors").is_file():
        return
    count = len(read_weights(folder))
    for name, number in config.items():
        if ("layers" in name or name == "n_layer") and isinstance(number, int) and number > count:
            rule = "match the sizes of the weights"
            raise value_error("config.json", rule, f"{name} {number}, and {count} tensors")
