"""``python -m autospeed_model``: what there is."""

from __future__ import annotations

import sys

from autospeed_model.errors import UserError, run_entry

COMMANDS = {
    "render": "draw driving scenes with their labels in OpenLane's layout",
    "prepare": "bring OpenLane, archives or folders, into arrays that training reads",
    "contact_sheet": "augmented training samples with their boxes, as one picture",
    "train": "one training; it evaluates after every epoch",
    "evaluate": "precision, recall and average precision of a network on a split",
    "tune_miopen": "search the fastest convolution kernels on an AMD GPU and keep them",
    "compare_optimisations": "what each optimisation of a training brings, in images a second",
}


def main() -> int:
    words = sys.argv[1:]
    if words and words[0] not in ("-h", "--help"):
        known = words[0] in COMMANDS
        remedy = f"python -m autospeed_model.{' '.join(words)}" if known else "python -m autospeed_model for a list"
        raise UserError(f"found {words[0]!r} after a blank; allowed: python -m autospeed_model.COMMAND; call {remedy}")
    print("usage: python -m autospeed_model.COMMAND --help\n\nA detector, its data and its training. Commands:\n")
    for name, text in COMMANDS.items():
        print(f"  {name:<21} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
