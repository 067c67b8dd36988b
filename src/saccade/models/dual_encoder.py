"""A dual encoder: pictures and texts as vectors of one space, where those that belong together point the same way."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.checkpoint_folder import check_types, read_config, read_tokenizer, read_weights
from saccade.models.clip import DEFAULTS, ClipText, ClipVision
from saccade.models.decoder import Decoder
from saccade.models.loading import built, check_fit, check_tensors, words_of
from saccade.models.token_inputs import check_tokens
from saccade.models.vision_transformer import VisionTransformer
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_int, check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["DualEncoder"]

_WHERE = "DualEncoder"
_NAMES = {
    "image_projection.weight": "visual_projection.weight",
    "text_projection.weight": "text_projection.weight",
    "log_scale": "logit_scale",
}


class DualEncoder(AnswersCalls, nn.Module):
    r"""Two encoders, and a projection of each to one space, as CLIP has them.

    .. math:: s_{ij} = \tau\, \frac{u_i \cdot v_j}{\lVert u_i \rVert \lVert v_j \rVert}

    for picture i and text j. A text is read by a decoder, left to right, and its vector is that of the token where it
    ends: the first of ``text_encoder.config.end_tokens``, or where the config has none, the first of the text's highest
    token, as in CLIP's own files.

    Args:
        image_encoder: makes one vector of a picture.
        text_encoder: a decoder; what it says comes next is not used.
        embed_dim: width of the common space.

    Attributes:
        image_projection, text_projection: to the common space, without a bias.
        log_scale: natural log of τ, which is learned; it starts at 1 / 0.07.

    Raises:
        TypeError: a part of another kind, a size that is no int.

    Cost: both encoders, and one dot product for each pair.

    Example:
        >>> from saccade.models import DecoderConfig, VisionTransformerConfig
        >>> sizes = {"embed_dim": 16, "num_heads": 4, "num_layers": 1, "feed_forward_dim": 32}
        >>> pictures = VisionTransformer(VisionTransformerConfig(image_size=(16, 16), patch_size=8, **sizes))
        >>> texts = Decoder(DecoderConfig(vocab_size=50, max_len=12, **sizes, end_tokens=(49,)))
        >>> model = DualEncoder(pictures, texts, 8)
        >>> images, tokens = torch.zeros(3, 3, 16, 16), torch.tensor([[1, 2, 49], [3, 49, 0]])
        >>> model.similarity(images, tokens).shape
        torch.Size([3, 2])

    Reference: Radford et al. 2021, arXiv:2103.00020, section 2.
    """

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
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a published CLIP from a folder on disk, in float32 and eval mode.

        Reads ``config.json``, ``model.safetensors`` and, where there is one, ``tokenizer.json``; pickled weights never.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: not a CLIP as we compute it; every reason is listed.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors or tokenizers is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        check_types(told)
        return cls._of(told, read_weights(folder), torch.float32, read_tokenizer(folder))

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The model of weights that are in memory, in eval mode; they are copied.

        Args:
            config: what the model's ``config.json`` says, as a dict, or a config of transformers.
            state_dict: the tensors under their published names, of transformers' ``CLIPModel`` for instance, in any
                dtype of floats.
            tokenizer: kept with the text encoder.
            dtype: of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: no config, no tensors, or a dtype that is no float's.
        """
        return cls._of(words_of(config), state_dict, dtype, tokenizer)

    @classmethod
    def _of(
        cls,
        told: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        tokenizer: Tokenizer | None,
    ) -> Self:
        if told.get("model_type") != "clip":
            raise unsupported(_WHERE, [f"model_type is {told.get('model_type')!r}, not 'clip'"])
        words = {part: _words(told, part) for part in DEFAULTS}
        check_tensors(weights)
        own: dict[str, dict[str, Tensor]] = {"vision_model": {}, "text_model": {}, "": {}}
        for name, weight in weights.items():
            part = str(name).partition(".")[0]
            own[part if part in own else ""][name] = weight
        vision = words["vision_config"], own["vision_model"], ClipVision(own["vision_model"])
        image_encoder = built(*vision, VisionTransformer, dtype, None)
        text_encoder = built(words["text_config"], own["text_model"], ClipText(), Decoder, dtype, tokenizer)
        size = 512 if told.get("projection_dim") is None else told["projection_dim"]
        widths = image_encoder.config.embed_dim, text_encoder.config.embed_dim
        shapes = [torch.Size([size, widths[0]]), torch.Size([size, widths[1]]), torch.Size()]
        # Before anything of such a size is made.
        check_fit(own[""], dict(zip(_NAMES.values(), shapes, strict=True)))
        model = cls(image_encoder, text_encoder, size).to(dtype)
        with torch.no_grad():
            for ours, theirs in _NAMES.items():
                model.get_parameter(ours).copy_(own[""][theirs])
        return model.eval()

    def forward(
        self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None
    ) -> Tensor:
        """See `similarity`."""
        return self.similarity(images, tokens, mask=mask, positions=positions)

    def similarity(
        self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None
    ) -> Tensor:
        """How well each picture and each text go together.

        Args:
            images: ``[images, channels, H, W]``.
            tokens: int ``[texts, len]``; what stands after the end of a text changes nothing.
            mask: the facts of these texts, as in `Decoder.forward`.
            positions: where the tokens stand, as in `Decoder.forward`.

        Returns:
            Logits ``[images, texts]``: the cosine of the two vectors, times τ. Softmax over the texts says which of
            them a picture belongs to, over the pictures the other way round.

        Raises:
            TypeError, ValueError: as the encoders do; a text without an end token.
        """
        pictures, texts = self.embed_images(images), self.embed_texts(tokens, mask=mask, positions=positions)
        return self.log_scale.exp() * (pictures @ texts.mT)

    def loss(self, images: Tensor, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None) -> Tensor:
        """How badly pictures and texts find each other, where picture i belongs to text i.

        The mean of two cross entropies: of the texts, given a picture, and of the pictures, given a text. Each picture
        of a batch is an example of what the other texts are not about, so that large batches teach more.

        Args:
            images, tokens, mask, positions: as in `similarity`; as many pictures as texts.

        Returns:
            A number.

        Raises:
            ValueError: another number of texts than of pictures.
        """
        logits = self.similarity(images, tokens, mask=mask, positions=positions)
        if logits.shape[0] != logits.shape[1]:
            raise value_error("tokens", f"be {logits.shape[0]} texts, as images", logits.shape[1])
        own = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own)) / 2

    def embed_images(self, images: Tensor) -> Tensor:
        """One vector of length 1 for each picture: ``[images, embed_dim]``."""
        return F.normalize(self.image_projection(self.image_encoder.embed(images)), dim=-1)

    def embed_texts(self, tokens: Tensor, *, mask: object = None, positions: GivenPositions = None) -> Tensor:
        """One vector of length 1 for each text: ``[texts, embed_dim]``; arguments as in `similarity`."""
        ends = self._ends(tokens)
        hidden = self.text_encoder.hidden(tokens, mask=mask, positions=positions)
        last = hidden[torch.arange(len(hidden), device=hidden.device), ends]
        return F.normalize(self.text_projection(last), dim=-1)

    def _ends(self, tokens: Tensor) -> Tensor:
        """Where each text ends: int64 ``[texts]``."""
        config = self.text_encoder.config
        check_tokens("tokens", tokens, config.vocab_size)
        if not tokens.shape[1]:
            raise value_error("tokens", "have at least one token for each text", list(tokens.shape))
        if not config.end_tokens:
            return tokens.argmax(1)
        is_end = torch.isin(tokens, torch.tensor(config.end_tokens, device=tokens.device))
        can_be_read = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_be_read and not bool(is_end.any(1).all()):
            rule = f"have an end token in each text, one of {config.end_tokens}"
            raise value_error("tokens", rule, "a text without one")
        return is_end.int().argmax(1)


def _projection(width: int, embed_dim: int) -> nn.Linear:
    linear = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(linear.weight, std=width**-0.5)
    return linear


def _words(told: Mapping[str, Any], part: str) -> dict[str, Any]:
    """What a config.json says of one of the encoders; an older form says it twice, and the second counts."""
    words = DEFAULTS[part]
    for name in (part, f"{part}_dict"):
        given = told.get(name)
        if given is not None:
            given = check_type(f"{name} of config.json", given, Mapping, "be an object")
            check_types(given, f"{name} of config.json")
            words = DEFAULTS[part] | {key: value for key, value in given.items() if value is not None}
    return words
