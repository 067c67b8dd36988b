"""Tiles that hold every allowed pair: sets of keys, tiles, layouts and their costs. Knows bounds, not masks."""

from saccade.plan.plan import Plan, make
from saccade.plan.tiles import ALL, Box, ColumnRange, Groups, Ranges, Rule, Tile, Triangle

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "ColumnRange", "Tile", "Triangle", "make"]
