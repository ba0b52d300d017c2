"""Build the emulated AMD SMI library and read or write the state of an emulated node."""

from __future__ import annotations

import fcntl
import importlib.util
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fake.c")
GPUS = 8
NOT_SUPPORTED = 2


def build(folder: Path, state_folder: Path) -> Path:
    """Compile the library into ``folder``; the result is a value for ``ROCM_PATH``.

    The wrapper of the ``amdsmi`` package resolves every symbol at import, so that what ``fake.c`` lacks is added as a
    stub answering NOT_SUPPORTED.
    """
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the package amdsmi is missing: pip install 'hpcjobs[amd]'")
    wrapper = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()
    wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    implemented = set(re.findall(r"^status_t (amdsmi_\w+)\(", SOURCE.read_text(), re.MULTILINE))
    stubs = folder / "stubs.c"
    library = folder / "lib" / "libamd_smi.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    stubs.write_text(
        "".join(f"int {name}(void) {{ return {NOT_SUPPORTED}; }}\n" for name in sorted(wanted - implemented))
    )
    compiler = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f'-DSTATE_FOLDER="{state_folder}"']
    subprocess.run([*compiler, "-o", str(library), str(SOURCE), str(stubs)], check=True)
    return folder


@dataclass(frozen=True)
class SetCall:
    """One line of a node's log: somebody called ``amdsmi_set_gpu_compute_partition``."""

    time_s: float
    pid: int
    job: str
    gpu: int
    before: str
    asked: str
    answer: int


class EmulatedGpus:
    """The eight emulated GPUs of one node: what they are now, and what they shall do."""

    def __init__(self, state_folder: Path, node: str) -> None:
        self._state = state_folder / f"{node}.state"
        self._log = state_folder / f"{node}.log"
        if not self._state.exists():
            self.reset()

    def reset(self) -> None:
        """All GPUs in SPX, all faults off, no log."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        with self._state.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.writelines(f"gpu{gpu} SPX\n" for gpu in range(GPUS))
        self._log.unlink(missing_ok=True)

    def inject(self, **values: int | str) -> None:
        """Set ``busy``, ``no_perm``, ``stuck``, ``hide_last``, ``delay_ms``, or the mode of ``gpu0`` to ``gpu7``."""
        with self._state.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            state = dict(line.split() for line in file)
            state.update({key: str(value) for key, value in values.items()})
            file.truncate(0)
            file.writelines(f"{key} {value}\n" for key, value in state.items())

    def values(self) -> dict[str, str]:
        with self._state.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return dict(line.split() for line in file)

    def modes(self) -> set[str]:
        """The modes of the eight GPUs, as a set."""
        values = self.values()
        return {values[f"gpu{gpu}"] for gpu in range(GPUS)}

    def log(self) -> list[SetCall]:
        """Every set call on this node, oldest first."""
        if not self._log.exists():
            return []
        calls = []
        for line in self._log.read_text().splitlines():
            time_s, pid, job, gpu, before, asked, answer = line.split()
            calls.append(SetCall(float(time_s), int(pid), job, int(gpu), before, asked, int(answer)))
        return calls
