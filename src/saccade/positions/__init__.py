"""Token positions and their encodings: score biases, rotations of queries and keys, and embeddings."""

from typing import TYPE_CHECKING

from saccade.support.lazy_imports import lazily

if TYPE_CHECKING:
    from saccade.positions.alibi import ALiBi
    from saccade.positions.bias import Bias
    from saccade.positions.clipped_bias import Clipped
    from saccade.positions.graph_distance import path_lengths
    from saccade.positions.grid_bias import GridTable
    from saccade.positions.learned import Learned
    from saccade.positions.query_temperature import QueryTemperature
    from saccade.positions.relation_bias import RelationTable
    from saccade.positions.rotary import Rotary
    from saccade.positions.rotary_from_checkpoint import Frequencies, RotaryTables
    from saccade.positions.rotary_scaling import NTK, Linear, Llama3, Scaling, YaRN
    from saccade.positions.shaw_keys import ShawKeys
    from saccade.positions.sinusoidal import Sinusoidal
    from saccade.positions.t5 import T5
else:
    _HOMES = {
        "alibi": "ALiBi",
        "bias": "Bias",
        "clipped_bias": "Clipped",
        "grid_bias": "GridTable",
        "learned": "Learned",
        "graph_distance": "path_lengths",
        "query_temperature": "QueryTemperature",
        "relation_bias": "RelationTable",
        "rotary": "Rotary",
        "rotary_from_checkpoint": "Frequencies RotaryTables",
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
    "QueryTemperature",
    "Sinusoidal",
    "Learned",
]
