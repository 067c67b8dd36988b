"""Computation of attention from checked inputs: kernels, bias terms, NaN containment. Users never import it."""

__all__: list[str] = []
