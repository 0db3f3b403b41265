"""Folders written as one GGUF file, for llama.cpp."""
