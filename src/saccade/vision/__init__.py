"""Attention for images: gates for channels and positions, attention between positions, and a classical denoiser."""

from saccade.vision.cbam_and_bam import BAM, CBAM, Gates
from saccade.vision.convert import from_timm, to_timm
from saccade.vision.gates import ECA, ChannelAttention, SpatialAttention
from saccade.vision.non_local import NonLocal
from saccade.vision.non_local_means import non_local_means
from saccade.vision.position_attention import PositionAttention

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
