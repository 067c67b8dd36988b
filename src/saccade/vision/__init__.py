"""Attention for images: gates for channels and positions, attention between positions, and a classical denoiser."""

from saccade.vision.bam import BAM
from saccade.vision.cbam import CBAM, Gates
from saccade.vision.channel import ChannelAttention
from saccade.vision.convert import from_timm, to_timm
from saccade.vision.eca import ECA
from saccade.vision.non_local import NonLocal
from saccade.vision.non_local_means import non_local_means
from saccade.vision.position import PositionAttention
from saccade.vision.spatial import SpatialAttention

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
