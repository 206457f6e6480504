"""The command line: one file a verb in ``commands/``. See ``milepost --help``."""
