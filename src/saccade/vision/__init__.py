"""Attention for images: channel and position gates, attention between positions, and a classical denoiser."""

from typing import TYPE_CHECKING

from saccade.support.name_hints import other_names
from saccade.vision.cbam_and_bam import BAM, CBAM, Gates
from saccade.vision.convert import from_timm, to_timm
from saccade.vision.gates import ECA, ChannelAttention, SpatialAttention
from saccade.vision.non_local import NonLocal
from saccade.vision.non_local_means import non_local_means
from saccade.vision.position_attention import PositionAttention

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "ChannelAttention",
    "ECA",
    "SpatialAttention",
    "PositionAttention",
    "CBAM",
    "BAM",
    "Gates",
    "NonLocal",
    "non_local_means",
    "from_timm",
    "to_timm",
]
