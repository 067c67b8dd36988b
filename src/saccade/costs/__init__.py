"""What attention, layers and models cost before they are run: operations, memory, time."""

from saccade.costs.cost import Cost, cost
from saccade.costs.growth import growth
from saccade.costs.machine import FACTOR, Machine, this_machine
from saccade.costs.passes import Pass, Share
from saccade.costs.seconds import Seconds

__all__ = ["cost", "Cost", "growth", "Pass", "Share", "Seconds", "Machine", "this_machine", "FACTOR"]
