"""Torch's own attention, held to the laws: ``python -m saccade.testing.peers`` prints the table of its documents."""

from saccade.testing.peers.table import COMMAND, Finding, find, written
from saccade.testing.peers.torch_attention import PEERS, Peer

__all__ = ["COMMAND", "PEERS", "Finding", "Peer", "find", "written"]
