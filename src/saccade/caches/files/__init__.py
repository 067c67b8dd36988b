"""Caches in files: what is written, and what is believed of what is read."""

from saccade.caches.files.tensor_files import VERSION, decoded, encoded, read_tensors, write_whole

__all__ = ["VERSION", "decoded", "encoded", "read_tensors", "write_whole"]
