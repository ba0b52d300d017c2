"""AutoSpeed: a detector of the closest in-path object, its data and its training."""

import sys

if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module of ``python -m``: an entry, no user's program
    from autospeed_model.errors import tell_missing_module

    sys.excepthook = tell_missing_module
