"""Whole models, and the trained weights that they can read."""

from saccade.models.bundled import manuals, manuals_card, minilm
from saccade.models.config import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from saccade.models.decoder import Decoder
from saccade.models.encoder import Encoder
from saccade.models.encoder_decoder import EncoderDecoder, Given
from saccade.models.generation import Hypothesis, Sampler, Step, beam_search, generate, stream
from saccade.models.signal_encoder import SignalEncoder

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
    "SignalEncoder",
    "generate",
    "stream",
    "Step",
    "Sampler",
    "beam_search",
    "Hypothesis",
]
