"""Record the attention of other people's models while they run on their own kernels."""

from saccade.recording.layer_record import Call, Run
from saccade.recording.record import Keep, UnrecordedLayersWarning, record
from saccade.recording.recording import Recording

__all__ = ["Call", "Keep", "Recording", "Run", "UnrecordedLayersWarning", "record"]
