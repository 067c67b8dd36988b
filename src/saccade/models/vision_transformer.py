"""A Vision Transformer: an encoder whose tokens are squares of a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.models.checkpoint_folder import check_types, read_config, read_weights
from saccade.models.clip import ClipVision
from saccade.models.image_inputs import cells, check_map, waves
from saccade.models.init import start_small
from saccade.models.loading import built, check_tensors, words_of
from saccade.models.vision_config import VisionTransformerConfig
from saccade.models.vit import VisionFormat, ViT
from saccade.nn import EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.nn.projections import weight_of
from saccade.positions import Learned
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["VisionTransformer"]

_WHERE = "VisionTransformer"
_FORMATS: dict[str, type[VisionFormat]] = {"vit": ViT, "clip_vision_model": ClipVision}


class VisionTransformer(AnswersCalls, nn.Module):
    """Pictures are cut into squares, each becomes a token, and every token looks at every other.

    Tokens are the class token, if there is one, then the patches, row by row: the patch in row y and column x of the
    grid is token ``y * columns + x``, one more with a class token. A mask on a grid is told so by ``.after(1)``.

    Args:
        config: its sizes.

    Attributes:
        stack: the layers and the last norm, a `saccade.nn.EncoderStack`.

    Cost: O(num_layers * (tokens * embed_dim ** 2 + pairs * embed_dim)) time, pairs as many as the mask allows; memory
    linear in the number of tokens.

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

    Reference: Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1; waves of two axes: Chen et al. 2021,
    arXiv:2104.02057, appendix.
    """

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
        start_small(self)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a published model from a folder on disk, in float32 and eval mode.

        Reads ``config.json`` and ``model.safetensors``; pickled weights never. ``ViTForImageClassification`` has a
        head, ``ViTModel`` and CLIP's vision model have none; a pooler is left alone.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: not a Vision Transformer as we compute it; every reason is listed.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        check_types(told)
        return cls._of(told, read_weights(folder), torch.float32)

    @classmethod
    def from_state_dict(
        cls, config: object, state_dict: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32
    ) -> Self:
        """The model of weights that are in memory, in eval mode; they are copied.

        Args:
            config: what the model's ``config.json`` says, as a dict, or a config of transformers.
            state_dict: the tensors under their published names, or as transformers holds them: of ``ViTModel``,
                ``ViTForImageClassification`` or ``CLIPVisionModel``, in any dtype of floats.
            dtype: of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: no config, no tensors, or a dtype that is no float's.
        """
        return cls._of(words_of(config), state_dict, dtype)

    @classmethod
    def _of(cls, told: Mapping[str, object], weights: Mapping[str, Tensor], dtype: torch.dtype) -> Self:
        kind = told.get("model_type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise unsupported(_WHERE, [f"model_type is {kind!r}, not one of {', '.join(_FORMATS)}"])
        check_tensors(weights)
        return built(told, weights, _FORMATS[kind](weights), cls, dtype, None)

    def forward(self, images: Tensor, *, mask: object = None) -> Tensor:
        """Classify.

        Args:
            images: ``[batch, channels, H, W]``, of the size that the config says.
            mask: the facts of this batch about tokens, joined with the model's own by ``&``.

        Returns:
            Logits ``[batch, num_classes]``; without a head, what `embed` returns.

        Raises:
            TypeError: images are no tensor.
            ValueError: another shape, size or dtype.
        """
        pooled = self.embed(images, mask=mask)
        return pooled if self.head is None else self.head(pooled)

    def embed(self, images: Tensor, *, mask: object = None) -> Tensor:
        """Make one vector of each picture, as ``config.pooling`` says: ``[batch, embed_dim]``; see `forward`."""
        hidden = self.hidden(images, mask=mask)
        if self.config.pooling == "class_token":
            return hidden[:, 0]
        return hidden[:, int(self.config.class_token) :].mean(1)

    def hidden(self, images: Tensor, *, mask: object = None) -> Tensor:
        """What the last layer makes of each token, ``[batch, tokens, embed_dim]``; arguments as in `forward`."""
        return self.stack(self._embedded(images), mask=mask)

    def matrices(self, images: Tensor, *, mask: object = None) -> list[Matrix]:
        """Say which token looks at which in every layer when `forward` gets the same arguments.

        Returns:
            One matrix per layer, ``[batch, num_heads, tokens, tokens]``; lazy, so nothing of that size is built.

        Cost: a forward pass; memory linear in the number of tokens.
        """
        return self.stack.matrices(self._embedded(images), mask=mask)

    def _embedded(self, images: Tensor) -> Tensor:
        config = self.config
        check_map("images", images, config.channels, weight_of(self.patch))
        size, side = tuple(images.shape[2:]), config.patch_size
        if self.position is not None and size != config.image_size:
            hint = "position vectors are learned, one for each patch; position_encoding='sinusoidal' has no size"
            raise value_error("images", f"be {_by(config.image_size)}", _by(size), hint=hint)
        if any(own % side for own in size):
            raise value_error("images", f"have sides that are multiples of {side}, as patches", _by(size))
        x = self.patch(images)  # [batch, embed_dim, rows, columns]
        rows, columns = x.shape[2:]
        x = x.flatten(2).mT
        if self.position is None:
            x = x + waves(*cells(rows, columns, x.device), config.embed_dim).to(x.dtype)
        if self.class_token is not None:
            first = self.class_token(torch.zeros(len(x), 1, dtype=torch.int64, device=x.device))
            x = torch.cat([first, x], 1)
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
