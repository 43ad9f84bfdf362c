"""Images and sounds in the forms that models take: each form makes the arguments beside the rows of text."""

from __future__ import annotations

from typing import Any

import torch

from tiny_models.composite_sizes import PATCH, SIDE

# Text tokens and images of each row.
ROWS = ((9, 2), (5, 1), (14, 0), (3, 1))


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _grid(config: Any, images: int, *, merged: bool = False, frames: int | None = None) -> dict[str, torch.Tensor]:
    """Flattened patches and the grid of each image, as Qwen's processors make them."""
    encoder = config.vision_config
    side = getattr(encoder, "patch_size", PATCH)
    deep: int = frames or getattr(encoder, "temporal_patch_size", getattr(encoder, "patch_temporal", 1))
    grid = torch.tensor([[1, 4, 4]] * images)
    flat = _pixels(int(grid.prod(1).sum()), 3 * deep * side * side)
    return {"pixel_values": flat.unflatten(1, (3, side, side)) if merged else flat, "image_grid_thw": grid}


def _merged_apart(config: Any, images: int) -> dict[str, torch.Tensor]:
    """A grid whose images are merged by factors of their own, as VideoLLaMA 3's processor makes it."""
    return {**_grid(config, images), "image_merge_sizes": torch.tensor([2] * images)}


