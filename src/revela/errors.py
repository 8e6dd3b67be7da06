"""The one exception that a user is meant to read: one sentence saying what, where and what to do.
Exit code 2.
"""


class RevelaError(Exception):
    """Something the user can mend. The message is one sentence without a traceback."""
