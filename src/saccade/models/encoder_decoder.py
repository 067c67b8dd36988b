"""EncoderDecoder: a sequence-to-sequence model that predicts a target sequence from a source sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import Cache
from saccade.masks import Causal
from saccade.masks.rules.documents import positions_in_documents
from saccade.matrix import Matrix
from saccade.models.config import EncoderDecoderConfig
from saccade.models.initial_weights import init_small_weights, scale_residual_weights
from saccade.models.model_inputs import check_tokens
from saccade.models.pretrained import SavedText
from saccade.models.saccade_format import EncoderDecoderFormat
from saccade.nn import DecoderLayer, DecoderStack, EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.nn.norms import make_norm
from saccade.positions import Learned, Rotary, Sinusoidal
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import value_error
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class EncoderDecoder(SavedText):
    """A sequence-to-sequence model that predicts the tokens of a target sequence from a source sequence.

    Both sequences share one vocabulary. The embedding shares its weights with the projection to the vocabulary, and
    embeddings are multiplied by the square root of ``embed_dim``. Models are saved in saccade's own format.

    Args:
        config: sizes and options of the model.
        tokenizer: stored as ``model.tokenizer`` and saved with the weights; not used by the model itself.

    Attributes:
        encoder, decoder: the layer stacks, a `saccade.nn.EncoderStack` and a `saccade.nn.DecoderStack`.

    Example:
        >>> config = EncoderDecoderConfig(
        ...     vocab_size=50, max_len=32, embed_dim=16, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
        ...     feed_forward_dim=32,
        ... )
        >>> model = EncoderDecoder(config).eval()
        >>> source, tokens = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[1, 8, 9]])
        >>> model(source, tokens).shape
        torch.Size([1, 3, 50])

        To generate, encode the source once: ``given(source)`` is a language model of the target sequence.

        >>> writer = model.given(source)
        >>> cache = writer.new_cache()
        >>> first, last = writer(tokens[:, :2], cache=cache), writer(tokens[:, 2:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), model(source, tokens), atol=1e-6)
        True

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.
    """

    formats = {"saccade-encoder-decoder": EncoderDecoderFormat()}
    written_types = ("saccade-encoder-decoder",)

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
        init_small_weights(self)
        scale_residual_weights(self, config.num_encoder_layers + config.num_decoder_layers)

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
        """Return logits for the next token at every position of the target ``tokens``.

        Args:
            source: int ``[batch, source_len]``.
            tokens: int ``[batch, len]``; with a cache, only the new tokens.
            source_positions: positions of the tokens in ``source``; -1 marks padding, which no token attends to
                (`saccade.caches.padded_positions` computes them from lengths).
            mask: a mask for ``tokens`` in this batch; later tokens are always masked.
            positions: positions of ``tokens``; -1 marks padding.
            cache: a cache from `new_cache`; ``source`` is projected in the first call only.

        Returns:
            Logits, ``[batch, len, vocab_size]``.

        Raises:
            TypeError: tokens are not integers.
            ValueError: a shape is wrong, a token is outside the vocabulary, or the batch sizes differ.
        """
        conditioned = self.given(source, source_positions=source_positions)
        return conditioned(tokens, mask=mask, positions=positions, cache=cache)

    def given(self, source: Tensor, *, source_positions: GivenPositions = None) -> ConditionedDecoder:
        """Encode ``source`` once, and return a language model of the target sequence.

        Args:
            source, source_positions: as in `forward`.

        Returns:
            A model with the signature ``(tokens, positions=, cache=)`` and a method ``new_cache()``.
        """
        context = self.encode(source, source_positions=source_positions)
        return ConditionedDecoder(self, context, source_positions)

    def encode(self, source: Tensor, *, source_positions: GivenPositions = None) -> Tensor:
        """Return the encoder's output, ``[batch, source_len, embed_dim]``. For the arguments, see `forward`."""
        x = self._embedded("source", source, None, source_positions, None)
        return self.encoder(x, positions=source_positions)

    def hidden(
        self,
        context: Tensor | None,
        tokens: Tensor,
        *,
        context_positions: GivenPositions = None,
        mask: object = None,
        positions: GivenPositions = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the output of the last decoder layer for an encoded source, ``[batch, len, embed_dim]``.

        Args:
            context: the output of `encode`; None if it is already in the cache.
            context_positions: positions of the context's tokens.
            tokens, mask, positions, cache: as in `forward`.
        """
        x = self._embedded("tokens", tokens, mask, positions, cache)
        if context is not None and len(context) != len(tokens):
            rule = f"have {len(context)} texts, as many as the source"
            raise value_error("tokens", rule, len(tokens))
        return self.decoder(
            x, context, mask=mask, positions=positions, context_positions=context_positions, cache=cache
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits ``[..., vocab_size]`` for the decoder's output ``[..., embed_dim]``."""
        return F.linear(hidden, self.embedding.weight)

    @torch.no_grad()
    def matrices(self, source: Tensor, *, source_positions: GivenPositions = None) -> list[Matrix]:
        """Return the lazy self-attention matrices of all encoder layers for a source sequence.

        Args:
            source, source_positions: as in `forward`.
        """
        x = self._embedded("source", source, None, source_positions, None)
        return self.encoder.matrices(x, positions=source_positions)

    @torch.no_grad()
    def cross_matrices(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_positions: GivenPositions = None,
        positions: GivenPositions = None,
    ) -> list[Matrix]:
        """Return the cross-attention matrices from ``tokens`` to ``source`` in all decoder layers.

        Args:
            source, tokens, source_positions, positions: as in `forward`.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, len, source_len]``.
        """
        context = self.encode(source, source_positions=source_positions)
        x = self._embedded("tokens", tokens, None, positions, None)
        return self.decoder.cross_matrices(x, context, positions=positions, context_positions=source_positions)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """Return an empty cache for both sequences of the encoder-decoder.

        Args:
            max_len: number of ``tokens`` to allocate memory for in advance; if None, the cache grows as needed.
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
        following = cache.positions(length) if positions is None and cache is not None else positions
        vectors = self.position(positions_in_documents(range(length) if following is None else following, mask))
        return self.dropout(x + vectors.to(x))  # sinusoids have no weights, so they do not follow the model's dtype


class ConditionedDecoder(nn.Module):
    """A language model of the target sequence: an `EncoderDecoder` together with an encoded source.

    `EncoderDecoder.given` returns one.

    Args:
        model: the encoder-decoder.
        context: the encoder's output for the source.
        context_positions: positions of the source's tokens.
    """

    def __init__(self, model: EncoderDecoder, context: Tensor, context_positions: GivenPositions = None):
        super().__init__()
        self.model, self.context, self.context_positions = model, context, context_positions

    def forward(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """Return next-token logits ``[batch, len, vocab_size]``; see `EncoderDecoder.forward`."""
        return self.logits(self.hidden(tokens, mask=mask, positions=positions, cache=cache))

    def hidden(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """Return the output of the last decoder layer for each token; see `EncoderDecoder.hidden`."""
        # Once the source is cached, use the cached copy, whose rows may have been reordered or repeated since.
        context_cached = cache is not None and cache.length > 0
        context, where = None if context_cached else self.context, self.context_positions
        return self.model.hidden(context, tokens, context_positions=where, mask=mask, positions=positions, cache=cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits for the decoder's output; see `EncoderDecoder.logits`."""
        return self.model.logits(hidden)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """Return an empty cache for generating from the encoded source; see `EncoderDecoder.new_cache`."""
        return self.model.new_cache(max_len)


def _position(config: EncoderDecoderConfig) -> nn.Module | None:
    if config.position_encoding == "rotary":
        return None
    if config.position_encoding == "learned":
        return Learned(config.max_len, config.embed_dim)
    return Sinusoidal(config.embed_dim)


def _parts(config: EncoderDecoderConfig, mask: Causal | None) -> dict[str, Any]:
    """Build the arguments that the constructors of encoder layers and decoder layers have in common."""
    dim, heads = config.embed_dim, config.num_heads
    rotary = Rotary(dim // heads) if config.position_encoding == "rotary" else None
    return {
        "attention": MultiHeadAttention(dim, heads, mask=mask, rotary=rotary, dropout_p=config.attention_dropout_p),
        "feed_forward": FeedForward(dim, config.feed_forward_dim, activation=config.activation, gated=config.gated),
        **{name: getattr(config, name) for name in ("norm", "norm_eps", "norm_first", "dropout_p")},
    }


def _decoder_layer(config: EncoderDecoderConfig) -> DecoderLayer:
    cross_attention = MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p)
    return DecoderLayer(**_parts(config, Causal()), cross_attention=cross_attention)


def _final_norm(config: EncoderDecoderConfig) -> nn.Module | None:
    """Build the norm at the end of the model's encoder or decoder; None if the config says post-norm."""
    if not config.norm_first:
        return None
    return make_norm(config.norm, config.embed_dim, config.norm_eps)
