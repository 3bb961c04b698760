"""What can be wrong with a checkpoint.

::

    CheckpointError (ValueError)
    ├── UnsupportedModel   a sound checkpoint of something that we do not run
    └── BrokenCheckpoint   files missing, corrupt, or not fitting each other
"""


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message names the file or setting, and what to do."""


class UnsupportedModel(CheckpointError):
    """The checkpoint asks for something that this worker does not have."""


class BrokenCheckpoint(CheckpointError):
    """A file is missing or corrupt, or configuration and weights do not fit."""
