import pytest
import torch

from autospeed_model.geometry import transform_points


@pytest.mark.parametrize(
    ("matrix", "points"),
    [
        ((3, 3), (3,)),
        ((3, 3), (7, 3)),
        ((2, 4, 3, 3), (2, 4, 5, 6, 2, 3)),
        ((2, 4, 2, 4), (2, 4, 9, 4)),
        ((2, 1, 3, 3), (2, 4, 5, 3)),
        ((2, 4, 3, 3), (1, 4, 5, 3)),
        ((2, 4, 3, 3), (2, 4, 3)),
        ((2, 3, 3), (2, 0, 3)),
    ],
)
def test_every_point_is_multiplied_by_its_matrix(matrix: tuple[int, ...], points: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    m, p = torch.randn(matrix, dtype=torch.float64), torch.randn(points, dtype=torch.float64)
    inner = len(points) - 1 - (len(matrix) - 2)
    spread = m.reshape(*matrix[:-2], *(1,) * inner, *matrix[-2:])
    torch.testing.assert_close(transform_points(m, p), (spread @ p.unsqueeze(-1)).squeeze(-1))


def test_points_need_not_be_contiguous() -> None:
    m, p = torch.randn(2, 3, 3), torch.randn(3, 5, 2).permute(2, 1, 0)
    torch.testing.assert_close(transform_points(m, p), transform_points(m, p.contiguous()))


def test_gradients_flow_to_matrix_and_points() -> None:
    inputs = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(transform_points, [value.requires_grad_() for value in inputs])


@pytest.mark.parametrize(
    ("matrix", "points", "message"),
    [
        ((3, 3), (5, 4), r"got \(3, 3\) and \(5, 4\)"),
        ((2, 3, 3), (3,), r"expected a matrix"),
        ((2, 3, 3), (4, 5, 3), r"\(2,\) do not fit those of the points, \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_told(matrix: tuple[int, ...], points: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transform_points(torch.zeros(matrix), torch.zeros(points))
