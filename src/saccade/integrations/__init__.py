"""Saccade's kernels in other people's models, and the capture of their attention: transformers, torch.nn, any SDPA."""

from saccade.integrations import transformers

__all__ = ["transformers"]
