"""Computation of attention from checked inputs: kernels, bias terms and NaN containment. This package is internal."""

__all__: list[str] = []
