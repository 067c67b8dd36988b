"""VisionTransformer: an image encoder whose tokens are square patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.models.config import VisionTransformerConfig
from saccade.models.image_positions import cell_indices, sinusoids
from saccade.models.initial_weights import init_small_weights
from saccade.models.model_inputs import check_map
from saccade.models.pretrained import Pretrained
from saccade.models.vision_formats import ClipVision, ViT
from saccade.nn import EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.nn.projections import weight_of
from saccade.positions import Learned
from saccade.support.errors import value_error
from saccade.support.validation import check_type


class VisionTransformer(Pretrained):
    """An image encoder in which each square patch of an image becomes a token.

    The class token, if there is one, comes first, followed by the patches row by row. The patch in row y and column x
    of the grid is token ``y * columns + x``, or one more with a class token. ``mask.after(1)`` shifts a grid mask by
    one token. Without a mask, every token attends to every token.

    `from_pretrained` and `from_state_dict` read ``ViTForImageClassification`` (with a head), ``ViTModel`` and CLIP's
    vision model (without one); a pooler is ignored.

    Args:
        config: sizes and options of the model.

    Attributes:
        stack: the layers and the final norm, a `saccade.nn.EncoderStack`.

    Cost: O(num_layers * (tokens * embed_dim ** 2 + pairs * embed_dim)) time, where pairs is the number of pairs
    that the mask allows, and memory that is linear in the number of tokens.

    Example:
        >>> config = VisionTransformerConfig(
        ...     image_size=(32, 48), patch_size=8, embed_dim=16, num_heads=4, num_layers=2, feed_forward_dim=32,
        ...     num_classes=10,
        ... )
        >>> model = VisionTransformer(config).eval()
        >>> images = torch.zeros(2, 3, 32, 48)
        >>> model(images).shape, model.hidden(images).shape
        (torch.Size([2, 10]), torch.Size([2, 25, 16]))
        >>> [matrix.shape for matrix in model.matrices(images)]
        [(2, 4, 25, 25), (2, 4, 25, 25)]

    Reference: Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1; two-dimensional sinusoids: Chen et al. 2021,
    arXiv:2104.02057, appendix.
    """

    formats = {"vit": ViT(), "clip_vision_model": ClipVision()}

    def __init__(self, config: VisionTransformerConfig):
        super().__init__()
        rule = "be a saccade.models.VisionTransformerConfig"
        self.config = check_type("config", config, VisionTransformerConfig, rule)
        width, side = config.embed_dim, config.patch_size
        self.patch = nn.Conv2d(config.channels, width, side, stride=side, bias=config.patch_bias)
        self.class_token = nn.Embedding(1, width) if config.class_token else None
        self.position = Learned(config.num_tokens, width) if config.position_encoding == "learned" else None
        self.embedding_norm = nn.LayerNorm(width, eps=config.norm_eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout_p)
        layers = [_layer(config) for _ in range(config.num_layers)]
        self.stack = EncoderStack(layers, final_norm=nn.LayerNorm(width, eps=config.norm_eps))
        self.head = None if config.num_classes is None else nn.Linear(width, config.num_classes)
        init_small_weights(self)

    def forward(self, images: Tensor, *, mask: object = None) -> Tensor:
        """Return the Vision Transformer's class logits for images.

        Args:
            images: ``[batch, channels, H, W]``, of the size given in the config.
            mask: a token mask for this batch, combined with the model's own mask by ``&``.

        Returns:
            Logits ``[batch, num_classes]``; without a head, the output of `embed`.

        Raises:
            TypeError: ``images`` is not a tensor.
            ValueError: images have the wrong shape, size or dtype.
        """
        pooled = self.embed(images, mask=mask)
        return pooled if self.head is None else self.head(pooled)

    def embed(self, images: Tensor, *, mask: object = None) -> Tensor:
        """Return one vector for each image, ``[batch, embed_dim]``, pooled as set in the config; see `forward`."""
        hidden = self.hidden(images, mask=mask)
        if self.config.pooling == "class_token":
            return hidden[:, 0]
        return hidden[:, int(self.config.class_token) :].mean(1)

    def hidden(self, images: Tensor, *, mask: object = None) -> Tensor:
        """Return the last layer's output for each image token, ``[batch, tokens, embed_dim]``; see `forward`."""
        return self.stack(self._embedded(images), mask=mask)

    @torch.no_grad()
    def matrices(self, images: Tensor, *, mask: object = None) -> list[Matrix]:
        """Return the attention matrices that `forward` uses in the Vision Transformer's layers.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, tokens, tokens]``, without gradients.

        Cost: a forward pass without gradients, and memory that is linear in the number of tokens.
        """
        return self.stack.matrices(self._embedded(images), mask=mask)

    def _embedded(self, images: Tensor) -> Tensor:
        config = self.config
        check_map("images", images, config.channels, weight_of(self.patch))
        size, side = tuple(images.shape[2:]), config.patch_size
        if self.position is not None and size != config.image_size:
            hint = "position vectors are learned, one for each patch; position_encoding='sinusoidal' has no size"
            raise value_error("images", f"be {_by(config.image_size)}", _by(size), hint=hint)
        if any(length % side for length in size):
            raise value_error("images", f"have sides that are multiples of {side}, as patches", _by(size))
        x = self.patch(images)  # [batch, embed_dim, rows, columns]
        rows, columns = x.shape[2:]
        x = x.flatten(2).mT
        if self.position is None:
            x = x + sinusoids(*cell_indices(rows, columns, x.device), config.embed_dim).to(x.dtype)
        if self.class_token is not None:
            class_token = self.class_token(torch.zeros(len(x), 1, dtype=torch.int64, device=x.device))
            x = torch.cat([class_token, x], 1)
        if self.position is not None:
            x = x + self.position(range(x.shape[1]))
        x = self.dropout(x)
        return x if self.embedding_norm is None else self.embedding_norm(x)


def _by(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _layer(config: VisionTransformerConfig) -> EncoderLayer:
    return EncoderLayer(
        MultiHeadAttention(config.embed_dim, config.num_heads, mask=config.mask, dropout_p=config.attention_dropout_p),
        FeedForward(config.embed_dim, config.feed_forward_dim, activation=config.activation),
        norm_eps=config.norm_eps,
        dropout_p=config.dropout_p,
    )
