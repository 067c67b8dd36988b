"""The entries of the table: each function of the field, with the package that it comes from."""

from __future__ import annotations

import dataclasses

from benchmarks.field.compiled_flex import COMPILED, FEW
from benchmarks.field.fla_naive import FLA_NAIVE
from benchmarks.field.ggml import GGML
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
        longest: the largest number of keys to try at the sizes of models; None for no limit.
    """

    package: str
    peer: Peer
    devices: tuple[str, ...] = ("cpu",)
    only: tuple[str, ...] | None = None
    longest: int | None = None

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
)
_RUNTIMES: tuple[Library, ...] = (ONNX_RUNTIME, OPENVINO, GGML)
_STEPS = 130  # a recurrence in Python keeps a state for every token until its backward pass

ENTRIES = (
    *(Entry("torch", peer) for peer in CPU),
    *(Entry("torch", peer, ("cuda",)) for peer in CUDA),
    *(Entry("torch", peer, ("cpu", "cuda")) for peer in FLEX.peers),
    Entry("torch", COMPILED, ("cpu", "cuda"), only=FEW),
    *(Entry(library.package, peer) for library in _LIBRARIES for peer in library.peers),
    *(Entry(FLA_NAIVE.package, peer, longest=_STEPS) for peer in FLA_NAIVE.peers),
    *(Entry(library.package, peer) for library in _RUNTIMES for peer in library.peers),
)
"""The entries in the order of the table."""
