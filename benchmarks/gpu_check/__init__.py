"""The GPU check: one command that checks and times attention on a GPU, and reports after every step."""
