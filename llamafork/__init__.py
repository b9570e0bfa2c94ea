"""llamafork: build, run and prove a patched llama.cpp for MoE models far bigger than VRAM."""

__version__ = "0.1.0"
