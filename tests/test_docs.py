"""What the pages under docs/ tell people to write works as it stands there."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcjobs.config import StudyConfig
from hpcjobs.load import load_study
from hpcjobs.sampling import make_pruner, make_sampler

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# every page of commands is listed here: those of one row run in one folder, one after the other
LOCAL_PAGES = ("first-study.md", "results.md")
CLUSTER_PAGES = ("my-cluster.md", "objective.md", "administrator.md")
IMAGE = ROOT / "configs" / "containers" / "rocm.def"
PAGES = (*DOCS.glob("*.md"), IMAGE, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md"))


def commands_of(page: Path) -> list[str]:
    """The lines of all blocks marked ``sh``. Blocks without a mark need a network, another site or hours."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def run(command: str, folder: Path, **environment: str) -> None:
    """As a person would: in a shell, ``python`` being this one, beside the project's configs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    yield tmp_path


def test_every_page_with_commands_is_run() -> None:
    pages = {path.name for path in DOCS.glob("*.md") if commands_of(path)}
    assert pages == {*LOCAL_PAGES, *CLUSTER_PAGES}


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def anchors_of(page: Path) -> set[str]:
    """What links into a page can name: its headings, as they are turned into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_into_a_page_names_a_heading_of_it() -> None:
    followed = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            followed += 1
            assert anchor in anchors_of(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"
    assert followed > 3


def test_the_image_has_all_packages_and_only_what_is_there() -> None:
    (block,) = re.findall(r"^%files\n((?: .*\n)+)", IMAGE.read_text(encoding="utf-8"), re.MULTILINE)
    copied = [line.split() for line in block.splitlines()]
    assert all((ROOT / source).exists() and target == f"/opt/src/{source}" for source, target in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert {"setup.cfg", "pyproject.toml", *packages} <= {source for source, _ in copied}


def told_options() -> dict[str, set[str]]:
    """All programs that the pages call, also in passing, with the options that they give them."""
    told: dict[str, set[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for program, rest in re.findall(r"python3? (?:-m )?([\w./]+)([^`\n#;|&)]*)", text):
            if program.split(".")[0].split("/")[0] in ("hpcjobs", "autospeed_model", "hip_kernels", "benchmarks"):
                told.setdefault(program, set()).update(re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest))
    return told


def test_what_pages_call_in_passing_exists_with_its_options() -> None:
    told = told_options()
    named = {"hpcjobs.throughput", "benchmarks/journal.py", "autospeed_model.prepare", "hip_kernels.build"}
    assert named <= told.keys()
    wrong = []
    for program, options in told.items():
        path = ROOT / program if "/" in program else ROOT / f"{program.replace('.', '/')}.py"
        if not path.exists() and not path.with_suffix("").joinpath("__main__.py").exists():
            wrong.append(program)
        elif options:
            command = [str(path)] if "/" in program else ["-m", program]
            done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True)
            known = set(re.findall(r"--[a-z-]+", done.stdout))
            wrong += [f"{program} {option}" for option in options - known]
    assert wrong == []


def test_the_study_files_of_the_readme_can_be_read_and_the_full_one_has_every_key(tmp_path: Path) -> None:
    short, full = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    for text in (short, full):
        (tmp_path / "study.yaml").write_text(text)
        study, _ = load_study(tmp_path / "study.yaml")
    assert set(re.findall(r"^(\w+):", full, re.MULTILINE)) == set(StudyConfig.model_fields)
    assert make_sampler(study, 0) and make_pruner(study)
    for name, default in re.findall(r"^(\w+):.*default: (\w+)", full, re.MULTILINE):
        known = StudyConfig.model_fields[name].default
        if name not in ("objective", "seed", "halve_on_gpu_memory"):
            assert str(getattr(known, "name", known)) == default


def test_headings_of_the_troubleshooting_page_are_what_the_program_says() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hpcjobs").glob("*.py"))
    headings = re.findall(r"^## (.+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading for heading in headings if heading not in source and heading not in ("Slow", "Exit codes")] == []


def test_the_first_study_and_its_results_go_as_the_pages_say(project: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    for page in LOCAL_PAGES:
        for command in commands_of(DOCS / page):
            run(command, project)
    results = project / "first" / "study" / "results"
    names = {path.name for path in results.iterdir()}
    assert {"best_params.yaml", "trials.csv", "summary.json", "report.html", "final.json"} <= names


def write_example(folder: Path, *, with_gpu: bool = True) -> None:
    """The two files of the page on one's own objective. Emulated GPUs cannot compute."""
    page = (DOCS / "objective.md").read_text(encoding="utf-8")
    for language, name in (("python", "my_training.py"), ("yaml", "my_study.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / name).write_text(block if with_gpu else block.replace("context.device", "'cpu'"), encoding="utf-8")


def test_the_example_of_an_own_objective_runs_and_its_trials_learn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_example(tmp_path)
    command = next(line for line in commands_of(DOCS / "objective.md") if "--workers" in line)
    run(f"{command} --folder study", tmp_path)
    trials = list(csv.DictReader((tmp_path / "study/results/trials.csv").open(encoding="utf-8")))
    assert [trial["state"] for trial in trials] == ["complete"] * 8
    rows = csv.DictReader((tmp_path / "study/results/curves.csv").open(encoding="utf-8"))
    curve = [row for row in rows if row["trial"] == "0"]
    assert float(curve[-1]["value"]) < float(curve[0]["value"])
