"""Record the attention of existing models while they run on their own kernels."""

from saccade.recording.layer_record import Call, Run
from saccade.recording.record import Keep, UnrecordedLayersWarning, record
from saccade.recording.recording import Recording
from saccade.recording.word_links import Link

__all__ = ["Call", "Keep", "Link", "Recording", "Run", "UnrecordedLayersWarning", "record"]
