from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hip_kernels
from autospeed_model.augment import FILL, PixelTable, augment_reference
from hip_kernels import AugmentTable, reference

NO_JITTER = [1.0, 1.0, 1.0, 1.0]


def random_table(
    batch: int, layers: int, images: int, source: tuple[int, int], size: tuple[int, int], device: str = "cpu"
) -> AugmentTable:
    """Mosaics around a random centre of a canvas of twice the size; every third matrix turns and shears, too."""
    height, width = size
    tiles = torch.empty(batch, layers, 4, 3, dtype=torch.int32)
    geometry = torch.empty(batch, layers, 10)
    for sample in range(batch):
        for layer in range(layers):
            seam_x, seam_y = (int(n * (0.5 + torch.rand(()))) for n in (width, height))
            for k in range(4):
                x = seam_x if k % 2 else seam_x - source[1]
                y = seam_y if k // 2 else seam_y - source[0]
                image = int(torch.randint(-1 if images == 0 else 0, max(images, 1), ()))
                tiles[sample, layer, k] = torch.tensor([image, x, y])
            scale, angle = 0.6 + float(torch.rand(())), (sample % 3 == 2) * 0.3 * float(torch.randn(()))
            matrix = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) * scale
            if sample % 2:
                matrix[:, 0] *= -1
            centre = torch.tensor([width / 2, height / 2])
            shift = torch.tensor([width, height]) + torch.randn(2) * 5 - matrix @ centre
            geometry[sample, layer, :6] = torch.cat((matrix, shift.unsqueeze(1)), dim=1).flatten()
            geometry[sample, layer, 6:] = torch.tensor([seam_x, seam_y, 2 * width, 2 * height])
    colour = torch.rand(batch, 4) * torch.tensor([0.03, 1.4, 0.8, 1.0]) + torch.tensor([0.985, 0.3, 0.6, 0.0])
    if layers == 1:
        colour[:, 3] = 1
    return AugmentTable(tiles.to(device), geometry.to(device), colour.to(device))


def expected_in_float64(images: Tensor, table: AugmentTable, size: tuple[int, int], fill: float = 0.0) -> Tensor:
    arguments = (table.tiles, table.geometry.double(), table.colour.double())
    return reference.mosaic_augment(images, *arguments, *size, fill, torch.float64, False)


