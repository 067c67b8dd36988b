"""Errors, checks of arguments and other helpers that every layer uses."""

from pathlib import Path

from saccade.support.only_distribution import check_only_distribution

__all__: list[str] = []

check_only_distribution(Path(__file__).parents[1])
