"""Block-sparse attention: the selection of key blocks, and kernels that read only the selected blocks."""

__all__: list[str] = []
