"""Positions of queries and keys as kernels read them."""
