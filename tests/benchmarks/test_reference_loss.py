import pytest
import torch

from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.loss import DetectionLoss
from benchmarks.reference_loss import DenseLoss

HEIGHT, WIDTH = 128, 256


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("counts", [(6, 3, 1), (0, 2, 0), (0, 0, 0)])
def test_the_slow_variants_compute_the_same_losses_and_gradients(loops: bool, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    maps = [torch.randn(3, 68, HEIGHT // s, WIDTH // s, requires_grad=True) for s in (8, 16, 32)]
    corner = torch.rand(3, 6, 2) * torch.tensor([0.6 * WIDTH, 0.6 * HEIGHT])
    boxes = torch.cat((torch.randint(0, 4, (3, 6, 1)), corner, corner + 10 + torch.rand(3, 6, 2) * 60), dim=2)
    real = torch.arange(6) < torch.tensor(counts)[:, None]
    owner = torch.arange(3.0)[:, None, None].expand(3, 6, 1)
    flat = torch.cat((owner, boxes), dim=2)[real]
    loss = DetectionLoss(HEIGHT, WIDTH, Hyperparameters())
    ours = loss(maps, boxes, real) * loss.gains
    theirs = torch.stack(DenseLoss(HEIGHT, WIDTH, Hyperparameters(), loops)(maps, flat))
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours.sum(), maps), torch.autograd.grad(theirs.sum(), maps), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
