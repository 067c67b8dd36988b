"""Attention in the spelling of code bases that cannot be installed, rewritten in short files."""
