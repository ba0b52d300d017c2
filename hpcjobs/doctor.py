"""Entry: what a machine offers to studies: its Slurm, and what the filesystem of a study folder really does."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcjobs.doctor_quota import QuotaUnknownError, Room, quotas
from hpcjobs.errors import UserError, run_entry
from hpcjobs.filesystem import Probe, decide_lock, held_on_another_node, is_node_local, mount_of, probe
from hpcjobs.load import load_cluster
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.site import free_files, look
from hpcjobs.site_profile import Finding, findings, profile_text

EXAMPLES = """examples:
  python -m hpcjobs.doctor --profile my_site.yaml    (on a login node: looks at Slurm, writes a first profile)
  python -m hpcjobs.doctor /scratch/project/studies
  srun -N1 -n1 --overlap python -m hpcjobs.doctor /scratch/project/studies   (in a job of two nodes: tries both)
"""


_VERDICTS = {"right": "green", "doubtful": "yellow", "wrong": "bold red"}


def other_node() -> str | None:
    """Another node of the job that this runs in, if it has one."""
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) < 2:
        return None
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], check=True, capture_output=True, text=True
    ).stdout.split()
    here = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    return next((node for node in listed if node != here), None)


def show(found: Probe, between_nodes: bool | None, console: Console) -> None:
    table = Table("what", "found", title=f"{found.folder} ({found.filesystem})")
    yes = {True: "yes", False: "NO", None: "not tried (run it in a job of two nodes)"}
    table.add_row("flock between processes of this node", yes[found.flock])
    table.add_row("flock between two nodes", yes[between_nodes])
    table.add_row("fcntl locks", yes[found.fcntl])
    table.add_row("hard links", yes[found.hard_links])
    table.add_row("exclusive creation", yes[found.exclusive_create])
    table.add_row("rename over an open file", yes[found.rename_over_open_file])
    table.add_row("appends of two processes stay whole", yes[found.append])
    table.add_row("one sync", f"{found.sync_ms:.2f} ms")
    table.add_row("one metadata call", f"{found.metadata_ms:.3f} ms")
    table.add_row("free", f"{found.free_gb:.1f} GB")
    console.print(table)


def examine(profile: Path, name: str, folder: Path, *, as_json: bool) -> int:
    """Look at the site, write its profile, and show what is right, doubtful and wrong there; 1 if anything is wrong.

    Where Slurm says nothing there is no profile to write: an empty one would only stand in the way of the next try.

    Raises:
        UserError: there is such a file already.
    """
    if profile.exists():
        raise UserError(f"{profile}: exists already; name a new file, or move this one away")
    site = look()
    cluster = None
    if site.partitions:
        write_atomically(profile, profile_text(site, name))
        cluster = load_cluster(str(profile))
    space = os.statvfs(folder)
    rooms = [Room("of the filesystem", space.f_bavail * space.f_frsize / 1e9, free_files(folder))]
    try:
        rooms += quotas(folder)
    except QuotaUnknownError as error:
        site.problems.append(str(error))
    tried = probe(folder)
    alone = is_node_local(mount_of(folder))
    rows = findings(site, rooms, (tried.lock, tried.reason), one_node_alone=alone)
    code = 1 if any(row.verdict == "wrong" for row in rows) else 0
    if as_json:
        known = cluster.model_dump(mode="json") if cluster else None
        print(json.dumps({"profile": known, "findings": [asdict(row) for row in rows]}))
        return code
    Console(highlight=False).print(findings_table(rows))
    if cluster is None:
        print(f"\nprofile: {profile} was not written, since Slurm names no partition here")
    else:
        print(
            f"\nprofile: {profile} (look at its lines with a ?), then:\n"
            f"python -m hpcjobs.submit --cluster {shlex.quote(str(profile))} --study ... --dry-run"
        )
    return code


def findings_table(rows: Iterable[Finding]) -> Table:
    """A remedy stands below what it is for: beside it, neither has the room of a line in 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(row.what, style="bold"), Text(row.verdict, style=_VERDICTS[row.verdict]), Text(row.found))
        if row.remedy:
            table.add_row("", "", Text(f"-> {row.remedy}"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.doctor",
        description="Try what the filesystem of a study folder really does, and say which lock a\nstudy there takes. "
        "With --profile also look at Slurm, devices and software, and\nwrite a first profile of the site.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="a study's folder, or where studies will be (default: here)",
    )
    parser.add_argument("--profile", type=Path, metavar="YAML", help="write a first profile of this site to a new file")
    parser.add_argument("--name", help="the site's name in the profile (default: that of the file)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give an existing folder on the filesystem to be tried")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: not writable by you; give a folder in which studies can be made")

    if arguments.name is not None and arguments.profile is None:
        raise UserError("--name: found it without --profile; allowed: the name in a new profile; add --profile YAML")
    if arguments.profile is not None:
        return examine(arguments.profile, arguments.name or arguments.profile.stem, folder, as_json=arguments.json)
    found = probe(folder)
    node = other_node() if found.flock else None
    between_nodes = held_on_another_node(folder / ".doctor-lock", node) if node else None
    kind, reason = found.lock, found.reason
    if between_nodes is not None:
        kind = "kernel" if between_nodes else "soft"
        reason = f"flock was tried between two nodes of job {os.environ.get('SLURM_JOB_ID')}"
    if StudyPaths(folder).config.exists():
        decide_lock(StudyPaths(folder).journal, kind, reason)
    if arguments.json:
        print(json.dumps({**found.as_dict(), "flock_between_nodes": between_nodes, "lock": kind, "reason": reason}))
    else:
        show(found, between_nodes, Console())
        print(f"lock of a study here: {kind} ({reason})")
    return 0 if found.append and found.rename_over_open_file and (found.flock or found.exclusive_create) else 1


if __name__ == "__main__":
    sys.exit(run_entry(main))
