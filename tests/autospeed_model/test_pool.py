import os
import signal
import subprocess
import sys
import time

import pytest

from autospeed_model.pool import spread


def double(number: int) -> int:
    return 2 * number


def fail(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_gives_its_result(jobs):
    with spread(jobs) as each:
        assert sorted(each(double, range(40))) == list(range(0, 80, 2))
        assert list(each(double, [])) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_exception_of_a_task_is_raised(jobs):
    with pytest.raises(ValueError, match="three"), spread(jobs) as each:
        list(each(fail, range(100)))


PROGRAM = """
import os, time
from autospeed_model.pool import spread
if __name__ == "__main__":
    with spread(2) as each:
        print(*each(os.getpgid, [0, 0]), flush=True)
        time.sleep(60)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    group = int(process.stdout.readline().split()[0])
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 240
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)
