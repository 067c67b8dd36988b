"""An encoder-decoder: one text read as a whole, another written token by token."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import Cache
from saccade.masks import Causal
from saccade.matrix import Matrix
from saccade.models.checkpoint_folder import check_types, read_config, write_folder
from saccade.models.conditioned_decoder import Given
from saccade.models.config import EncoderDecoderConfig
from saccade.models.encoder_decoder_format import PairFormat
from saccade.models.init import start_small, weaken_parts
from saccade.models.loading import load
from saccade.models.token_inputs import check_tokens, in_own_texts
from saccade.nn import DecoderLayer, DecoderStack, EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.nn.norms import make_norm
from saccade.positions import Learned, Rotary, Sinusoidal
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import value_error
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["EncoderDecoder"]


class EncoderDecoder(AnswersCalls, nn.Module):
    """Reads one text, and says for every token of another how likely each token is to come next.

    Both texts share one vocabulary, and the embedding shares its weights with the projection to the vocabulary;
    embeddings are multiplied by the root of ``embed_dim``.

    Args:
        config: its sizes.
        tokenizer: makes tokens of text; only kept, as ``model.tokenizer``, and saved with the weights.

    Attributes:
        encoder, decoder: the layers, a `saccade.nn.EncoderStack` and a `saccade.nn.DecoderStack`.

    Example:
        >>> config = EncoderDecoderConfig(
        ...     vocab_size=50, max_len=32, embed_dim=16, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
        ...     feed_forward_dim=32,
        ... )
        >>> model = EncoderDecoder(config).eval()
        >>> source, tokens = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[1, 8, 9]])
        >>> model(source, tokens).shape
        torch.Size([1, 3, 50])

        To generate, read the source once: ``given(source)`` is a model of the other text.

        >>> writer = model.given(source)
        >>> cache = writer.new_cache()
        >>> first, last = writer(tokens[:, :2], cache=cache), writer(tokens[:, 2:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), model(source, tokens), atol=1e-6)
        True

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.
    """

    def __init__(self, config: EncoderDecoderConfig, tokenizer: Tokenizer | None = None):
        super().__init__()
        self.config = check_type("config", config, EncoderDecoderConfig, "be a saccade.models.EncoderDecoderConfig")
        self.tokenizer = tokenizer
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position = _position(config)
        self.dropout = nn.Dropout(config.dropout_p)
        encoder_layers = [EncoderLayer(**_parts(config, None)) for _ in range(config.num_encoder_layers)]
        decoder_layers = [_decoder_layer(config) for _ in range(config.num_decoder_layers)]
        self.encoder = EncoderStack(encoder_layers, final_norm=_final_norm(config))
        self.decoder = DecoderStack(decoder_layers, final_norm=_final_norm(config))
        start_small(self)
        weaken_parts(self, config.num_encoder_layers + config.num_decoder_layers)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a model from a folder that `save_pretrained` wrote, in float32 and eval mode.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: a model of another kind.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors or tokenizers is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        check_types(told)
        return load(folder, told, PairFormat(), cls)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a folder, in a format of our own.

        Files are written under other names and then renamed, so that a reader finds an old file or a new one, never
        half of one.

        Args:
            path: the folder; made if there is none. Files of other names in it are left alone.

        Raises:
            ImportError: safetensors is not installed.
        """
        words = PairFormat().write_config(self.config)
        state = {name: weight.detach().cpu() for name, weight in self.state_dict().items()}
        write_folder(Path(path), words, state, self.tokenizer)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_positions: GivenPositions = None,
        mask: object = None,
        positions: GivenPositions = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Read ``source``, and say what may come next in ``tokens``.

        Args:
            source: int ``[batch, source_len]``, the text to read.
            tokens: int ``[batch, len]``, the text to write, as far as it is known; with a cache, the new ones only.
            source_positions: where the tokens of ``source`` stand; -1 at its padding, which nobody sees
                (`saccade.caches.padded_positions` makes them of lengths).
            mask: the facts of this batch about ``tokens``; no token sees a later one in any case.
            positions: where ``tokens`` stand; -1 at their padding.
            cache: what `new_cache` made; ``source`` is projected in the first call only.

        Returns:
            Logits, ``[batch, len, vocab_size]``.

        Raises:
            TypeError: tokens are not integers.
            ValueError: another shape, a number that is no token, batches of different sizes.
        """
        given = self.given(source, source_positions=source_positions)
        return given(tokens, mask=mask, positions=positions, cache=cache)

    def given(self, source: Tensor, *, source_positions: GivenPositions = None) -> Given:
        """Read ``source`` once, to write a text about it.

        Args:
            source, source_positions: as in `forward`.

        Returns:
            A model of the other text: ``given(tokens, positions=, cache=)`` and ``given.new_cache()``.
        """
        return Given(self, self.encode(source, source_positions=source_positions), source_positions)

    def encode(self, source: Tensor, *, source_positions: GivenPositions = None) -> Tensor:
        """What the encoder makes of a text: ``[batch, source_len, embed_dim]``; arguments as in `forward`."""
        x = self._embedded("source", source, None, source_positions, None)
        return self.encoder(x, positions=source_positions)

    def hidden(
        self,
        encoded: Tensor | None,
        tokens: Tensor,
        *,
        encoded_positions: GivenPositions = None,
        mask: object = None,
        positions: GivenPositions = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """What the last layer makes of each token, ``[batch, len, embed_dim]``.

        Args:
            encoded: what `encode` made; None where the cache knows it.
            encoded_positions: where its tokens stand.
            tokens, mask, positions, cache: as in `forward`.
        """
        x = self._embedded("tokens", tokens, mask, positions, cache)
        if encoded is not None and len(encoded) != len(tokens):
            rule = f"have {len(encoded)} texts, as the source"
            raise value_error("tokens", rule, len(tokens))
        return self.decoder(
            x, encoded, mask=mask, positions=positions, encoded_positions=encoded_positions, cache=cache
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """How likely each token is to come next, before softmax: ``[..., embed_dim]`` to ``[..., vocab_size]``."""
        return F.linear(hidden, self.embedding.weight)

    def matrices(self, source: Tensor, *, source_positions: GivenPositions = None) -> list[Matrix]:
        """Say who attends to whom in the text that is read, in every layer of the encoder; lazy.

        Args:
            source, source_positions: as in `forward`.
        """
        x = self._embedded("source", source, None, source_positions, None)
        return self.encoder.matrices(x, positions=source_positions)

    def cross_matrices(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_positions: GivenPositions = None,
        positions: GivenPositions = None,
    ) -> list[Matrix]:
        """Say which tokens of ``source`` each of ``tokens`` looks at, in every layer of the decoder.

        Args:
            source, tokens, source_positions, positions: as in `forward`.

        Returns:
            One matrix per layer, ``[batch, num_heads, len, source_len]``; lazy, so nothing of that size is built.
        """
        encoded = self.encode(source, source_positions=source_positions)
        x = self._embedded("tokens", tokens, None, positions, None)
        return self.decoder.cross_matrices(x, encoded, positions=positions, encoded_positions=source_positions)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """An empty cache, for the text that is written and the one that was read.

        Args:
            max_len: room for so many tokens of the written text, taken at once; None to grow.
        """
        return self.decoder.new_cache(max_len)

    def _embedded(
        self, name: str, tokens: Tensor, mask: object, positions: GivenPositions, cache: Cache | None
    ) -> Tensor:
        check_tokens(name, tokens, self.config.vocab_size)
        batch, length = tokens.shape
        if positions is not None:
            positions = Positions.of(positions, f"positions of {name}", length=length, batch=batch)
        x = self.embedding(tokens) * math.sqrt(self.config.embed_dim)
        if self.position is None:
            return self.dropout(x)
        place = cache.positions(length) if positions is None and cache is not None else positions
        vectors = self.position(in_own_texts(range(length) if place is None else place, mask))
        return self.dropout(x + vectors.to(x))  # sinusoids have no weights by which they could follow the model's dtype


def _position(config: EncoderDecoderConfig) -> nn.Module | None:
    if config.position_encoding == "rotary":
        return None
    if config.position_encoding == "learned":
        return Learned(config.max_len, config.embed_dim)
    return Sinusoidal(config.embed_dim)


def _parts(config: EncoderDecoderConfig, mask: Causal | None) -> dict[str, Any]:
    """The parts and options that encoder layers and decoder layers share."""
    dim, heads = config.embed_dim, config.num_heads
    rotary = Rotary(dim // heads) if config.position_encoding == "rotary" else None
    return {
        "attention": MultiHeadAttention(dim, heads, mask=mask, rotary=rotary, dropout_p=config.attention_dropout_p),
        "feed_forward": FeedForward(dim, config.feed_forward_dim, activation=config.activation, gated=config.gated),
        **{name: getattr(config, name) for name in ("norm", "norm_eps", "norm_first", "dropout_p")},
    }


def _decoder_layer(config: EncoderDecoderConfig) -> DecoderLayer:
    across = MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p)
    return DecoderLayer(**_parts(config, Causal()), cross_attention=across)


def _final_norm(config: EncoderDecoderConfig) -> nn.Module | None:
    """A norm where norms come first: nothing else would normalise the last sum."""
    if not config.norm_first:
        return None
    return make_norm(config.norm, config.embed_dim, config.norm_eps)
