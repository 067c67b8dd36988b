"""Models that transformers loads from a folder, and that are looked at while they run on their own kernels."""

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

CALLED_AS = "look"  # in errors

_CROSS = ("cross", "encdec", "encoder_attn")  # what layers that look at another text are called


class TransformersModel:
    """A transformers model in evaluation mode, with its tokenizer.

    Attributes:
        module: the model.
        tokenizer: the fast one.
        unknown: its token for what it does not know.
        max_len: most tokens that it reads.
        is_pair: whether it reads one text and writes another.
    """

    def __init__(self, model: Any, tokenizer: Any):
        self.module, self._tokenizer = model.eval(), tokenizer
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()  # whatever its file says: a text keeps all its tokens, and gets no others
        self.tokenizer.no_padding()
        self.unknown: str = tokenizer.unk_token or "[UNK]"
        config = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = getattr(text, "max_position_embeddings", None)
        self.max_len: int = min(limit or 1 << 30, tokenizer.model_max_length, *_places(model))
        self.is_pair = bool(config.is_encoder_decoder)

    def matrices(self, tokens: Tensor) -> list[Matrix]:
        """One lazy matrix for each layer; of an encoder-decoder, those of the encoder."""
        return self._heard(self.module.get_encoder() if self.is_pair else self.module, tokens)

    def cross_matrices(self, tokens: Tensor, other: Tensor) -> list[Matrix]:
        """What each token of the other text looks at in the first, layer by layer."""
        return self._heard(self.module, tokens, decoder_input_ids=other, use_cache=False)

    @staticmethod
    def _heard(model: Any, tokens: Tensor, **other: Any) -> list[Matrix]:
        with torch.no_grad(), record(model, keep="qk") as recording:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **other)
        names = [name for name in recording if any(mark in name.lower() for mark in _CROSS) == bool(other)]
        matrices = [recording[name].matrix for name in names]
        found: list[Matrix] = [one for one in matrices if isinstance(one, AttentionMatrix)]  # and no recurrences
        if not found:
            reason = "its layers are recurrences, whose weights have any sign"
            raise unsupported(type(model).__name__, [reason], hint="saccade.record gives their matrices")
        return found


def _places(model: nn.Module) -> Iterator[int]:
    """Places of tokens that are learned where padding has one too: RoBERTa's begin behind it, and so has fewer."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            yield module.num_embeddings - module.padding_idx - 1


def load_transformers(folder: Path) -> TransformersModel:
    """Load a model and its tokenizer from a folder: safetensors and JSON only, and no code from it.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder holds no model that transformers reads, or no fast tokenizer.
    """
    with quiet_transformers("look") as transformers:
        _check_layers(folder)
        own = {"local_files_only": True, "trust_remote_code": False}
        try:
            model = transformers.AutoModel.from_pretrained(folder, use_safetensors=True, dtype="auto", **own)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **own)
        except Exception as error:  # what a folder of any content makes of so much code: anything
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            rule = "hold a model in safetensors and a tokenizer that transformers reads"
            raise value_error("--model", rule, f"{folder} ({first})") from None
    if not getattr(tokenizer, "is_fast", False):
        raise value_error("--model", "have a fast tokenizer (tokenizer.json)", f"{folder}")
    return TransformersModel(model, tokenizer)


def _check_layers(folder: Path) -> None:
    """Refuse a config.json of more layers than there are tensors: others make all of them before they look."""
    told = read_config(folder)
    if not (folder / "model.safetensors").is_file():
        return
    count = len(read_weights(folder))
    for name, number in told.items():
        if ("layers" in name or name == "n_layer") and isinstance(number, int) and number > count:
            rule = "tell of sizes that the weights have"
            raise value_error("config.json", rule, f"{name} {number}, and {count} tensors")
