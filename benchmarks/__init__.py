"""Speed of fused_norm against other implementations, and memory: ``python -m benchmarks norm``."""
