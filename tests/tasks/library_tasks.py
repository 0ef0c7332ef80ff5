"""Modules of libraries that nobody prepared for here, made small; a library that is not installed has none.

`LIBRARIES` has, by name, a constructor and the shapes of what it is given, by position, as `sweep_tasks._drawn` takes
them. Each constructor imports its library, so that a table can be read where it is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

Made = tuple[Callable[[], nn.Module], dict[str, tuple]]
PICTURE, WORDS = {"x": (3, 32, 32)}, {"x": ((20,), (16,))}


def of(module: str, kind: str, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    """The constructor of a class (or a function) of a library."""
    return lambda: getattr(import_module(module), kind)(*args, **settings)


def timm(name: str, **settings: Any) -> Made:
    """An image model of timm, with ten classes."""
    return of("timm", "create_model", name, num_classes=10, **settings), PICTURE


def wrapped(attend: str, **settings: Any) -> Made:
    """A decoder of x-transformers."""

    def make() -> nn.Module:
        x = import_module("x_transformers")
        layers = getattr(x, attend)(dim=32, depth=2, heads=2, attn_dim_head=16, **settings)
        return x.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)

    return make, WORDS


LIBRARIES: dict[str, Made] = {
    "timm mixer": (of("timm.models.mlp_mixer", "MlpMixer", num_classes=5, img_size=32, patch_size=8, num_blocks=2,
                      embed_dim=32), PICTURE),
    "timm deit3": timm("deit3_small_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2),
    "timm eva": timm("eva02_tiny_patch14_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=2),
    "timm cait": timm("cait_xxs24_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2),
    "timm xcit": timm("xcit_nano_12_p16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2),
    "timm ghostnet": timm("ghostnet_050"),
    "timm edgenext": timm("edgenext_xx_small", dims=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
    "timm mobilenetv4": timm("mobilenetv4_conv_small_035"),
    "timm inception next": timm("inception_next_atto", dims=(16, 16, 32, 32), depths=(1, 1, 1, 1)),
    "x-transformers rotary, gated": wrapped("Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x-transformers relative, talking": wrapped("Decoder", rel_pos_bias=True, attn_pre_talking_heads=True),
    "x-transformers macaron, sandwich": wrapped("Encoder", macaron=True, sandwich_norm=True),
    "x-transformers one key head": wrapped("Decoder", attn_one_kv_head=True, shift_tokens=1, attn_qk_norm=True),
    "vit-pytorch cct": (of("vit_pytorch.cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7,
                           stride=2, padding=3, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=5), PICTURE),
    "vit-pytorch nest": (of("vit_pytorch.nest", "NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2,
                            block_repeats=(1, 1), num_classes=5), PICTURE),
    "vit-pytorch max": (of("vit_pytorch.max_vit", "MaxViT", num_classes=5, dim=16, depth=(1,), dim_head=8,
                           window_size=4, dim_conv_stem=16), PICTURE),
    "linformer": (of("linformer", "LinformerLM", num_tokens=20, dim=32, seq_len=16, depth=2, heads=2, k=8), WORDS),
    "performer": (of("performer_pytorch", "PerformerLM", num_tokens=20, max_seq_len=16, dim=32, depth=2, heads=2,
                     dim_head=16, nb_features=8, causal=False), WORDS),
    "reformer": (of("reformer_pytorch", "ReformerLM", num_tokens=20, dim=32, depth=2, max_seq_len=16, heads=2,
                    bucket_size=4, n_hashes=2), WORDS),
    "perceiver": (of("perceiver_pytorch", "PerceiverLM", num_tokens=20, max_seq_len=16, dim=16, depth=1,
                     num_latents=4, latent_dim=16, latent_heads=2, cross_dim_head=8, latent_dim_head=8), WORDS),
    "conformer": (of("conformer", "Conformer", dim=32, depth=1, dim_head=16, heads=2, conv_kernel_size=7),
                  {"x": (16, 32)}),
    "g-mlp": (of("g_mlp_pytorch", "gMLP", num_tokens=20, dim=32, depth=2, seq_len=16), WORDS),
    "siren": (of("siren_pytorch", "SirenNet", dim_in=3, dim_hidden=16, dim_out=2, num_layers=2), {"x": (3,)}),
    "tcn": (of("pytorch_tcn", "TCN", num_inputs=4, num_channels=[8, 8], kernel_size=3), {"x": (4, 16)}),
    "nflows": (of("nflows.nn.nets", "ResidualNet", in_features=6, out_features=4, hidden_features=16, num_blocks=2),
               {"x": (6,)}),
    "itransformer": (of("iTransformer", "iTransformer", num_variates=5, lookback_len=16, dim=32, depth=2, heads=2,
                        dim_head=16, pred_length=4), {"x": (16, 5)}),
    "monai segresnet": (of("monai.networks.nets", "SegResNet", spatial_dims=2, init_filters=8, in_channels=3,
                           blocks_down=(1, 1), blocks_up=(1,)), PICTURE),
    "monai attention unet": (of("monai.networks.nets", "AttentionUnet", spatial_dims=2, in_channels=3, out_channels=2,
                                channels=(8, 16), strides=(2,)), PICTURE),
    "monai highresnet": (of("monai.networks.nets", "HighResNet", spatial_dims=2, in_channels=3, out_channels=2),
                         {"x": (3, 8, 8)}),
    "monai milmodel": (of("monai.networks.nets", "DenseNet", spatial_dims=2, in_channels=3, out_channels=2,
                          init_features=8, growth_rate=4, block_config=(1, 1)), PICTURE),
}  # fmt: skip
