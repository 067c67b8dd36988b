"""Run saccade's kernels in third-party models and capture their attention: transformers, torch.nn, any SDPA call."""

from saccade.integrations import transformers

__all__ = ["transformers"]
