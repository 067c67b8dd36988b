"""Scores of one tile, and how tiles are split."""
