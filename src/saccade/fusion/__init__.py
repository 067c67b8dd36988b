"""Fuse or observe attention that third-party code writes as matmul, softmax and matmul."""

from saccade.fusion.attention_call import AttentionCall
from saccade.fusion.mode import FuseAttention
from saccade.fusion.observe import ObserveAttention

__all__ = ["AttentionCall", "FuseAttention", "ObserveAttention"]
