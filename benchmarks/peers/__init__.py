"""The attention of other libraries, held to the laws of `saccade.testing`."""
