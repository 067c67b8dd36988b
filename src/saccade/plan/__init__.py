"""Plans: tiles that cover every pair that a mask allows, and their cost. They use bounds of masks, not mask classes."""

from saccade.plan.plan import Plan, make
from saccade.plan.row_groups import Groups
from saccade.plan.tiles import ALL, Box, ColumnRange, Ranges, Rule, Tile, Triangle

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "ColumnRange", "Tile", "Triangle", "make"]
