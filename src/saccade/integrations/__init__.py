"""Our kernels in other people's models, and taps that hand out their matrices: transformers, torch.nn, any SDPA."""

__all__: list[str] = []
