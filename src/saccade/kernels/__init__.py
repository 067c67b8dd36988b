"""How a product is executed. Kernels know the ScoreMatrix and its plan, never masks or scores by class."""

from saccade.kernels.choice import KERNELS, Choice, Kernel, choose

__all__ = ["KERNELS", "Choice", "Kernel", "choose"]
