"""An encoder-decoder that has read its source, as a language model of the other text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from saccade.caches import Cache
from saccade.positions.token_positions import GivenPositions

if TYPE_CHECKING:
    from saccade.models.encoder_decoder import EncoderDecoder

__all__ = ["Given"]


class Given(nn.Module):
    """An `EncoderDecoder` that has read its source: a model of the other text. Made by `EncoderDecoder.given`.

    Args:
        model: the encoder-decoder.
        encoded: what its encoder made of the source.
        encoded_positions: where the tokens of the source stand.
    """

    def __init__(self, model: EncoderDecoder, encoded: Tensor, encoded_positions: GivenPositions = None):
        super().__init__()
        self.model, self.encoded, self.encoded_positions = model, encoded, encoded_positions

    def forward(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """Logits ``[batch, len, vocab_size]`` of ``tokens``; see `EncoderDecoder.forward`."""
        return self.logits(self.hidden(tokens, mask=mask, positions=positions, cache=cache))

    def hidden(
        self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None, cache: Cache | None = None
    ) -> Tensor:
        """What the last layer makes of each token; see `EncoderDecoder.hidden`."""
        # What the cache knows may since have been put in another order, or repeated, with the texts.
        is_known = cache is not None and cache.length > 0
        encoded, where = None if is_known else self.encoded, self.encoded_positions
        return self.model.hidden(encoded, tokens, encoded_positions=where, mask=mask, positions=positions, cache=cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `EncoderDecoder.logits`."""
        return self.model.logits(hidden)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """See `EncoderDecoder.new_cache`."""
        return self.model.new_cache(max_len)
