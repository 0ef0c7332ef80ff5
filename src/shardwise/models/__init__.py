"""Small reference models in ordinary PyTorch, shared by examples and tests. Tasks are in `models.tasks`."""

from shardwise.models.decoder import Decoder, DecoderConfig, generate
from shardwise.models.gpt2 import GPT2, GPT2Config
from shardwise.models.mlp import MLP, MLPConfig
from shardwise.models.moe import MoEConfig, MoEDecoder
from shardwise.models.unet import UNet, UNetConfig
from shardwise.models.vit import ViT, ViTConfig

__all__ = [
    "GPT2",
    "MLP",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "MLPConfig",
    "MoEConfig",
    "MoEDecoder",
    "UNet",
    "UNetConfig",
    "ViT",
    "ViTConfig",
    "generate",
]
