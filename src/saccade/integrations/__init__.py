"""Our kernels in other people's models, and taps that hand out their matrices: transformers, torch.nn, any SDPA."""

from saccade.integrations import transformers

__all__ = ["transformers"]
