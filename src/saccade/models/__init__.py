"""Whole models, and the trained weights that they can read."""

from saccade.models.config import EncoderConfig
from saccade.models.decoder import Decoder
from saccade.models.decoder_config import DecoderConfig
from saccade.models.encoder import Encoder
from saccade.models.minilm import minilm

__all__ = ["Encoder", "EncoderConfig", "minilm", "Decoder", "DecoderConfig"]
