"""WHERE tokens stand: terms of the scores, rotations of queries and keys, vectors added to tokens."""

from typing import TYPE_CHECKING

from saccade.lazily import lazily

if TYPE_CHECKING:
    from saccade.positions.alibi import ALiBi
    from saccade.positions.bias import Bias
    from saccade.positions.clipped import Clipped
    from saccade.positions.grid_table import GridTable
    from saccade.positions.learned import Learned
    from saccade.positions.paths import path_lengths
    from saccade.positions.relation_table import RelationTable
    from saccade.positions.rotary import Rotary
    from saccade.positions.rotary_given import Frequencies, RotaryTables
    from saccade.positions.rotary_scaling import NTK, Linear, Llama3, Scaling, YaRN
    from saccade.positions.shaw_keys import ShawKeys
    from saccade.positions.sinusoidal import Sinusoidal
    from saccade.positions.t5 import T5
else:
    _HOMES = {
        "alibi": "ALiBi",
        "bias": "Bias",
        "clipped": "Clipped",
        "grid_table": "GridTable",
        "learned": "Learned",
        "paths": "path_lengths",
        "relation_table": "RelationTable",
        "rotary": "Rotary",
        "rotary_given": "Frequencies RotaryTables",
        "rotary_scaling": "NTK Linear Llama3 Scaling YaRN",
        "shaw_keys": "ShawKeys",
        "sinusoidal": "Sinusoidal",
        "t5": "T5",
    }
    __getattr__, __dir__ = lazily(__name__, _HOMES)

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
