"""Attention over selected blocks of keys."""
