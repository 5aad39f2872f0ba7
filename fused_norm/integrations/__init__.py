"""This library within training stacks. Each module needs its stack's package and is imported only
when asked for: ``import fused_norm.integrations.transformers``."""
