"""What attention, layers and models cost before they are run: operations, memory, time."""

from saccade.costs.cost import Cost, cost
from saccade.costs.machine import FACTOR, Machine, this_machine
from saccade.costs.passes import Pass, Share
from saccade.costs.scaling_plot import growth
from saccade.costs.time_estimate import Seconds

__all__ = ["cost", "Cost", "growth", "Pass", "Share", "Seconds", "Machine", "this_machine", "FACTOR"]
