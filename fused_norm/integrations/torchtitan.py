"""torchtitan: its norms and its SDPA attention by this library, through its overrides.

    --override.imports fused_norm.integrations.torchtitan.rms_norm
    --override.imports 'fused_norm.integrations.torchtitan.rms_norm={"memory_efficient": true}'

``layer_norm`` and ``sdpa`` are the others. ``--override.imports`` takes several.
"""

from dataclasses import dataclass

from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common import attention, nn_modules

from fused_norm import functional, modules

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "FusedSDPA", "layer_norm", "rms_norm", "sdpa"]


class FusedRMSNorm(nn_modules.RMSNorm, modules.RMSNorm):
    """torchtitan's RMSNorm on this library's kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        memory_efficient: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.memory_efficient = config.memory_efficient


class FusedLayerNorm(nn_modules.LayerNorm, modules.LayerNorm):
    """torchtitan's LayerNorm on this library's kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.LayerNorm.Config):
        memory_efficient: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.memory_efficient = config.memory_efficient


class FusedSDPA(attention.ScaledDotProductAttention):
    """torchtitan's SDPA attention on this library's kernels. Not for context parallelism, which
    exchanges torch's own function."""

    @dataclass(kw_only=True, slots=True)
    class Config(attention.ScaledDotProductAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks=None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs,
    ) -> Tensor:
        if attention_masks is not None:
            raise ValueError("FusedSDPA takes is_causal, and no attention_masks")
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


# Exact: a subclass, such as a norm around another centre, computes something else.
@override(target=nn_modules.RMSNorm.Config, exact=True, description="RMSNorm by fused_norm")
def rms_norm(config, memory_efficient: bool = False) -> FusedRMSNorm.Config:
    return derive(config, FusedRMSNorm.Config, memory_efficient=memory_efficient)


@override(target=nn_modules.LayerNorm.Config, exact=True, description="LayerNorm by fused_norm")
def layer_norm(config, memory_efficient: bool = False) -> FusedLayerNorm.Config:
    return derive(config, FusedLayerNorm.Config, memory_efficient=memory_efficient)


@override(
    target=attention.ScaledDotProductAttention.Config,
    exact=True,
    description="attention by fused_norm",
)
def sdpa(config) -> FusedSDPA.Config:
    return derive(config, FusedSDPA.Config)
