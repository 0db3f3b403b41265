"""What a decoder is trained for: its loss, and its outputs."""
