"""WHERE tokens stand: terms of the scores, rotations of queries and keys, vectors added to tokens."""

from saccade.positions.alibi import ALiBi
from saccade.positions.bias import Bias
from saccade.positions.clipped import Clipped
from saccade.positions.grid_table import GridTable
from saccade.positions.learned import Learned
from saccade.positions.path_lengths import path_lengths
from saccade.positions.relation_table import RelationTable
from saccade.positions.rotary import Rotary
from saccade.positions.rotary_given import Frequencies, RotaryTables
from saccade.positions.rotary_scaling import NTK, Linear, Llama3, Scaling, YaRN
from saccade.positions.shaw_keys import ShawKeys
from saccade.positions.sinusoidal import Sinusoidal
from saccade.positions.t5 import T5

__all__ = [
    "Bias",
    "ALiBi",
    "Clipped",
    "T5",
    "ShawKeys",
    "GridTable",
    "RelationTable",
    "path_lengths",
    "Rotary",
    "RotaryTables",
    "Scaling",
    "Linear",
    "NTK",
    "Llama3",
    "YaRN",
    "Frequencies",
    "Sinusoidal",
    "Learned",
]
