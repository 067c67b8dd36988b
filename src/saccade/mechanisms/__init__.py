"""Mechanisms: modules that compute an attention matrix from queries and keys."""

from typing import TYPE_CHECKING

from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.compressive import CompressiveMemory
from saccade.mechanisms.delta_product import DeltaProduct
from saccade.mechanisms.differential import Differential
from saccade.mechanisms.forgetting import Forgetting
from saccade.mechanisms.gated_delta2 import GatedDelta2
from saccade.mechanisms.gated_linear import SSD, Delta, GatedLinear
from saccade.mechanisms.linear import Linear
from saccade.mechanisms.linformer import Linformer
from saccade.mechanisms.mamba3 import Mamba3
from saccade.mechanisms.mesa import Mesa
from saccade.mechanisms.native_sparse import NativeSparse
from saccade.mechanisms.nystrom import Nystrom
from saccade.mechanisms.path import PaTH
from saccade.mechanisms.performer import Performer
from saccade.mechanisms.rwkv7 import RWKV7
from saccade.mechanisms.s4d import S4D
from saccade.mechanisms.short_convolution import ShortConvolution
from saccade.mechanisms.softmax import Softmax
from saccade.mechanisms.topk import TopK
from saccade.support.name_hints import other_names

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "Mechanism",
    "Softmax",
    "TopK",
    "NativeSparse",
    "Differential",
    "Forgetting",
    "PaTH",
    "Linear",
    "Performer",
    "Linformer",
    "Nystrom",
    "GatedLinear",
    "Delta",
    "GatedDelta2",
    "DeltaProduct",
    "RWKV7",
    "SSD",
    "Mamba3",
    "Mesa",
    "S4D",
    "ShortConvolution",
    "CompressiveMemory",
]
