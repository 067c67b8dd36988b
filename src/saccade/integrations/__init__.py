"""Run saccade's kernels in third-party models (transformers, torch.nn, any SDPA call) and capture their attention."""

from saccade.integrations import transformers

__all__ = ["transformers"]
