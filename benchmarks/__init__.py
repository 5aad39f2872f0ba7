"""Speed of fused_norm against other implementations: ``python -m benchmarks norm``, ``softmax``."""
