"""Files of caches: writing, reading, and the checks of files that are read."""

from saccade.caches.files.tensor_files import VERSION, decoded, encoded, read_tensors, write_whole

__all__ = ["VERSION", "decoded", "encoded", "read_tensors", "write_whole"]
