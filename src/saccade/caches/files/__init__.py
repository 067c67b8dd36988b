"""Cache files: writing them, reading them, and checking their contents."""

from saccade.caches.files.tensor_files import VERSION, decoded, encoded, read_tensors, write_whole

__all__ = ["VERSION", "decoded", "encoded", "read_tensors", "write_whole"]
