"""A set decoder: objects in a picture, found all at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.matrix import Matrix
from saccade.models.checkpoint_folder import check_types, read_config, read_weights
from saccade.models.detr import Detr
from saccade.models.hungarian_loss import Found
from saccade.models.image_inputs import check_map, waves
from saccade.models.loading import built, check_tensors, words_of
from saccade.models.spatial_layer import PlacedLayer
from saccade.models.vision_config import SetDecoderConfig
from saccade.nn import FeedForward, MultiHeadAttention
from saccade.nn.projections import weight_of
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import type_error, unsupported
from saccade.support.validation import ShapeSpec, check_type

__all__ = ["SetDecoder"]

_WHERE = "SetDecoder"
_REAL = ShapeSpec("real [batch, H, W]")


class _Seen(NamedTuple):
    """A feature map as tokens, where each stands, and which of them are no padding."""

    tokens: Tensor
    place: Tensor
    mask: Tensor | None


class SetDecoder(AnswersCalls, nn.Module):
    """Queries look at a picture and at each other, and each says what it has found and where, or that it found nothing.

    An encoder goes over a feature map, each cell of which is a token. A decoder's tokens are the learned queries: they
    start as zeros, and are told apart by vectors that stand for places, as cells are. Nothing is found twice, since
    queries see each other; which query must find which object is settled in training by `saccade.models.match_sets`.

    Args:
        config: its sizes.
        backbone: makes a feature map ``[batch, channels, H, W]`` of pictures; None where feature maps are given.

    Attributes:
        encoder, decoder: the layers.
        query: the vectors of the queries, an ``nn.Embedding``.

    Cost: O(num_encoder_layers * (cells * embed_dim ** 2 + cells ** 2 * embed_dim)) time; memory linear in the cells.

    Example:
        >>> config = SetDecoderConfig(
        ...     channels=8, num_classes=3, num_queries=5, embed_dim=16, num_heads=4, num_encoder_layers=1,
        ...     num_decoder_layers=2, feed_forward_dim=32,
        ... )
        >>> model = SetDecoder(config).eval()
        >>> found = model(torch.zeros(2, 8, 6, 7))
        >>> found.logits.shape, found.boxes.shape
        (torch.Size([2, 5, 4]), torch.Size([2, 5, 4]))
        >>> [matrix.shape for matrix in model.cross_matrices(torch.zeros(2, 8, 6, 7))]
        [(2, 4, 5, 42), (2, 4, 5, 42)]

    Reference: Carion et al. 2020, arXiv:2005.12872, section 3.2.
    """

    def __init__(self, config: SetDecoderConfig, backbone: nn.Module | None = None):
        super().__init__()
        rule = "be a saccade.models.SetDecoderConfig"
        self.config = check_type("config", config, SetDecoderConfig, rule)
        self.backbone = check_type("backbone", backbone, (nn.Module, NoneType), "be a module or None")
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

        Reads ``config.json`` and ``model.safetensors``; pickled weights never.

        Args:
            path: the folder.
            backbone: taken as it is; the file's weights for one are left alone.

        Raises:
            UnsupportedError: not a DETR as we compute it; every reason is listed.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        check_types(told)
        return cls._of(told, read_weights(folder), backbone, torch.float32)

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        backbone: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The model of weights that are in memory, in eval mode; they are copied.

        Args:
            config: what the model's ``config.json`` says, as a dict, or a config of transformers.
            state_dict: the tensors under their published names, or as transformers' ``DetrForObjectDetection`` holds
                them, in any dtype of floats.
            backbone: taken as it is; weights for one are left alone.
            dtype: of the model, its backbone aside.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: no config, no tensors, a backbone that is no module, or a dtype that is no float's.
        """
        return cls._of(words_of(config), state_dict, backbone, dtype)

    @classmethod
    def _of(
        cls,
        told: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        backbone: nn.Module | None,
        dtype: torch.dtype,
    ) -> Self:
        check_type("backbone", backbone, (nn.Module, NoneType), "be a module or None")
        if told.get("model_type") != "detr":
            raise unsupported(_WHERE, [f"model_type is {told.get('model_type')!r}, not 'detr'"])
        check_tensors(weights)
        model = built(told, weights, Detr(weights), cls, dtype, None)
        model.backbone = backbone
        return model.eval()

    def forward(self, images: Tensor, *, real: Tensor | None = None) -> Found:
        """Find objects.

        Args:
            images: pictures for the backbone; without one, feature maps ``[batch, channels, H, W]``.
            real: bool ``[batch, H, W]``, False where a picture is padding; of any height and width, since it is brought
                to those of the feature map. No cell sees padding, and places are counted in the picture alone.

        Returns:
            What each query found: logits of the classes and a box.

        Raises:
            TypeError: images are no tensor, or ``real`` is no bool tensor.
            ValueError: another shape or dtype.
        """
        return self._found(self.decoder_norm(self._states(self._seen(images, real))[-1]))

    def every_layer(self, images: Tensor, *, real: Tensor | None = None) -> list[Found]:
        """What the queries would have found after each of the decoder's layers, the last as in `forward`.

        In training the losses of all are added: each layer then learns by itself not to find things twice.
        """
        return [self._found(self.decoder_norm(x)) for x in self._states(self._seen(images, real))[1:]]

    def hidden(self, images: Tensor, *, real: Tensor | None = None) -> Tensor:
        """What the last layer makes of each query, ``[batch, num_queries, embed_dim]``; arguments as in `forward`."""
        return self.decoder_norm(self._states(self._seen(images, real))[-1])

    def matrices(self, images: Tensor, *, real: Tensor | None = None) -> list[Matrix]:
        """Which cell looks at which, in every layer of the encoder: ``[batch, num_heads, cells, cells]``, not built."""
        x, place, mask = self._features(images, real)
        found = []
        for layer in self.encoder:
            found.append(cast(PlacedLayer, layer).matrix(x, place=place, mask=mask))
            x = layer(x, place, mask=mask)
        return found

    def cross_matrices(self, images: Tensor, *, real: Tensor | None = None) -> list[Matrix]:
        """Which cells each query looks at, in every layer of the decoder.

        Returns:
            One matrix per layer, ``[batch, num_heads, num_queries, cells]``; lazy, so nothing of that size is built.
        """
        seen = self._seen(images, real)
        layers = zip(self.decoder, self._states(seen), strict=False)
        query = self.query.weight
        facts = {"context_mask": seen.mask}
        return [
            cast(PlacedLayer, layer).cross_matrix(x, query, seen.tokens, seen.place, **facts) for layer, x in layers
        ]

    def _features(self, images: Tensor, real: Tensor | None) -> _Seen:
        """What the encoder is given."""
        if self.backbone is None:
            features = images
        else:
            features = self.backbone(check_type("images", images, Tensor, "be a tensor"))
        name = "images" if self.backbone is None else "what the backbone returns"
        check_map(name, features, self.config.channels, weight_of(self.input_projection))
        size = features.shape[2:]
        x = self.input_projection(features).flatten(2).mT
        if real is None:
            there, mask = torch.ones(1, *size, dtype=torch.bool, device=x.device), None
        else:
            if not isinstance(real, Tensor) or real.dtype != torch.bool:
                raise type_error("real", "be a bool tensor", getattr(real, "dtype", type(real).__name__))
            _REAL.check(real, batch=len(x))
            there = F.interpolate(real[None].float(), size=size)[0].bool()
            mask = there.flatten(1)[:, None, None]  # [batch, 1, 1, cells]
        return _Seen(self.dropout(x), _places(there, self.config.embed_dim).to(x.dtype), mask)

    def _seen(self, images: Tensor, real: Tensor | None) -> _Seen:
        """What the encoder makes of it."""
        x, place, mask = self._features(images, real)
        for layer in self.encoder:
            x = layer(x, place, mask=mask)
        return _Seen(x if self.encoder_norm is None else self.encoder_norm(x), place, mask)

    def _states(self, seen: _Seen) -> list[Tensor]:
        """What each layer of the decoder is given, and what the last returns; `decoder_norm` is yet to come."""
        query = self.query.weight.to(seen.tokens.dtype)
        states = [torch.zeros_like(query).expand(len(seen.tokens), -1, -1)]
        for layer in self.decoder:
            states.append(layer(states[-1], query, seen.tokens, seen.place, context_mask=seen.mask))
        return states

    def _found(self, hidden: Tensor) -> Found:
        return Found(self.class_head(hidden), self.box_head(hidden).sigmoid())


def _places(real: Tensor, embed_dim: int) -> Tensor:
    """Where cells stand: row and column counted from the picture's edge, as parts of its height and width.

    Args:
        real: bool ``[batch, rows, columns]``.
        embed_dim: width of the model.

    Returns:
        float64 ``[batch, rows * columns, embed_dim]``.
    """
    y, x = (real.cumsum(axis, dtype=torch.float64) for axis in (1, 2))
    y, x = (2 * math.pi * own / (own.amax(axis, keepdim=True) + 1e-6) for axis, own in ((1, y), (2, x)))
    return waves(y.flatten(1), x.flatten(1), embed_dim)


def _layer(config: SetDecoderConfig, looks_across: bool) -> PlacedLayer:
    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p)

    return PlacedLayer(
        attention(),
        FeedForward(config.embed_dim, config.feed_forward_dim, activation=config.activation),
        cross_attention=attention() if looks_across else None,
        **{name: getattr(config, name) for name in ("norm_eps", "norm_first", "dropout_p")},
    )
