"""Adapters of Hugging Face decoders, with PEFT's options, initial values and files."""
