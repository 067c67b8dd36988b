"""Attention in convolutional networks: gates for channels and positions, and attention between positions."""

from saccade.vision.bam import BAM
from saccade.vision.cbam import CBAM, Gates
from saccade.vision.channel import ChannelAttention
from saccade.vision.convert import from_timm, to_timm
from saccade.vision.non_local import NonLocal
from saccade.vision.position import PositionAttention
from saccade.vision.spatial import SpatialAttention

__all__ = [
    "ChannelAttention",
    "SpatialAttention",
    "PositionAttention",
    "CBAM",
    "BAM",
    "Gates",
    "NonLocal",
    "from_timm",
    "to_timm",
]
