"""What the library answers to who asks what runs with what, and the tables of capabilities.md that tell it."""
