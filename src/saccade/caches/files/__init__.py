"""Functions that write cache files, read them and check their contents."""

from saccade.caches.files.tensor_files import VERSION, decoded, encoded, read_tensors, write_whole

__all__ = ["VERSION", "decoded", "encoded", "read_tensors", "write_whole"]
