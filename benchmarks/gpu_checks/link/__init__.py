"""Check the host link: its rates, correct slices, and their cost during products."""
