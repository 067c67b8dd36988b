"""Forecasts of operations, memory and time of attention, layers and models."""

from saccade.costs.cost import Cost, Pass, Share, cost
from saccade.costs.machine import FACTOR, Machine, Seconds, this_machine
from saccade.costs.scaling_plot import growth

__all__ = ["cost", "Cost", "growth", "Pass", "Share", "Seconds", "Machine", "this_machine", "FACTOR"]
