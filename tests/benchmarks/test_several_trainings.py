import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import several_trainings

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "several_trainings.py"


def test_a_process_that_fails_is_told_instead_of_being_left_out_of_the_sum(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "none"), "--processes", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    row = json.loads(done.stdout)
    assert row["processes"] == 2 and "end_to_end" not in row
    assert "no such folder" in row["error"]


def test_the_others_do_not_wait_for_one_that_failed_and_its_word_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "training.py"
    stand_in.write_text(
        "import sys, time\n"
        "if sys.argv[sys.argv.index('--json') + 1].endswith('1.json'): sys.exit('out of memory')\n"
        "time.sleep(100_000)\n"
    )
    monkeypatch.setattr(several_trainings, "BENCHMARK", stand_in)
    assert several_trainings.run(2, [], {}, 100_000) == {"processes": 2, "error": "out of memory\n"}


def test_a_round_that_takes_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "training.py"
    stand_in.write_text("import time; time.sleep(100_000)\n")
    monkeypatch.setattr(several_trainings, "BENCHMARK", stand_in)
    assert several_trainings.run(1, [], {}, 0.1) == {"processes": 1, "error": "timed out after 0.1 s"}


@pytest.mark.parametrize("text", ["0", "2,x", ","])
def test_numbers_of_processes_that_are_none_are_told(text: str) -> None:
    command = [sys.executable, str(SCRIPT), "--data", "x", "--processes", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"error: --processes is '{text}'; allowed are positive")
