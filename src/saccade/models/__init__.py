"""Complete models (encoders, decoders, vision models), with loaders for published weights."""

from typing import TYPE_CHECKING

from saccade.models.bundled import (
    chinese_encoder,
    chinese_encoder_card,
    minilm,
    model_folder,
    small_decoder,
    small_decoder_card,
)
from saccade.models.config import EncoderConfig, EncoderDecoderConfig, SetDecoderConfig, VisionTransformerConfig
from saccade.models.decoder import Decoder
from saccade.models.decoder_config import DecoderConfig, LayerPattern
from saccade.models.detr_model import SetDecoder
from saccade.models.dual_encoder import DualEncoder
from saccade.models.encoder import Encoder
from saccade.models.encoder_decoder import ConditionedDecoder, EncoderDecoder
from saccade.models.generation import Hypothesis, Sampler, Step, beam_search, generate, stream
from saccade.models.hungarian_loss import DetectionLoss, Detections, Targets, match_sets, set_loss
from saccade.models.signal_encoder import SignalEncoder
from saccade.models.trained_length import UntrainedLengthWarning
from saccade.models.vision_transformer import VisionTransformer
from saccade.support.name_hints import other_names

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "Encoder",
    "EncoderConfig",
    "minilm",
    "chinese_encoder",
    "chinese_encoder_card",
    "small_decoder",
    "small_decoder_card",
    "model_folder",
    "Decoder",
    "DecoderConfig",
    "LayerPattern",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "ConditionedDecoder",
    "SignalEncoder",
    "VisionTransformer",
    "VisionTransformerConfig",
    "DualEncoder",
    "SetDecoder",
    "SetDecoderConfig",
    "Detections",
    "Targets",
    "match_sets",
    "set_loss",
    "DetectionLoss",
    "UntrainedLengthWarning",
    "generate",
    "stream",
    "Step",
    "Sampler",
    "beam_search",
    "Hypothesis",
]
