"""One layer of a BERT-family encoder."""

from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.models.activations import ACTIVATIONS
from saccade.models.config import EncoderConfig
from saccade.nn import MultiHeadAttention

__all__ = ["EncoderLayer"]


class EncoderLayer(nn.Module):
    r"""Self-attention, then a feed-forward network on every token; each added to its input and normalised.

    .. math:: x' = \mathrm{LN}(x + \mathrm{attention}(x)), \qquad x'' = \mathrm{LN}(x' + W_2\,\phi(W_1 x'))

    Reference: Devlin et al. 2019, arXiv:1810.04805, section 3.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attention = MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p)
        self.attention_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.expand = nn.Linear(config.embed_dim, config.feed_forward_dim)
        self.contract = nn.Linear(config.feed_forward_dim, config.embed_dim)
        self.feed_forward_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout_p)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, *, mask: object = None) -> Tensor:
        """Transform hidden states, ``[batch, len, embed_dim]``; ``mask`` is that of `MultiHeadAttention`."""
        attended = self.attention(hidden, mask=mask)
        hidden = self.attention_norm(hidden + self.dropout(attended))
        inner = self.contract(self.activation(self.expand(hidden)))
        return self.feed_forward_norm(hidden + self.dropout(inner))

    def matrix(self, hidden: Tensor, *, mask: object = None) -> Matrix:
        """The attention matrix that `forward` multiplies by: ``[batch, num_heads, len, len]``, not built."""
        return self.attention.matrix(hidden, mask=mask)