def _shaped(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Flattened patches of each image and its height and width in patches, as SigLIP 2's processor makes them."""
    side = config.vision_config.patch_size
    return {
        "pixel_values": _pixels(images, 16, 3 * side * side),
        "spatial_shapes": torch.tensor([[4, 4]] * images),
        "pixel_attention_mask": torch.ones(images, 16, dtype=torch.long),
    }


def _strip(config: Any, images: int) -> dict[str, torch.Tensor]:
    """The patches of all images side by side, as MiniCPM-V's processor makes them."""
    side = config.vision_config.patch_size
    return {"pixel_values": _pixels(1, 3, side, images * 16 * side), "target_sizes": torch.tensor([[4, 4]] * images)}


def _pooled(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Flattened patches of each image and which of them each token pools, as Molmo 2's processor makes them."""
    side = config.vision_config.patch_size
    numbers = torch.arange(images * 16).view(images, 2, 2, 2, 2)  # rows of tokens and of their patches, columns too
    return {
        "pixel_values": _pixels(images, 16, 3 * side * side),
        "image_token_pooling": numbers.transpose(2, 3).reshape(-1, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * images),
    }


def _two_sides(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Flattened patches of all images and the height and width of each, as Nemotron Omni's processor makes them."""
    made = _grid(config, images, frames=1)
    return {"pixel_values": made["pixel_values"], "image_grid_hw": made["image_grid_thw"][:, 1:]}


def _blocks(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Blocks of patches that are merged, the colours last, as Inkling 2's processor makes them."""
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    return {"pixel_values": _pixels(images * 4, side, side, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * images)}


def _clips(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Each patch as a short clip, the colours last, as Inkling's processor makes them."""
    encoder = config.vision_config
    side, frames = encoder.patch_size, encoder.temporal_patch_size
    return {"pixel_values": _pixels(images * 4, frames, side, side, 3)}


def _bare(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Flattened patches of each image, as Fuyu's processor makes them."""
    return {"image_patches": _pixels(images, 4, 3 * config.patch_size**2)}


def _square(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(images, 3, SIDE, SIDE)}


def _twice(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Images in two sizes, for two encoders."""
    side = config.high_res_vision_config.image_size
    return {**_square(config, images), "high_res_pixel_values": _pixels(images, 3, side, side)}


def _sized(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {**_square(config, images), "image_sizes": torch.tensor([[SIDE, SIDE]] * images)}


def _tiled(config: Any, images: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _pixels(images, 3, 3, SIDE, SIDE),
        "image_sizes": torch.tensor([[SIDE, 2 * SIDE]] * images),
    }


def _by_row(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Images of each row, as Idefics' processors make them: rows with fewer get empty ones."""
    most = max(number for _, number in ROWS)
    pixels = torch.zeros(len(ROWS), most, 3, SIDE, SIDE)
    for row, (_, number) in enumerate(ROWS):
        pixels[row, :number] = _pixels(number, 3, SIDE, SIDE) + row
    return {"pixel_values": pixels}


def _by_row_marked(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Images of each row and a mask of those that are there, as Granite Docling's processor makes them."""
    made = _by_row(config, images)
    return {**made, "pixel_attention_mask": made["pixel_values"].flatten(2).ne(0).any(-1)}


def _placed(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Patches with their places in the image, as the processors of Gemma 4 make them: four tokens an image."""
    encoder = config.vision_config
    pooled = getattr(encoder, "model_patch_size", None)  # the processor has pooled 3 x 3 patches, or the model does
    side, rows = (pooled, 2) if pooled else (encoder.patch_size, 6)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(rows)).flip(1)
    return {
        "pixel_values": _pixels(images, len(places), 3 * side * side).sigmoid(),
        "image_position_ids": places[None].repeat(images, 1, 1),
    }


def _beside(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Tiles of each row's images, as Mllama's processor makes them: rows with fewer get empty ones."""
    tiles, side = config.vision_config.max_num_tiles, config.vision_config.image_size
    made = _by_row(config, images)["pixel_values"]
    there = made.flatten(2).ne(0).any(-1).long()
    made = made[:, :, None, :, :1, :1].expand(-1, -1, tiles, -1, side, side) * torch.linspace(0.5, 1, side)
    return {
        "pixel_values": made.contiguous(),
        "aspect_ratio_ids": there,  # 1: a single tile
        "aspect_ratio_mask": torch.nn.functional.one_hot(torch.zeros_like(there), tiles) * there[..., None],
    }


def _sounds(config: Any, images: int, *masks: str) -> dict[str, torch.Tensor]:
    """Frames of whole sounds, with or without masks that say so."""
    # Qwen3-ASR cuts sounds into chunks of two windows.
    frames = 2 * getattr(getattr(config, "audio_config", None), "n_window", 40)
    whole = {mask: torch.ones(images, frames, dtype=torch.long) for mask in masks}
    return {"input_features": _pixels(images, 8, frames), **whole}


def _by_frame(config: Any, images: int, *masks: str) -> dict[str, torch.Tensor]:
    """Frames of whole sounds, the features last, as Granite Speech's processor makes them; some stack frames."""
    features = 8 * getattr(getattr(config, "audio_config", None), "num_stacked_frames", 1)
    whole = {mask: torch.ones(images, 20, dtype=torch.long) for mask in masks}
    return {"input_features": _pixels(images, 80 if not masks else 20, features), **whole}


def _waves(config: Any, images: int) -> dict[str, torch.Tensor]:
    """Samples of whole sounds."""
    return {"input_values": _pixels(images, 1, 4000)}


# By the name of the form.
FORMS = {
    "square": _square,
    "patches": _bare,
    "grid": _grid,
    "grid of patches": lambda config, images: _grid(config, images, merged=True),
    "grid of single frames": lambda config, images: _grid(config, images, frames=1),
    "grid merged apart": _merged_apart,
    "patches with shapes": _shaped,
    "patches to pool": _pooled,
    "grid of two sides": _two_sides,
    "blocks of patches": _blocks,
    "clips of patches": _clips,
    "strip of patches": _strip,
    "square in two sizes": _twice,
    "sized": _sized,
    "tiled": _tiled,
    "by row": _by_row,
    "by row, marked": _by_row_marked,
    "placed": _placed,
    "beside the text": _beside,
    "sounds": _sounds,
    "sounds with a mask": lambda config, images: _sounds(config, images, "input_features_mask"),
    "sounds with an attention mask": lambda config, images: _sounds(config, images, "feature_attention_mask"),
    "sounds with two masks": lambda config, images: _sounds(config, images, "input_features_mask", "padding_mask"),
    "sounds by frame": _by_frame,
    "sounds by frame with a mask": lambda config, images: _by_frame(config, images, "input_features_mask"),
    "waves": _waves,
}
