"""SetDecoder: an object detector that predicts all objects in an image at once, as in DETR."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import NoneType
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.matrix import Matrix
from saccade.models.config import SetDecoderConfig
from saccade.models.hungarian_loss import Detections
from saccade.models.model_inputs import check_map, sinusoids
from saccade.models.pretrained import Pretrained
from saccade.models.vision_formats import Detr
from saccade.nn import FeedForward, MultiHeadAttention
from saccade.nn.encoder_layer import ResidualLayer
from saccade.nn.projections import weight_of
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import type_error
from saccade.support.validation import ShapeSpec, check_type

_VALID = ShapeSpec("valid [batch, H, W]")


class _Features(NamedTuple):
    """The inputs of the detector's encoder: a feature map as tokens, position vectors and a padding mask."""

    tokens: Tensor
    encoding: Tensor
    mask: Tensor | None


class SetDecoder(Pretrained):
    """An object detector in which each learned query predicts one object of an image, or none.

    The encoder's tokens are the cells of a feature map, and the decoder's tokens are the queries. Queries start as
    zeros and differ only in their learned position embeddings. They attend to the image and to each other, so that no
    object is predicted twice. In training, `saccade.models.match_sets` assigns objects to queries. `from_pretrained`
    and `from_state_dict` read DETR.

    Args:
        config: sizes and options of the model.
        backbone: module that computes a feature map ``[batch, channels, H, W]`` from images; None if the inputs are
            already feature maps.

    Attributes:
        encoder, decoder: the layers of each stack.
        query: the position embeddings of the queries, an ``nn.Embedding``.

    Cost: O(num_encoder_layers * (cells * embed_dim ** 2 + cells ** 2 * embed_dim)) time, and memory that is linear in
    the number of cells.

    Example:
        >>> config = SetDecoderConfig(
        ...     channels=8, num_classes=3, num_queries=5, embed_dim=16, num_heads=4, num_encoder_layers=1,
        ...     num_decoder_layers=2, feed_forward_dim=32,
        ... )
        >>> model = SetDecoder(config).eval()
        >>> detections = model(torch.zeros(2, 8, 6, 7))
        >>> detections.logits.shape, detections.boxes.shape
        (torch.Size([2, 5, 4]), torch.Size([2, 5, 4]))
        >>> [matrix.shape for matrix in model.cross_matrices(torch.zeros(2, 8, 6, 7))]
        [(2, 4, 5, 42), (2, 4, 5, 42)]

    Reference: Carion et al. 2020, arXiv:2005.12872, section 3.2.
    """

    formats = {"detr": Detr()}

    def __init__(self, config: SetDecoderConfig, backbone: nn.Module | None = None):
        super().__init__()
        rule = "be a saccade.models.SetDecoderConfig"
        self.config = check_type("config", config, SetDecoderConfig, rule)
        self.backbone = _check_backbone(backbone)
        width = config.embed_dim
        self.input_projection = nn.Conv2d(config.channels, width, 1)
        self.dropout = nn.Dropout(config.dropout_p)
        self.encoder = nn.ModuleList(_layer(config, False) for _ in range(config.num_encoder_layers))
        self.encoder_norm = nn.LayerNorm(width, eps=config.norm_eps) if config.norm_first else None
        self.query = nn.Embedding(config.num_queries, width)
        self.decoder = nn.ModuleList(_layer(config, True) for _ in range(config.num_decoder_layers))
        self.decoder_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.class_head = nn.Linear(width, config.num_classes + 1)
        hidden = [part for _ in range(2) for part in (nn.Linear(width, width), nn.ReLU())]
        self.box_head = nn.Sequential(*hidden, nn.Linear(width, 4))
        for weight in (*self.encoder.parameters(), *self.decoder.parameters()):
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> Self:
        """Load a published DETR from a folder on disk, without its backbone, in float32 and eval mode.

        Args:
            path: the folder, with ``config.json`` and ``model.safetensors``.
            backbone: used unchanged; backbone weights in the file are ignored.

        Raises:
            UnsupportedError, ValueError, ImportError: as in `saccade.models.Encoder.from_pretrained`.
            TypeError: the backbone is not a module.
        """
        _check_backbone(backbone)
        return super().from_pretrained(path)._with_backbone(backbone)

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        backbone: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Build a detector in eval mode from DETR's weights in memory. The weights are copied.

        Args:
            config: the contents of the model's ``config.json`` as a dict, or a transformers config.
            state_dict: the tensors under their published names, or under the names in transformers'
                ``DetrForObjectDetection``, in any float dtype.
            backbone: used unchanged; backbone weights in ``state_dict`` are ignored.
            dtype: dtype of the model, except for its backbone.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: ``config`` is not a config, ``state_dict`` does not map to tensors, the backbone is not a module,
                or ``dtype`` is not floating-point.
        """
        _check_backbone(backbone)
        return super().from_state_dict(config, state_dict, dtype=dtype)._with_backbone(backbone)

    def _with_backbone(self, backbone: nn.Module | None) -> Self:
        self.backbone = backbone
        return self.eval()

    def forward(self, images: Tensor, *, valid: Tensor | None = None) -> Detections:
        """Detect objects in images: predict classes and a box for each query.

        Args:
            images: images for the backbone, or feature maps ``[batch, channels, H, W]`` if there is no backbone.
            valid: bool ``[batch, H, W]`` of any height and width, False at padding. It is resized to the feature map.
                No cell attends to padding, and positions are relative to the image without padding.

        Returns:
            The `Detections`: class logits and a box for each query.

        Raises:
            TypeError: images are not a tensor, or ``valid`` is not a bool tensor.
            ValueError: an input has the wrong shape or dtype.
        """
        return self._detections(self.decoder_norm(self._states(self._encode(images, valid))[-1]))

    def every_layer(self, images: Tensor, *, valid: Tensor | None = None) -> list[Detections]:
        """Return the detections after each decoder layer. The last ones equal the output of `forward`.

        In training, add the losses of all layers, so that each layer learns not to detect an object twice.
        """
        return [self._detections(self.decoder_norm(x)) for x in self._states(self._encode(images, valid))[1:]]

    def hidden(self, images: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Return the output of the last decoder layer, ``[batch, num_queries, embed_dim]``; see `forward`."""
        return self.decoder_norm(self._states(self._encode(images, valid))[-1])

    @torch.no_grad()
    def matrices(self, images: Tensor, *, valid: Tensor | None = None) -> list[Matrix]:
        """Return a lazy matrix for each encoder layer, ``[batch, num_heads, cells, cells]``, without gradients."""
        x, encoding, mask = self._features(images, valid)
        matrices = []
        for layer in self.encoder:
            matrices.append(cast(_SpatialLayer, layer).matrix(x, encoding=encoding, mask=mask))
            x = layer(x, encoding, mask=mask)
        return matrices

    @torch.no_grad()
    def cross_matrices(self, images: Tensor, *, valid: Tensor | None = None) -> list[Matrix]:
        """Return the cross-attention matrices from queries to image cells in all decoder layers.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, num_queries, cells]``, without gradients.
        """
        encoded = self._encode(images, valid)
        layers = zip(self.decoder, self._states(encoded), strict=False)
        query = self.query.weight
        options = {"context_mask": encoded.mask}
        return [
            cast(_SpatialLayer, layer).cross_matrix(x, query, encoded.tokens, encoded.encoding, **options)
            for layer, x in layers
        ]

    def _features(self, images: Tensor, valid: Tensor | None) -> _Features:
        """Compute the inputs of the detector's encoder: tokens, position vectors and a padding mask."""
        if self.backbone is None:
            features = images
        else:
            features = self.backbone(check_type("images", images, Tensor, "be a tensor"))
        name = "images" if self.backbone is None else "output of the backbone"
        check_map(name, features, self.config.channels, weight_of(self.input_projection))
        size = features.shape[2:]
        x = self.input_projection(features).flatten(2).mT
        if valid is None:
            cells, mask = torch.ones(1, *size, dtype=torch.bool, device=x.device), None
        else:
            if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
                raise type_error("valid", "be a bool tensor", getattr(valid, "dtype", type(valid).__name__))
            _VALID.check(valid, batch=len(x))
            cells = F.interpolate(valid[None].float(), size=size)[0].bool()
            mask = cells.flatten(1)[:, None, None]  # [batch, 1, 1, cells]
        return _Features(self.dropout(x), _cell_positions(cells, self.config.embed_dim).to(x.dtype), mask)

    def _encode(self, images: Tensor, valid: Tensor | None) -> _Features:
        """Run the detector's encoder on images."""
        x, encoding, mask = self._features(images, valid)
        for layer in self.encoder:
            x = layer(x, encoding, mask=mask)
        return _Features(x if self.encoder_norm is None else self.encoder_norm(x), encoding, mask)

    def _states(self, encoded: _Features) -> list[Tensor]:
        """Return the input of each decoder layer, followed by the output of the last layer before `decoder_norm`."""
        query = self.query.weight.to(encoded.tokens.dtype)
        states = [torch.zeros_like(query).expand(len(encoded.tokens), -1, -1)]
        for layer in self.decoder:
            states.append(layer(states[-1], query, encoded.tokens, encoded.encoding, context_mask=encoded.mask))
        return states

    def _detections(self, hidden: Tensor) -> Detections:
        return Detections(self.class_head(hidden), self.box_head(hidden).sigmoid())


