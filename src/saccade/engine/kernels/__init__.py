"""How a product is run. Kernels know the score matrix and its plan, never masks or scores by class."""

from saccade.engine.kernels.choice import KERNELS, Choice, Kernel, choose

__all__ = ["KERNELS", "Choice", "Kernel", "choose"]
