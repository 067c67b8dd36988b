"""Computation of attention from checked inputs: kernels, bias terms and NaN containment. Internal to the library."""

__all__: list[str] = []
