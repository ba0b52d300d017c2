"""The AutoSpeed detector, all sizes.

Shapes: B batch, H and W of the input, A anchors (cells of the three detection maps), nc classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autospeed_model.errors import UserError
from autospeed_model.layers import C2PSA, C3K2, SPPF, Context, Conv, Conv2d, upsample

BINS = 16  # of the distribution over a side's distance, in cells
STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class Size:
    """Widths w0 to w5 of the stages, inner blocks per C3K2 of the neck, and which of those are C3K."""

    widths: tuple[int, int, int, int, int, int]
    depth: int
    csp_upper: bool  # h1, h2 and h4
    csp_last: bool = True  # h6


SIZES = {
    "n": Size((3, 16, 32, 64, 128, 256), 1, csp_upper=False),
    "s": Size((3, 32, 64, 128, 256, 512), 1, csp_upper=False),
    "m": Size((3, 64, 128, 256, 512, 512), 1, csp_upper=True),
    "l": Size((3, 64, 128, 256, 512, 512), 2, csp_upper=True),
    "x": Size((3, 96, 192, 384, 768, 768), 2, csp_upper=True),
}


class Backbone(nn.Module):
    """(B, 3, H, W) -> maps at strides 8, 16 and 32 with w4, w4 and w5 channels."""

    def __init__(self, widths: tuple[int, ...], height: int, width: int) -> None:
        super().__init__()
        w0, w1, w2, w3, w4, w5 = widths
        self.p1 = Conv(w0, w1, 3, 2)
        self.p2 = nn.Sequential(Conv(w1, w2, 3, 2), Context(w2, w3, height // 4, width // 4))
        self.p3 = nn.Sequential(Conv(w3, w3, 3, 2), Context(w3, w4, height // 8, width // 8))
        self.p4 = nn.Sequential(Conv(w4, w4, 3, 2), Context(w4, w4, height // 16, width // 16))
        self.p5 = nn.Sequential(
            Conv(w4, w5, 3, 2), Context(w5, w5, height // 32, width // 32), SPPF(w5, w5), C2PSA(w5, w5)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p3 = self.p3(self.p2(self.p1(x)))
        p4 = self.p4(p3)
        return p3, p4, self.p5(p4)


class Neck(nn.Module):
    """Mixes the three maps from coarse to fine and back: w3, w4 and w5 channels at strides 8, 16 and 32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        _, _, _, w3, w4, w5 = size.widths
        self.h1 = C3K2(w4 + w5, w4, size.depth, size.csp_upper)
        self.h2 = C3K2(w4 + w4, w3, size.depth, size.csp_upper)
        self.h3 = Conv(w3, w3, 3, 2)
        self.h4 = C3K2(w3 + w4, w4, size.depth, size.csp_upper)
        self.h5 = Conv(w4, w4, 3, 2)
        self.h6 = C3K2(w4 + w5, w5, size.depth, size.csp_last)

    def forward(self, maps: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        p3, p4, p5 = maps
        middle = self.h1(torch.cat((upsample(p5), p4), dim=1))
        fine = self.h2(torch.cat((upsample(middle), p3), dim=1))
        middle = self.h4(torch.cat((self.h3(fine), middle), dim=1))
        coarse = self.h6(torch.cat((self.h5(middle), p5), dim=1))
        return fine, middle, coarse


class Head(nn.Module):
    """Per cell the distributions of four distances to the box's sides, and a logit per class.

    Three maps in, three maps (B, 4 * BINS + nc, h, w) out.
    """

    def __init__(self, classes: int, widths: tuple[int, int, int], height: int, width: int) -> None:
        super().__init__()
        box_width, class_width = max(64, widths[0] // 4), max(80, widths[0], classes)
        self.box = nn.ModuleList(
            nn.Sequential(Conv(c, box_width, 3), Conv(box_width, box_width, 3), Conv2d(box_width, 4 * BINS, 1))
            for c in widths
        )
        self.cls = nn.ModuleList(
            nn.Sequential(
                Conv(c, c, 3, groups=c),
                Conv(c, class_width),
                Conv(class_width, class_width, 3, groups=class_width),
                Conv(class_width, class_width),
                Conv2d(class_width, classes, 1),
            )
            for c in widths
        )
        for box, cls, stride in zip(self.box, self.cls, STRIDES, strict=True):
            nn.init.constant_(box.get_parameter("2.bias"), 1.0)
            # About five objects an image, whatever the number of cells.
            prior = 5 * stride * stride / (classes * height * width)
            nn.init.constant_(cls.get_parameter("4.bias"), math.log(prior))

    def forward(self, maps: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        return [torch.cat((box(x), cls(x)), dim=1) for x, box, cls in zip(maps, self.box, self.cls, strict=True)]


class AutoSpeed(nn.Module):
    """The network for inputs of one size; its Context blocks are bound to ``height`` and ``width``.

    In training mode it returns the three maps of :class:`Head`. In evaluation mode it returns (B, 4 + nc, A) in
    float32: centre x, centre y, width and height in pixels, then a probability per class.
    """

    anchors: Tensor  # (2, A): centres of the cells, in cells
    anchor_strides: Tensor  # (A,)

    def __init__(self, height: int, width: int, size: str = "n", classes: int = 4) -> None:
        """:raises UserError: for an unknown size, or a height or width that no stage can halve evenly."""
        super().__init__()
        if size not in SIZES:
            raise UserError(f"size of the network is {size!r}; allowed are {', '.join(SIZES)}")
        if height % STRIDES[-1] or width % STRIDES[-1] or min(height, width) < 2 * STRIDES[-1]:
            raise UserError(f"input is {height} x {width}; height and width must be multiples of 32, at least 64")
        self.height, self.width, self.size, self.classes = height, width, size, classes
        shape = SIZES[size]
        self.backbone = Backbone(shape.widths, height, width)
        self.neck = Neck(shape)
        self.head = Head(classes, shape.widths[3:], height, width)
        anchors, strides = make_anchors(height, width)
        self.register_buffer("anchors", anchors, persistent=False)
        self.register_buffer("anchor_strides", strides, persistent=False)

    def forward(self, images: Tensor) -> list[Tensor] | Tensor:
        """``images`` (B, 3, H, W), RGB from 0 to 1."""
        maps = self.head(self.neck(self.backbone(images)))
        return maps if self.training else self.detect(maps)

    def detect(self, maps: list[Tensor]) -> Tensor:
        """Turn the head's maps into boxes in pixels and probabilities, (B, 4 + nc, A)."""
        sides, logits = flatten_maps(maps)
        low, high = distances(sides).split(2, dim=1)
        centre, extent = self.anchors + (high - low) / 2, low + high
        return torch.cat((torch.cat((centre, extent), dim=1) * self.anchor_strides, logits.sigmoid()), dim=1)


def make_anchors(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Centres (2, A) as x, y in cells, and strides (A,), in the order of :func:`flatten_maps`."""
    centres, strides = [], []
    for stride in STRIDES:
        rows, columns = height // stride, width // stride
        y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        centres.append(torch.stack((x.reshape(-1), y.reshape(-1))))
        strides.append(torch.full((rows * columns,), float(stride)))
    return torch.cat(centres, dim=1), torch.cat(strides)


def flatten_maps(maps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Three maps (B, 4 * BINS + nc, h, w) -> float32 logits of sides (B, 4 * BINS, A) and of classes (B, nc, A)."""
    # In memory the channels of a cell stay side by side, as the head's convolutions want their gradients.
    flat = torch.cat([x.permute(0, 2, 3, 1).flatten(1, 2) for x in maps], dim=1).float().transpose(1, 2)
    return flat[:, : 4 * BINS], flat[:, 4 * BINS :]


def distances(sides: Tensor) -> Tensor:
    """Expected distance to the left, top, right and bottom side in cells: (B, 4 * BINS, A) -> (B, 4, A)."""
    batch, _, anchors = sides.shape
    bins = torch.arange(BINS, dtype=sides.dtype, device=sides.device)
    return torch.einsum("bska,k->bsa", sides.view(batch, 4, BINS, anchors).softmax(dim=2), bins)
