"""Block-sparse attention: selection of blocks of keys, and kernels that read only those."""

__all__: list[str] = []
