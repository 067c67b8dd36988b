"""Text generation, token by token, with any model that predicts the next token."""

from saccade.models.generation.beams import Hypothesis, beam_search
from saccade.models.generation.generate import Step, generate, stream
from saccade.models.generation.sampler import Sampler

__all__ = ["generate", "stream", "Step", "Sampler", "beam_search", "Hypothesis"]
