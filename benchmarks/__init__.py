"""Speed and memory against torch in the same run: `python -m benchmarks [question ...]`, or `make bench`."""
