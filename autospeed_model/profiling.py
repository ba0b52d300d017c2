"""A PyTorch profiler trace of a few updates in the middle of a training."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Callback, Trainer

WARMUP, RECORDED = 2, 4  # updates


class Profile(Callback):
    """Records updates 3 to 6 and writes them as a trace for chrome://tracing or Perfetto."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime.on_gpu else [])]
        self.path = path
        self.profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARMUP, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
        )

    def __enter__(self) -> Profile:
        self.profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.profile.__exit__(None, None, None)

    def on_update(self, trainer: Trainer) -> None:
        self.profile.step()

    def _write(self, recorded: profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.path))
