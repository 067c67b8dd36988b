"""The libraries whose attention is tried, in the order of the document."""

from saccade.testing.peers.bigbird import BIGBIRD
from saccade.testing.peers.fla import FLA
from saccade.testing.peers.flex import FLEX
from saccade.testing.peers.local_attention import LOCAL_ATTENTION
from saccade.testing.peers.longformer import LONGFORMER
from saccade.testing.peers.performer import PERFORMER
from saccade.testing.peers.torch_attention import TORCH
from saccade.testing.peers.x_transformers import X_TRANSFORMERS

__all__ = ["LIBRARIES", "PEERS"]

LIBRARIES = (TORCH, FLEX, X_TRANSFORMERS, LOCAL_ATTENTION, LONGFORMER, BIGBIRD, PERFORMER, FLA)
PEERS = tuple(peer for library in LIBRARIES for peer in library.peers)
