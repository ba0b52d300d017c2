"""The building blocks of AutoSpeed.

Shapes: B batch, C channels, H and W height and width of a feature map, N = H * W, K width of an attention key.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 64  # channels of one attention head
# Tensor cores read so many channels of a pixel at a time; with fewer, libraries fall back to far slower kernels.
ALIGNED_CHANNELS = 8


class Conv2d(nn.Conv2d):
    """A convolution in the precision of its input; its weights stay float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        missing = ALIGNED_CHANNELS - self.in_channels
        if missing > 0 and self.groups == 1 and x.is_cuda:
            x, weight = (F.pad(value, (0, 0, 0, 0, 0, missing)) for value in (x, weight))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out: Tensor = self._conv_forward(x, weight, bias)
        return out


class Linear(nn.Linear):
    """A linear layer in the precision of its input; its weights stay float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Conv(nn.Module):
    """Convolution without bias, batch norm, activation: (B, C, H, W) -> (B, out, H / stride, W / stride)."""

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, activation: bool = True
    ) -> None:
        super().__init__()
        self.conv = Conv2d(channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=1e-3, momentum=0.03)
        self.activation = nn.SiLU() if activation else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.norm(self.conv(x)))
        return out


class Residual(nn.Module):
    """Two 3x3 convolutions through ``channels * expansion`` channels, added to the input."""

    def __init__(self, channels: int, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(channels * expansion)
        self.first = Conv(channels, hidden, kernel=3)
        self.second = Conv(hidden, channels, kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x))
        return out


class C3K(nn.Module):
    """Half of the channels through two residual blocks, half past them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.enter = Conv(channels, out // 2)
        self.bypass = Conv(channels, out // 2)
        self.blocks = nn.Sequential(Residual(out // 2, expansion=1.0), Residual(out // 2, expansion=1.0))
        self.leave = Conv(out, out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(torch.cat((self.blocks(self.enter(x)), self.bypass(x)), dim=1))
        return out


class C3K2(nn.Module):
    """A chain of ``depth`` inner blocks of which every intermediate result is kept and mixed at the end."""

    def __init__(self, channels: int, out: int, depth: int, csp: bool, ratio: int = 2) -> None:
        super().__init__()
        width = out // ratio
        self.enter = Conv(channels, 2 * width)
        self.blocks = nn.ModuleList(C3K(width, width) if csp else Residual(width) for _ in range(depth))
        self.leave = Conv((2 + depth) * width, out)

    def forward(self, x: Tensor) -> Tensor:
        pieces = list(self.enter(x).chunk(2, dim=1))
        for block in self.blocks:
            pieces.append(block(pieces[-1]))
        out: Tensor = self.leave(torch.cat(pieces, dim=1))
        return out


class Context(nn.Module):
    """AutoSpeed's own block: the global average of a feature map is spread over its ``height`` x ``width`` cells
    as an attention that amplifies the map. (B, C, H, W) -> (B, out, H, W).

    The public network spreads with a Conv1d of kernel 3 over a signal of length 1, of which only the middle tap ever
    sees data. This linear layer is that tap.
    """

    def __init__(self, channels: int, out: int, height: int, width: int, ratio: int = 2) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.spread = Linear(channels, height * width)
        self.squeeze = Conv2d(1, channels // ratio, 3, padding=1)
        self.excite = Conv2d(channels // ratio, channels, 3, padding=1)
        self.project = Conv2d(channels, out, 3, padding=1)
        # The distribution the convolution's default would have: its fan-in counts three taps.
        bound = 1 / math.sqrt(3 * channels)
        nn.init.uniform_(self.spread.weight, -bound, bound)
        nn.init.uniform_(self.spread.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        attention = F.silu(F.silu(self.spread(x.mean(dim=(2, 3)))))
        attention = attention.view(-1, 1, self.height, self.width)
        attention = F.silu(self.excite(F.silu(self.squeeze(attention))))
        out: Tensor = self.project(F.silu(attention * x + x))
        return out


class SPPF(nn.Module):
    """Spatial pyramid pooling: three chained 5x5 max pools see windows of 5, 9 and 13 cells.

    Each pools columns, then rows, which finds the same maxima in 10 comparisons instead of 25.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.enter = Conv(channels, channels // 2)
        self.leave = Conv(channels * 2, out)

    def forward(self, x: Tensor) -> Tensor:
        pieces = [self.enter(x)]
        for _ in range(3):
            columns = F.max_pool2d(pieces[-1], kernel_size=(5, 1), stride=1, padding=(2, 0))
            pieces.append(F.max_pool2d(columns, kernel_size=(1, 5), stride=1, padding=(0, 2)))
        out: Tensor = self.leave(torch.cat(pieces, dim=1))
        return out


class Attention(nn.Module):
    """Self-attention over the cells of a map, with a depth-wise convolution of the values as position information."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // HEAD_WIDTH
        self.value = channels // self.heads
        self.key = self.value // 2
        self.qkv = Conv(channels, channels + 2 * self.key * self.heads, activation=False)
        self.position = Conv(channels, channels, kernel=3, groups=channels, activation=False)
        self.project = Conv(channels, channels, activation=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(x).reshape(batch, self.heads, 2 * self.key + self.value, height * width)
        query, key, value = qkv.split((self.key, self.key, self.value), dim=2)  # each (B, heads, K or V, N)
        query = query * self.key**-0.5  # before the product, which could leave fp16's range
        weights = (query.transpose(-2, -1) @ key).float().softmax(dim=-1).to(value.dtype)
        mixed = (value @ weights.transpose(-2, -1)).reshape(batch, channels, height, width)
        out: Tensor = self.project(mixed + self.position(value.reshape(batch, channels, height, width)))
        return out


def upsample(x: Tensor) -> Tensor:
    """Nearest upsampling, (B, C, H, W) -> (B, C, 2H, 2W), whose gradient is a plain sum instead of a scattered one."""
    batch, channels, height, width = x.shape
    wide = x[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
    return wide.reshape(batch, channels, 2 * height, 2 * width)


class C2PSA(nn.Module):
    """Half of the channels through attention and a feed-forward, each added to its input; half past them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        width = out // 2
        self.enter = Conv(channels, 2 * width)
        self.attention = Attention(width)
        self.feed_forward = nn.Sequential(Conv(width, 2 * width), Conv(2 * width, width, activation=False))
        self.leave = Conv(2 * width, out)

    def forward(self, x: Tensor) -> Tensor:
        bypass, y = self.enter(x).chunk(2, dim=1)
        y = y + self.attention(y)
        y = y + self.feed_forward(y)
        out: Tensor = self.leave(torch.cat((bypass, y), dim=1))
        return out
