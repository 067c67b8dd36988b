"""A decoder of the GPT and Llama families: a language model whose attention can be looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import Cache
from saccade.matrix import Matrix
from saccade.mechanisms import Softmax
from saccade.models.checkpoint_folder import check_types, read_config, write_folder
from saccade.models.checkpoint_format import DecoderFormat
from saccade.models.config import DecoderConfig
from saccade.models.gpt2 import GPT2
from saccade.models.init import start_small, weaken_parts
from saccade.models.llama import Llama, Qwen2
from saccade.models.loading import built, load, words_of
from saccade.models.saccade_format import SaccadeFormat
from saccade.models.token_inputs import check_tokens, in_own_texts
from saccade.nn import DecoderLayer, DecoderStack, FeedForward, MultiHeadAttention
from saccade.nn.norms import make_norm
from saccade.positions import ALiBi, Bias, Learned, Rotary, ShawKeys
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Decoder"]

_FORMATS: dict[str, DecoderFormat] = {
    "gpt2": GPT2(),
    "llama": Llama(),
    "mistral": Llama(),
    "qwen2": Qwen2(),
    "saccade-decoder": SaccadeFormat(),
}
_WRITTEN = ("llama", "gpt2", "saccade-decoder")  # the first that can express the model


class Decoder(AnswersCalls, nn.Module):
    """A language model: for every token of a text, how likely each token of the vocabulary is to come next.

    Args:
        config: its sizes.
        tokenizer: makes tokens of text; only kept, as ``decoder.tokenizer``, and saved with the weights.

    Cost: O(num_layers * (len * embed_dim ** 2 + pairs * embed_dim)) time, pairs as many as the mask allows; memory
    linear in len, but ``len * vocab_size`` for the logits: `hidden` goes without them.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=100, max_len=32, embed_dim=16, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=40
        ... )
        >>> decoder = Decoder(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> decoder(tokens).shape
        torch.Size([1, 4, 100])
        >>> cache = decoder.new_cache()
        >>> first, last = decoder(tokens[:, :3], cache=cache), decoder(tokens[:, 3:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), decoder(tokens), atol=1e-6)
        True

    Reference: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971, section 2.2 (Llama).
    """

    def __init__(self, config: DecoderConfig, tokenizer: Tokenizer | None = None):
        super().__init__()
        self.config = check_type("config", config, DecoderConfig, "be a saccade.models.DecoderConfig")
        self.tokenizer = tokenizer
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        is_learned = config.position_encoding == "learned"
        self.position = Learned(config.max_len, config.embed_dim) if is_learned else None
        self.dropout = nn.Dropout(config.dropout_p)
        norm = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.stack = DecoderStack([_layer(config) for _ in range(config.num_layers)], final_norm=norm)
        self.head = None if config.tied else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        start_small(self)
        weaken_parts(self, config.num_layers)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a published model from a folder on disk, in float32 and eval mode.

        Reads ``config.json``, the weights (``model.safetensors``, or several files with an index) and, where there is
        one, ``tokenizer.json``. Pickled weights are never read, and no code of the folder is run. The formats of GPT-2,
        Llama, Mistral and Qwen2 are understood, and the one that `save_pretrained` falls back on.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: a model that we would compute differently; every reason is listed.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors or tokenizers is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        form = _form(told)
        check_types(told)
        return load(folder, told, form, cls)

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The model of weights that are in memory, in eval mode; they are copied.

        Args:
            config: what the model's ``config.json`` says, as a dict, or a config of transformers.
            state_dict: the tensors under their published names, as `from_pretrained` reads them, in any dtype of
                floats: of transformers' ``LlamaForCausalLM`` for instance.
            tokenizer: kept with the model.
            dtype: of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: no config, no tensors, or a dtype that is no float's.
        """
        told = words_of(config)
        return built(told, state_dict, _form(told), cls, dtype, tokenizer)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a folder, where possible in a format that others read too.

        That of Llama (with a sliding window that of Mistral) or GPT-2 if the model is one, else a format of our own.
        Files are written under other names and then renamed, so that a reader finds an old file or a new one, never
        half of one.

        Args:
            path: the folder; made if there is none. Files of other names in it are left alone.

        Raises:
            UnsupportedError: a mask that no format can express.
            ImportError: safetensors is not installed.
        """
        reasons = {name: _FORMATS[name].reasons_to_write(self.config) for name in _WRITTEN}
        form = next((_FORMATS[name] for name in _WRITTEN if not reasons[name]), None)
        if form is None:
            hint = "a decoder without this mask has the same weights; the mask may also be passed with each call"
            raise unsupported("config.json", reasons["saccade-decoder"], hint=hint)
        state = {own: weight.detach().cpu() for own, weight in self.state_dict().items()}
        words = form.write_config(self.config)
        write_folder(Path(path), words, form.write_weights(state), self.tokenizer)

    def forward(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """Read, and say what may come next.

        Args:
            tokens: int ``[batch, len]``; with a cache, the new ones only.
            mask: the facts of this batch, joined with the model's own by ``&``. ``Documents(lengths)`` packs texts:
                patterns and position vectors begin anew with each.
            positions: where the tokens stand: a range, or int64 ``[len]`` or ``[batch, len]``; -1 means that no token
                stands here (padding), whatever the number in ``tokens`` is. By default from 0, or from where the cache
                is.
            cache: what the model remembers of earlier calls, as `new_cache` makes it; the new tokens are added.

        Returns:
            Logits, ``[batch, len, vocab_size]``; those at token i are about token i + 1.

        Raises:
            TypeError: tokens are not integers.
            ValueError: another shape, a number that is no token, or with learned positions a text beyond ``max_len``.
        """
        return self.logits(self.hidden(tokens, mask=mask, positions=positions, cache=cache))

    def hidden(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """What the last layer makes of each token, ``[batch, len, embed_dim]``; arguments as in `forward`.

        The projection to the vocabulary, often the largest tensor of all, is then made of the tokens that need it:
        ``logits(hidden(tokens, cache=cache)[:, -1:])`` after a long prompt.
        """
        x, positions = self._embedded(tokens, mask, positions, cache)
        return self.stack(x, mask=mask, positions=positions, cache=cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """How likely each token is to come next, before softmax: ``[..., embed_dim]`` to ``[..., vocab_size]``."""
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def matrices(self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None) -> list[Matrix]:
        """Say who attends to whom in every layer when `forward` gets the same arguments.

        Returns:
            One matrix per layer, ``[batch, num_heads, len, len]``; lazy, so nothing of that size is built.

        Cost: a forward pass; memory linear in len.
        """
        x, positions = self._embedded(tokens, mask, positions, None)
        return self.stack.matrices(x, mask=mask, positions=positions)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """An empty cache for this model.

        Args:
            max_len: room for so many tokens, taken at once; None to grow.
        """
        return self.stack.new_cache(max_len)

    def _embedded(
        self, tokens: Tensor, mask: object, positions: GivenPositions, cache: Cache | None
    ) -> tuple[Tensor, Positions | None]:
        """The vectors of tokens, and where these stand, checked."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        batch, length = tokens.shape
        given = None if positions is None else Positions.of(positions, length=length, batch=batch)
        x = self.embedding(tokens)
        if self.position is not None:
            place = cache.positions(length) if given is None and cache is not None else given
            place = in_own_texts(range(length) if place is None else place, mask)
            if isinstance(place, range) and place and place[-1] >= self.config.max_len:
                hint = "its position vectors are learned, and there are no more"
                rule = f"be at most {self.config.max_len} long"
                raise value_error("text", rule, place[-1] + 1, hint=hint)
            x = x + self.position(place)
        return self.dropout(x), given


def _form(told: Mapping[str, Any]) -> DecoderFormat:
    """How the family that a config.json names writes its decoders."""
    kind = told.get("model_type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise unsupported("Decoder", [f"model_type is {kind!r}, not one of {', '.join(_FORMATS)}"])
    return _FORMATS[kind]


def _layer(config: DecoderConfig) -> DecoderLayer:
    rotary: Rotary | None = None
    bias: Bias | None = None
    head_dim = config.embed_dim // config.num_heads
    if config.position_encoding == "rotary":
        rotary = Rotary(head_dim, base=config.rotary_base, scaling=config.rotary_scaling)
    elif config.position_encoding == "alibi":
        bias = ALiBi(config.num_heads)
    elif config.position_encoding == "relative":
        bias = ShawKeys(head_dim, (config.max_len - 1, 0), config.num_heads)
    attention = MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        mask=config.causal_mask,
        mechanism=Softmax(bias=bias),
        rotary=rotary,
        dropout_p=config.attention_dropout_p,
        projection_bias=config.attention_bias,
    )
    feed_forward = FeedForward(
        config.embed_dim,
        config.feed_forward_dim,
        activation=config.activation,
        gated=config.gated,
        projection_bias=config.feed_forward_bias,
    )
    return DecoderLayer(attention, feed_forward, norm=config.norm, norm_eps=config.norm_eps, dropout_p=config.dropout_p)
