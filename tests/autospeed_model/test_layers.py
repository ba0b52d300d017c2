import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autospeed_model.layers import C2PSA, C3K2, SPPF, Attention, Context, Conv


def test_context_equals_the_convolution_over_a_signal_of_length_one() -> None:
    torch.manual_seed(0)
    block = Context(8, 6, 4, 5).double()
    spread = nn.Conv1d(8, 20, kernel_size=3, padding=1).double()
    with torch.no_grad():
        block.spread.weight.copy_(spread.weight[:, :, 1])
        block.spread.bias.copy_(spread.bias)
    x = torch.randn(2, 8, 4, 5, dtype=torch.float64)

    signal = spread(x.mean(dim=(2, 3)).unsqueeze(2))  # (2, 20, 1)
    attention = F.silu(F.silu(signal).view(2, 1, 4, 5))
    attention = F.silu(block.excite(F.silu(block.squeeze(attention))))
    expected = block.project(F.silu(attention * x + x))

    torch.testing.assert_close(block(x), expected)


def test_context_starts_from_the_distribution_of_the_convolution_it_replaces() -> None:
    torch.manual_seed(0)
    reference = nn.Conv1d(64, 4000, kernel_size=3).weight[:, :, 1]
    weight = Context(64, 64, 40, 100).spread.weight
    assert weight.std().item() == pytest.approx(reference.std().item(), rel=0.02)
    assert weight.abs().max().item() == pytest.approx(reference.abs().max().item(), rel=0.01)


def test_spatial_pyramid_sees_windows_of_5_9_and_13_cells() -> None:
    block = SPPF(4, 4).eval()
    x = torch.randn(1, 4, 20, 20)
    hidden = block.enter(x)
    pieces = [hidden, *(F.max_pool2d(hidden, k, stride=1, padding=k // 2) for k in (5, 9, 13))]
    torch.testing.assert_close(block(x), block.leave(torch.cat(pieces, dim=1)))


def test_attention_equals_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    block = Attention(128).eval()
    x = torch.randn(2, 128, 3, 4)
    query, key, value = block.qkv(x).view(2, 2, 128, 12).transpose(2, 3).split((32, 32, 64), dim=3)
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(2, 3).reshape(2, 128, 3, 4)
    values = value.transpose(2, 3).reshape(2, 128, 3, 4)
    expected = block.project(mixed + block.position(values))
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


class Large(nn.Module):
    """Queries and keys whose products, not yet scaled, are more than fp16 can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x), 2 * x.shape[1], *x.shape[2:]), 60.0, dtype=x.dtype)


def test_attention_to_large_queries_and_keys_stays_a_number_in_fp16() -> None:
    block = Attention(128).eval()
    block.qkv = Large()
    assert block(torch.zeros(1, 128, 3, 4, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("csp", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_c3k2_mixes_every_intermediate_result(csp: bool, depth: int) -> None:
    block = C3K2(12, 16, depth, csp)
    assert block.leave.conv.in_channels == (2 + depth) * 8
    assert block(torch.randn(2, 12, 6, 7)).shape == (2, 16, 6, 7)


def test_blocks_work_in_channels_last_order() -> None:
    block = nn.Sequential(Conv(3, 128, 3, 2), C2PSA(128, 128)).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = block(x)
    ordered = block.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(ordered, expected, rtol=1e-4, atol=1e-5)
