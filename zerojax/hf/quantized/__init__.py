"""Decode the quantized weights of Hugging Face folders as they are read."""
