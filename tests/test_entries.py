"""How the entries of both packages end whose output cannot be written: neither package may import the other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PACKAGES = ["hpcjobs", "autospeed_model"]
MAINS = {
    "little": "print('a line')",
    "much": "print('a line\\n' * 100_000)",
    "rich": "import rich.console; rich.console.Console().print('a line')",
    "help": "import argparse; argparse.ArgumentParser().parse_args(['--help'])",
}


def end_of(package: str, main: str, stdout: int) -> subprocess.CompletedProcess[str]:
    """Of an entry with this ``main``, buffered as usual."""
    program = f"import sys\nfrom {package}.errors import UserError, run_entry\ndef main():\n    {main}\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", f"{program}sys.exit(run_entry(main))"],
        stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=300,
    )  # fmt: skip


@pytest.fixture
def closed_pipe() -> int:
    """The end to write into of a pipe that nobody reads from."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("main", MAINS)
def test_output_that_nobody_reads_any_more_is_no_error(package: str, main: str, closed_pipe: int) -> None:
    ended = end_of(package, MAINS[main], closed_pipe)
    os.close(closed_pipe)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_mistake_is_told_though_nobody_reads_the_output(package: str, closed_pipe: int) -> None:
    ended = end_of(package, "print('a line'); raise UserError('a mistake')", closed_pipe)
    os.close(closed_pipe)
    assert (ended.returncode, ended.stderr) == (2, "error: a mistake\n")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("main", "what"), [("little", "standard output"), ("much", "a file")])
def test_output_to_a_full_disk_is_told(package: str, main: str, what: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = end_of(package, MAINS[main], full.fileno())
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {what}: No space left on device") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_an_entry_without_standard_output_ends_well(package: str) -> None:
    program = f"import sys\nfrom {package}.errors import run_entry\nsys.exit(run_entry(lambda: print('a line')))"
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
