"""As some libraries do: importing this narrows the CPUs of the process to one."""

import os
from typing import Any

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def train(params: dict[str, Any], context: Any) -> float:
    return 0.0
