"""Parts of scripts/gpu-check. What runs on the machine with the GPU needs Python 3.11 and numpy, no more."""
