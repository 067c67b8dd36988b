"""The entries of the table: each function of the field, with the package that it comes from."""

from __future__ import annotations

import dataclasses

from benchmarks.field.compiled_flex import COMPILED, FEW
from benchmarks.field.runtimes import ONNX_RUNTIME, OPENVINO
from benchmarks.field.sdpa_backends import CPU, CUDA
from benchmarks.field.transformers_attention import TRANSFORMERS
from benchmarks.peers.fla import FLA
from benchmarks.peers.flex import FLEX
from benchmarks.peers.local_attention import LOCAL_ATTENTION
from benchmarks.peers.peer import Library, Peer
from benchmarks.peers.performer import PERFORMER
from benchmarks.peers.x_transformers import X_TRANSFORMERS

__all__ = ["ENTRIES", "Entry"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One function of the field.

    Attributes:
        package: the package on PyPI.
        peer: the function.
        devices: where it runs.
        only: names of laws and of cases at the sizes of models to try; None for all.
    """

    package: str
    peer: Peer
    devices: tuple[str, ...] = ("cpu",)
    only: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """The package and the call, which name the entry in the results."""
        return f"{self.package}: {self.peer.call}"


_LIBRARIES: tuple[Library, ...] = (
    TRANSFORMERS,
    X_TRANSFORMERS,
    LOCAL_ATTENTION,
    PERFORMER,
    dataclasses.replace(FLA, peers=FLA.peers[:3]),  # its gated forms are in the tables of benchmarks.peers
    ONNX_RUNTIME,
    OPENVINO,
)

ENTRIES = (
    *(Entry("torch", peer) for peer in CPU),
    *(Entry("torch", peer, ("cuda",)) for peer in CUDA),
    *(Entry("torch", peer, ("cpu", "cuda")) for peer in FLEX.peers),
    Entry("torch", COMPILED, ("cpu", "cuda"), only=FEW),
    *(Entry(library.package, peer) for library in _LIBRARIES for peer in library.peers),
)
"""The entries in the order of the table."""
