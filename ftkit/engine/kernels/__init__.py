"""The loops of the optimizer: compiled for the host, and as a device's kernels take them."""
