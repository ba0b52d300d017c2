"""``python -m hpcjobs``: what there is."""

from __future__ import annotations

import importlib.util
import sys

from hpcjobs.errors import UserError, run_entry

COMMANDS = {
    "submit": "make a study and run it on a cluster or this machine; resume it",
    "status": "watch a study from anywhere that sees its folder",
    "collect": "best parameters, table of trials and summary of a study",
    "cancel": "end a study's jobs; its trials are handed back",
    "final": "train the best and the default parameters, test both once",
    "report": "one HTML page with all that a study has found and done",
    "throughput": "measure which mode and how many workers train fastest",
    "partition": "show or set the partition mode of this node's GPUs",
    "doctor": "look at a site and its filesystem, write a first profile of it",
    "compact": "make a study's journal short, also while it runs",
    "clean": "remove what a finished study does not need any more",
    "objective": "import an objective and print the parameters that it declares",
}


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] not in ("-h", "--help"):
        remedy = f"python -m hpcjobs.{' '.join(words)}" if words[0] in COMMANDS else "python -m hpcjobs for a list"
        raise UserError(f"found {words[0]!r} after a blank; allowed: python -m hpcjobs.COMMAND; call {remedy}")
    print("usage: python -m hpcjobs.COMMAND --help\n\nA study is a folder on the shared filesystem. Commands:\n")
    for name, text in COMMANDS.items():
        if importlib.util.find_spec(f"hpcjobs.{name}") is not None:
            print(f"  {name:<11} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
