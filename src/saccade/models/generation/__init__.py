"""Text, token by token, from any model that says what may come next."""

from saccade.models.generation.beams import Hypothesis, beam_search
from saccade.models.generation.generate import Step, generate, stream
from saccade.models.generation.sampler import Sampler

__all__ = ["generate", "stream", "Step", "Sampler", "beam_search", "Hypothesis"]
