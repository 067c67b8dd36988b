"""Plans: the tiles that hold every allowed pair, and their cost. Knows bounds of masks, not masks."""

from saccade.plan.plan import Plan, make
from saccade.plan.tiles import ALL, Box, ColumnRange, Groups, Ranges, Rule, Tile, Triangle

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "ColumnRange", "Tile", "Triangle", "make"]