class _SpatialLayer(ResidualLayer):
    """A detector layer: self-attention, optional cross-attention, and a feed-forward network.

    Position vectors are added to queries and keys in every layer, but never to values.

    Args:
        attention: the self-attention module.
        feed_forward: a network that is applied to each token.
        cross_attention: the module for attention to the context; None for an encoder layer.
        norm_eps, norm_first, dropout_p: see `saccade.nn.EncoderLayer`.

    Reference: Carion et al. 2020, arXiv:2005.12872, section A.3.
    """

    attention: MultiHeadAttention
    cross_attention: MultiHeadAttention | None
    cross_attention_norm: nn.Module | None

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm_eps: float = 1e-5,
        norm_first: bool = False,
        dropout_p: float = 0.0,
    ):
        attentions = {"attention": attention, "cross_attention": cross_attention}
        super().__init__(attentions, feed_forward, "layer", norm_eps, norm_first, dropout_p)

    def forward(
        self,
        x: Tensor,
        encoding: Tensor,
        context: Tensor | None = None,
        context_encoding: Tensor | None = None,
        *,
        context_mask: object = None,
        mask: object = None,
    ) -> Tensor:
        """Return the output of the detector layer.

        Args:
            x: ``[batch, len, embed_dim]``.
            encoding: position vectors of the tokens in ``x``, for each batch item or shared by all.
            context, context_encoding: the tokens for the cross-attention and their position vectors.
            context_mask, mask: which tokens of the context, and of ``x``, each token may attend to.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        x = self._add(x, lambda x: self.attention(keys := x + encoding, keys, x, mask=mask), self.attention_norm)
        cross, norm = self.cross_attention, self.cross_attention_norm
        if cross is not None and norm is not None and context is not None and context_encoding is not None:
            keys = context + context_encoding
            x = self._add(x, lambda x: cross(x + encoding, keys, context, mask=context_mask), norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm)

    def matrix(
        self,
        x: Tensor,
        *,
        encoding: Tensor | None = None,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the layer's lazy self-attention matrix, ``[batch, num_heads, len, len]``."""
        tokens = self.attention_norm(x) if self.norm_first else x
        tokens = tokens if encoding is None else tokens + encoding
        turns = rotary_positions
        return self.attention.matrix(tokens, mask=mask, positions=positions, rotary_positions=turns, bias=bias)

    def cross_matrix(
        self, x: Tensor, encoding: Tensor, context: Tensor, context_encoding: Tensor, *, context_mask: object = None
    ) -> Matrix:
        """Return the layer's lazy cross-attention matrix, ``[batch, num_heads, len, context_len]``."""
        cross, norm = self.cross_attention, self.cross_attention_norm
        assert cross is not None and norm is not None  # noqa: PT018  SetDecoder calls it on decoder layers only
        x = self._add(x, lambda x: self.attention(keys := x + encoding, keys, x), self.attention_norm)
        tokens = norm(x) if self.norm_first else x
        return cross.matrix(tokens + encoding, context + context_encoding, mask=context_mask)


def _check_backbone(backbone: nn.Module | None) -> nn.Module | None:
    return check_type("backbone", backbone, (nn.Module, NoneType), "be a module or None")


def _cell_positions(valid: Tensor, embed_dim: int) -> Tensor:
    """Return position vectors for image cells.

    They encode each cell's row and column as fractions of the image without its padding.

    Args:
        valid: bool ``[batch, rows, columns]``.
        embed_dim: width of the model.

    Returns:
        float64 ``[batch, rows * columns, embed_dim]``.
    """
    y, x = (valid.cumsum(axis, dtype=torch.float64) for axis in (1, 2))
    y, x = (2 * math.pi * count / (count.amax(axis, keepdim=True) + 1e-6) for axis, count in ((1, y), (2, x)))
    return sinusoids(y.flatten(1), x.flatten(1), embed_dim)


def _layer(config: SetDecoderConfig, is_cross: bool) -> _SpatialLayer:
    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p)

    return _SpatialLayer(
        attention(),
        FeedForward(config.embed_dim, config.feed_forward_dim, activation=config.activation),
        cross_attention=attention() if is_cross else None,
        **{name: getattr(config, name) for name in ("norm_eps", "norm_first", "dropout_p")},
    )
