"""The attention of other libraries, checked against the laws of `saccade.testing`."""
