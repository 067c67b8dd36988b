"""Errors, argument checks and other helpers for all layers of the library."""

from pathlib import Path

from saccade.support.distribution_conflict import check_only_distribution

__all__: list[str] = []

check_only_distribution(Path(__file__).parents[1])
