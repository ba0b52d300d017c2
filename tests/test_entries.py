"""What the entries of both packages have in common, though neither package may import the other."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["hpcjobs", "autospeed_model"]
# modules that only agents, or a site's prolog, start
INTERNAL = {"journal_server", "mode_hook", "node", "throughput_worker", "worker"}
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


def module(name: str, *arguments: str, cwd: Path, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """``python -m NAME``; ``bare``: with nothing installed."""
    command = [sys.executable, *(["-S", "-E"] if bare else []), "-m", name, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["hpcjobs.submit", "hpcjobs.worker", "autospeed_model.render"])
def test_an_entry_in_an_environment_without_its_packages_says_so_in_a_line(name: str) -> None:
    ended = module(name, "--help", cwd=ROOT, bare=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.startswith("error: No module named '")
    assert f"for {sys.executable}; activate the environment that has it" in ended.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with what each package has of errors, for an entry beside it, and a module of others that lacks one."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        for name in ("__init__.py", "errors.py"):
            shutil.copy(ROOT / package / name, tmp_path / package)
    (tmp_path / "lacking.py").write_text("import not_there\n")
    return tmp_path


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import lacking", "ModuleNotFoundError: No module named 'not_there'"),
        ("import hpcjobs.nothing", "ModuleNotFoundError: No module named 'hpcjobs.nothing'"),
        ("import autospeed_model.nothing", "ModuleNotFoundError: No module named 'autospeed_model.nothing'"),
        ("from json import nothing", "ImportError: cannot import name 'nothing' from 'json'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_any_other_error_of_an_import_has_its_traceback(package: str, line: str, error: str, broken: Path) -> None:
    entry = broken / package / "entry.py"
    entry.write_text("import not_there\n")
    assert module(f"{package}.entry", cwd=broken).stderr.startswith("error: No module named 'not_there' for ")
    entry.write_text(f"{line}\n")
    told = module(f"{package}.entry", cwd=broken).stderr
    assert told.startswith("Traceback") and f'{package}/entry.py", line 1' in told
    assert told.splitlines()[-1].startswith(error)


def test_a_program_of_others_keeps_its_own_excepthook(broken: Path) -> None:
    for package in PACKAGES:
        command = [sys.executable, "-c", f"import sys, {package}; print(sys.excepthook is sys.__excepthook__)"]
        assert subprocess.run(command, cwd=broken, capture_output=True, text=True).stdout == "True\n"


def entries_of(package: str) -> set[str]:
    """Modules that can be started with ``python -m``."""
    found = set()
    for path in (ROOT / package).glob("[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        if any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in ast.parse(text).body):
            found.add(path.stem)
    return found


def test_a_package_lists_its_commands() -> None:
    for package, hidden in (("hpcjobs", INTERNAL), ("autospeed_model", set())):
        told = module(package, cwd=ROOT).stdout
        assert {line.split()[0] for line in told.splitlines() if line.startswith("  ")} == entries_of(package) - hidden


@pytest.mark.parametrize("package", PACKAGES)
def test_a_command_after_a_blank_is_told_how_it_is_called(package: str) -> None:
    ended = module(package, "nothing", cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.endswith(f"call python -m {package} for a list\n")
    known = "status" if package == "hpcjobs" else "train"
    assert module(package, known, "--help", cwd=ROOT).stderr.endswith(f"call python -m {package}.{known} --help\n")
