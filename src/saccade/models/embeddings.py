"""Embeddings: what a token is before any attention."""

import torch
from torch import Tensor, nn

from saccade.models.encoder_config import EncoderConfig

__all__ = ["Embeddings"]


class Embeddings(nn.Module):
    """The normalised sum of three vectors: for the token, for its position and for its segment."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.embed_dim, padding_idx=config.pad_token)
        self.position = nn.Embedding(config.max_len, config.embed_dim)
        self.token_type = nn.Embedding(config.num_token_types, config.embed_dim)
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout_p)

    def forward(self, tokens: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Embed.

        Args:
            tokens: int ``[batch, len]``.
            token_types: int ``[batch, len]``; all 0 when None.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        types = torch.zeros_like(tokens) if token_types is None else token_types
        total = self.word(tokens) + self.token_type(types) + self.position(positions)
        return self.dropout(self.norm(total))
