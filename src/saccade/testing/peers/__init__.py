"""Torch's own attention, held to the laws: ``python -m saccade.testing.peers`` prints the table of its documents."""

from saccade.testing.peers.table import Finding, find, inserted, made_part, written
from saccade.testing.peers.torch_attention import PEERS, Peer

__all__ = ["PEERS", "Finding", "Peer", "find", "inserted", "made_part", "written"]
