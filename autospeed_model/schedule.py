"""The learning rate of every step."""

from __future__ import annotations

from dataclasses import dataclass

# The public training warms up at least so long: few updates at a high rate would wreck a new network.
LEAST_WARMUP_STEPS = 100


def warmup_steps(epochs: int, steps_per_epoch: int) -> int:
    """Steps of a warm-up of ``epochs``; none if that is 0."""
    return max(epochs * steps_per_epoch, LEAST_WARMUP_STEPS) if epochs else 0


@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up from ``min_lr`` to ``max_lr``, then linear decay that reaches ``min_lr`` at the last step.

    A training that ends within its warm-up sees the first part of the same line and never decays.
    """

    min_lr: float
    max_lr: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """Learning rate of step 0 to ``total_steps - 1``."""
        if step < self.warmup_steps:
            return self.min_lr + (self.max_lr - self.min_lr) * step / self.warmup_steps
        decay_steps = max(self.total_steps - self.warmup_steps - 1, 1)
        return self.max_lr - (self.max_lr - self.min_lr) * (step - self.warmup_steps) / decay_steps
