"""Parts of scripts/train-test-model: the text, the network, the file. Needs PyTorch (`pip install torch==2.13.0`)."""
