import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "several_trainings.py"


def test_a_process_that_fails_is_told_instead_of_being_left_out_of_the_sum(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "none"), "--processes", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    row = json.loads(done.stdout)
    assert row["processes"] == 2 and "end_to_end" not in row
    assert "no such folder" in row["error"]
