"""Which tiles hold every allowed pair: sets of keys, tiles, layouts and their prices. Knows bounds, not masks."""

from saccade.plan.plan import Plan, make
from saccade.plan.tiles import ALL, Box, Groups, Ranges, Rule, Strip, Tile, Triangle

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "Strip", "Tile", "Triangle", "make"]
