"""Plans: tiles that cover every allowed pair, and their cost. This package uses bounds of masks, not mask classes."""

from saccade.plan.plan import Plan, make
from saccade.plan.tiles import ALL, Box, ColumnRange, Groups, Ranges, Rule, Tile, Triangle

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "ColumnRange", "Tile", "Triangle", "make"]
