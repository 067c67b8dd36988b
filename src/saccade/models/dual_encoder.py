"""DualEncoder: an image encoder and a text encoder with a shared vector space, as in CLIP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.checkpoint_folder import check_types
from saccade.models.decoder import Decoder
from saccade.models.model_inputs import check_tokens
from saccade.models.pretrained import PretrainedText, build, check_fit, check_tensors
from saccade.models.vision_formats import DEFAULTS, ClipText, ClipVision
from saccade.models.vision_transformer import VisionTransformer
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_int, check_type

_NAMES = {
    "image_projection.weight": "visual_projection.weight",
    "text_projection.weight": "text_projection.weight",
    "log_scale": "logit_scale",
}


class DualEncoder(PretrainedText):
    r"""An image encoder and a text encoder that map to a shared vector space, as in CLIP.

    .. math:: s_{ij} = \tau\, \frac{u_i \cdot v_j}{\lVert u_i \rVert \lVert v_j \rVert}

    for image i with vector u and text j with vector v. The text encoder is a causal decoder. A text's vector is the
    output at its first end token, that is, the first of its tokens in ``text_encoder.config.end_tokens``. If the config
    has no end tokens, it is the output at the first occurrence of the text's highest token id, as in CLIP's files.
    `from_pretrained` and `from_state_dict` read transformers' ``CLIPModel``; the tokenizer is stored with the text
    encoder.

    Args:
        image_encoder: encodes an image as one vector.
        text_encoder: a decoder; its logits are not used.
        embed_dim: width of the shared space.

    Attributes:
        image_projection, text_projection: projections to the shared space, without a bias.
        log_scale: natural logarithm of the learned factor τ, which starts at 1 / 0.07.

    Raises:
        TypeError: a part has the wrong type, or ``embed_dim`` is not an int.

    Cost: a forward pass through both encoders, and one dot product for each pair.

    Example:
        >>> from saccade.models import DecoderConfig, VisionTransformerConfig
        >>> sizes = {"embed_dim": 16, "num_heads": 4, "num_layers": 1, "feed_forward_dim": 32}
        >>> image_encoder = VisionTransformer(VisionTransformerConfig(image_size=(16, 16), patch_size=8, **sizes))
        >>> text_encoder = Decoder(DecoderConfig(vocab_size=50, max_len=12, **sizes, end_tokens=(49,)))
        >>> model = DualEncoder(image_encoder, text_encoder, 8)
        >>> images, tokens = torch.zeros(3, 3, 16, 16), torch.tensor([[1, 2, 49], [3, 49, 0]])
        >>> model.similarity(images, tokens).shape
        torch.Size([3, 2])

    Reference: Radford et al. 2021, arXiv:2103.00020, section 2.
    """

    formats = {"clip": ClipText()}  # the text encoder's format; the image encoder's is ClipVision

    def __init__(self, image_encoder: VisionTransformer, text_encoder: Decoder, embed_dim: int):
        super().__init__()
        rule = "be a saccade.models."
        self.image_encoder = check_type("image_encoder", image_encoder, VisionTransformer, f"{rule}VisionTransformer")
        self.text_encoder = check_type("text_encoder", text_encoder, Decoder, f"{rule}Decoder")
        self.embed_dim = check_int("embed_dim", embed_dim)
        self.image_projection = _projection(image_encoder.config.embed_dim, self.embed_dim)
        self.text_projection = _projection(text_encoder.config.embed_dim, self.embed_dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    @classmethod
    def _build(
        cls,
        config: Mapping[str, Any],
        weights: Callable[[], Mapping[str, Tensor]],
        dtype: torch.dtype,
        tokenizer: Callable[[], Any],
    ) -> Self:
        text_format = cls._format_of(config)
        check_types(config)
        configs = {part: _part_config(config, part) for part in DEFAULTS}
        tensors = weights()
        check_tensors(tensors)
        parts: dict[str, dict[str, Tensor]] = {"vision_model": {}, "text_model": {}, "": {}}
        for name, weight in tensors.items():
            part = str(name).partition(".")[0]
            parts[part if part in parts else ""][name] = weight
        vision, text, rest = (lambda: parts["vision_model"]), (lambda: parts["text_model"]), parts[""]
        image_encoder = build(ClipVision(), VisionTransformer, configs["vision_config"], vision, dtype, lambda: None)
        text_encoder = build(text_format, Decoder, configs["text_config"], text, dtype, tokenizer)
        size = 512 if config.get("projection_dim") is None else config["projection_dim"]
        widths = image_encoder.config.embed_dim, text_encoder.config.embed_dim
        shapes = [torch.Size([size, widths[0]]), torch.Size([size, widths[1]]), torch.Size()]
        check_fit(rest, dict(zip(_NAMES.values(), shapes, strict=True)))  # before building anything of these sizes
        model = cls(image_encoder, text_encoder, size).to(dtype)
        with torch.no_grad():
            for ours, theirs in _NAMES.items():
                model.get_parameter(ours).copy_(rest[theirs])
        return model.eval()

    def forward(
        self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None
    ) -> Tensor:
        """Return the similarity of each image to each text; see `similarity`."""
        return self.similarity(images, tokens, mask=mask, positions=positions)

    def similarity(
        self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None
    ) -> Tensor:
        """Return the scaled cosine similarity of each image to each text.

        Args:
            images: ``[images, channels, H, W]``.
            tokens: int ``[texts, len]``; tokens after the end token do not matter.
            mask: a mask for these texts, as in `Decoder.forward`.
            positions: positions of the tokens, as in `Decoder.forward`.

        Returns:
            Logits ``[images, texts]``: the cosine of the two vectors, times τ. A softmax over texts classifies images,
            and a softmax over images classifies texts.

        Raises:
            TypeError, ValueError: as in the encoders; also if a text has no end token.
        """
        text_vectors = self.embed_texts(tokens, mask=mask, positions=positions)
        return self.log_scale.exp() * (self.embed_images(images) @ text_vectors.mT)

    def loss(self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None) -> Tensor:
        """Return the symmetric contrastive loss of images and texts, where image i matches text i.

        It is the mean of two cross-entropies: over texts for each image, and over images for each text. All other pairs
        in a batch are negative examples, so larger batches provide more of them.

        Args:
            images, tokens, mask, positions: as in `similarity`, with equal numbers of images and texts.

        Returns:
            A scalar.

        Raises:
            ValueError: the numbers of images and texts differ.
        """
        logits = self.similarity(images, tokens, mask=mask, positions=positions)
        if logits.shape[0] != logits.shape[1]:
            raise value_error("tokens", f"be {logits.shape[0]} texts, one for each image", logits.shape[1])
        targets = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.mT, targets)) / 2

    def embed_images(self, images: Tensor) -> Tensor:
        """Return a unit vector for each image in the space shared with texts, ``[images, embed_dim]``."""
        return F.normalize(self.image_projection(self.image_encoder.embed(images)), dim=-1)

    def embed_texts(self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None) -> Tensor:
        """Return a unit vector for each text in the space shared with images, ``[texts, embed_dim]``.

        The arguments are as in `similarity`.
        """
        ends = self._ends(tokens)
        hidden = self.text_encoder.hidden(tokens, mask=mask, positions=positions)
        last = hidden[torch.arange(len(hidden), device=hidden.device), ends]
        return F.normalize(self.text_projection(last), dim=-1)

    def _ends(self, tokens: Tensor) -> Tensor:
        """Return the index of each text's end token, where CLIP reads the text's vector, int64 ``[texts]``."""
        config = self.text_encoder.config
        check_tokens("tokens", tokens, config.vocab_size)
        if not tokens.shape[1]:
            raise value_error("tokens", "have at least one token for each text", list(tokens.shape))
        if not config.end_tokens:
            return tokens.argmax(1)
        is_end = torch.isin(tokens, torch.tensor(config.end_tokens, device=tokens.device))
        can_be_read = tokens.device.type == "cpu" and not is_tracing()
        if can_be_read and not bool(is_end.any(1).all()):
            rule = f"have an end token in each text, one of {config.end_tokens}"
            raise value_error("tokens", rule, "a text without one")
        return is_end.int().argmax(1)


def _projection(width: int, embed_dim: int) -> nn.Linear:
    linear = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(linear.weight, std=width**-0.5)
    return linear


def _part_config(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the part of a CLIP config that describes its image or text encoder.

    Older files contain a second copy of this part, under a name that ends in ``_dict``, which takes precedence.
    """
    merged = DEFAULTS[part]
    for name in (part, f"{part}_dict"):
        values = config.get(name)
        if values is not None:
            values = check_type(f"{name} of config.json", values, Mapping, "be an object")
            check_types(values, f"{name} of config.json")
            merged = DEFAULTS[part] | {key: value for key, value in values.items() if value is not None}
    return merged
