"""Other libraries' attention, held to the laws: ``python -m saccade.testing.peers`` prints the tables of a document."""

from saccade.testing.peers.libraries import LIBRARIES, PEERS
from saccade.testing.peers.peer import Library, Peer
from saccade.testing.peers.table import Finding, command, find, written

__all__ = ["LIBRARIES", "PEERS", "Finding", "Library", "Peer", "command", "find", "written"]