def smooth_images(count: int, height: int, width: int) -> Tensor:
    """Noise, in which neighbours differ by tens of grey levels, is harsh enough; pure colours test the hue."""
    images = torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8)
    images[0, : height // 2] = torch.tensor([200, 30, 30], dtype=torch.uint8)
    images[0, height // 2 :] = 0
    return images


TOLERANCE = {torch.float32: 2e-4, torch.float16: 6e-4, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("layers", "size"), [(1, (20, 32)), (2, (16, 24)), (1, (17, 23)), (2, (5, 1))])
def test_the_result_equals_the_reference_in_float64(
    layers: int, size: tuple[int, int], dtype: torch.dtype, channels_last: bool, device: str
) -> None:
    images = smooth_images(5, 18, 30).to(device)
    table = random_table(7, layers, 5, (18, 30), size, device)
    value = hip_kernels.mosaic_augment(images, table, size, dtype, channels_last, fill=114.0)
    assert value.shape == (7, 3, *size)
    assert value.dtype == dtype
    assert value.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    difference = (value.double() - expected_in_float64(images, table, size, 114.0)).abs()
    # a pixel whose hue lies on the seam of the circle may go either way in float32
    assert (difference > TOLERANCE[dtype]).double().mean() < 2e-4


@pytest.mark.parametrize("layers", [1, 2])
def test_the_result_equals_the_trainers_own_augmentation(layers: int, device: str) -> None:
    images = smooth_images(5, 18, 30).to(device)
    table = random_table(7, layers, 5, (18, 30), (18, 30), device)
    value = hip_kernels.mosaic_augment(images, table, (18, 30), fill=FILL)
    difference = (value - augment_reference(images, PixelTable(*table))).abs()
    assert (difference > 2e-4).double().mean() < 2e-4


def test_the_identity_gives_the_image_back(device: str) -> None:
    images = torch.randint(0, 256, (2, 12, 16, 3), dtype=torch.uint8, device=device)
    tiles = torch.tensor([[[[1, 0, 0], [-1, 0, 0], [-1, 0, 0], [-1, 0, 0]]]], dtype=torch.int32, device=device)
    geometry = torch.tensor([[[1.0, 0, 0, 0, 1, 0, 16, 12, 16, 12]]], device=device)
    table = AugmentTable(tiles, geometry, torch.tensor([NO_JITTER], device=device))
    value = hip_kernels.mosaic_augment(images, table, (12, 16))
    assert (value - images[1].permute(2, 0, 1) / 255).abs().max() < 1e-6


def test_a_mirrored_matrix_flips_the_image(device: str) -> None:
    images = torch.randint(0, 256, (1, 6, 8, 3), dtype=torch.uint8, device=device)
    tiles = torch.tensor([[[[0, 0, 0], [-1, 0, 0], [-1, 0, 0], [-1, 0, 0]]]], dtype=torch.int32, device=device)
    geometry = torch.tensor([[[-1.0, 0, 7, 0, 1, 0, 8, 6, 8, 6]]], device=device)
    table = AugmentTable(tiles, geometry, torch.tensor([NO_JITTER], device=device))
    value = hip_kernels.mosaic_augment(images, table, (6, 8))
    assert (value - images[0].flip(1).permute(2, 0, 1) / 255).abs().max() < 1e-6


def test_four_tiles_meet_at_the_seam_and_the_rest_is_filled(device: str) -> None:
    images = torch.stack([torch.full((4, 4, 3), 50 * (k + 1), dtype=torch.uint8) for k in range(4)]).to(device)
    places = [[0, 0, 0], [1, 4, 0], [2, 0, 4], [3, 4, 4]]
    tiles = torch.tensor([[places]], dtype=torch.int32, device=device)
    geometry = torch.tensor([[[1.0, 0, -1, 0, 1, -1, 4, 4, 8, 8]]], device=device)
    table = AugmentTable(tiles, geometry, torch.tensor([NO_JITTER], device=device))
    grey = hip_kernels.mosaic_augment(images, table, (10, 10), fill=255.0)[0, 0] * 255
    wanted = torch.full((10, 10), 255.0)
    wanted[1:5, 1:5], wanted[1:5, 5:9], wanted[5:9, 1:5], wanted[5:9, 5:9] = 50, 100, 150, 200
    assert (grey.cpu() - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("matrix", [float("nan"), float("inf"), 1e30])
def test_a_matrix_that_leaves_the_canvas_gives_the_fill_value(matrix: float, device: str) -> None:
    table = random_table(2, 1, 3, (6, 8), (6, 8), device)
    table.geometry[:, :, :6] = matrix
    table.colour[:] = torch.tensor(NO_JITTER)
    images = torch.zeros(3, 6, 8, 3, dtype=torch.uint8, device=device)
    value = hip_kernels.mosaic_augment(images, table, (6, 8), fill=255.0)
    assert (value == 1).all()


def test_an_empty_batch_no_images_and_images_out_of_range(device: str) -> None:
    images = torch.zeros(3, 6, 8, 3, dtype=torch.uint8, device=device)
    empty = hip_kernels.mosaic_augment(images, random_table(0, 1, 3, (6, 8), (6, 8), device), (6, 8))
    assert empty.shape == (0, 3, 6, 8)
    table = random_table(1, 1, 3, (6, 8), (6, 8), device)
    table.tiles[..., 0] = torch.tensor([3, -1, 2**30, -5], dtype=torch.int32)
    table.colour[:] = torch.tensor(NO_JITTER)
    assert (hip_kernels.mosaic_augment(images, table, (6, 8), fill=255.0) == 1).all()
    assert (hip_kernels.mosaic_augment(images[:0], table, (6, 8), fill=255.0) == 1).all()


@pytest.mark.skipif(not torch.cuda.is_available() or not hip_kernels.is_built("cuda"), reason="needs a GPU")
def test_images_in_pinned_host_memory_give_the_same_bits() -> None:
    images = torch.randint(0, 256, (5, 18, 30, 3), dtype=torch.uint8)
    table = random_table(4, 2, 5, (18, 30), (20, 32), "cuda")
    on_device = hip_kernels.mosaic_augment(images.cuda(), table, (20, 32))
    assert torch.equal(hip_kernels.mosaic_augment(images.pin_memory(), table, (20, 32)), on_device)
    with pytest.raises(ValueError, match="pinned host memory"):
        hip_kernels.mosaic_augment(images, table, (20, 32))


def bad(**change: Tensor) -> AugmentTable:
    return random_table(2, 1, 3, (6, 8), (6, 8))._replace(**change)


@pytest.mark.parametrize(
    ("images", "table", "message"),
    [
        (torch.zeros(3, 6, 8, 4, dtype=torch.uint8), bad(), r"expected images of shape \(N, H, W, 3\)"),
        (torch.zeros(3, 6, 8, 3), bad(), "expected images of dtype Byte, got Float"),
        (torch.zeros(3, 3, 6, 8, dtype=torch.uint8).permute(0, 2, 3, 1), bad(), "expected contiguous images"),
        (
            torch.zeros(3, 6, 8, 3, dtype=torch.uint8),
            bad(tiles=torch.zeros(2, 3, 4, 3).int()),
            "expected geometry of shape",
        ),
        (torch.zeros(3, 6, 8, 3, dtype=torch.uint8), bad(colour=torch.zeros(2, 3)), "expected colour of shape"),
    ],
    ids=range(5),
)
def test_wrong_arguments_name_what_was_expected(images: Tensor, table: AugmentTable, message: str) -> None:
    if not hip_kernels.is_built("cpu"):
        pytest.skip("the messages come from the compiled operations")
    with pytest.raises((ValueError, TypeError), match=message):
        hip_kernels.mosaic_augment(images, table, (6, 8))
