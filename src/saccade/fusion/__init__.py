"""Fuse or observe attention that third-party code writes as matmul, softmax and matmul."""

from saccade.fusion.mode import FuseAttention
from saccade.fusion.observe import ObserveAttention
from saccade.fusion.recovered_call import AttentionCall

__all__ = ["AttentionCall", "FuseAttention", "ObserveAttention"]
