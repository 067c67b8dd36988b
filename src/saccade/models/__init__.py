"""Whole models, and the trained weights that they can read."""

from saccade.models.bundled import manuals, manuals_card
from saccade.models.decoder import Decoder
from saccade.models.decoder_config import DecoderConfig
from saccade.models.encoder import Encoder
from saccade.models.encoder_config import EncoderConfig
from saccade.models.encoder_decoder import EncoderDecoder, Given
from saccade.models.encoder_decoder_config import EncoderDecoderConfig
from saccade.models.generation import Hypothesis, Sampler, Step, beam_search, generate, stream
from saccade.models.minilm import minilm

__all__ = [
    "Encoder",
    "EncoderConfig",
    "minilm",
    "manuals",
    "manuals_card",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Given",
    "generate",
    "stream",
    "Step",
    "Sampler",
    "beam_search",
    "Hypothesis",
]
