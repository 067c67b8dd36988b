"""From checked ingredients to numbers: the score matrix, the product, the kernels. Users never import it."""

__all__: list[str] = []
