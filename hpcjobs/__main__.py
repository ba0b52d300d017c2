"""``python -m hpcjobs``: what there is."""

from __future__ import annotations

import importlib.util

COMMANDS = {
    "submit": "make a study and run it on a cluster or on this machine; resume it",
    "status": "watch a study from anywhere that sees its folder",
    "collect": "best parameters, table of trials and summary of a study",
    "cancel": "end a study's jobs; its trials are handed back",
    "final": "train the best and the default parameters, test both on the evaluation data",
    "report": "one HTML page with all that a study has found and done",
    "throughput": "measure which partition mode is the fastest for a training",
    "partition": "show or set the partition mode of this node's GPUs",
    "doctor": "look at this machine and its filesystem, say what is wrong and how to mend it",
    "clean": "remove what a finished study does not need any more",
    "objective": "import an objective and print the parameters that it declares",
}


def main() -> None:
    print("usage: python -m hpcjobs.COMMAND --help\n\nA study is a folder on the shared filesystem. Commands:\n")
    for name, text in COMMANDS.items():
        if importlib.util.find_spec(f"hpcjobs.{name}") is not None:
            print(f"  {name:<11} {text}")


if __name__ == "__main__":
    main()
