"""Tune and train models on Slurm clusters with partitioned GPUs: a study is a folder on the shared filesystem."""

import sys

if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module of ``python -m``: an entry, no user's program
    from hpcjobs.errors import tell_missing_module

    sys.excepthook = tell_missing_module
