"""What can be wrong with chat templates, for who need not import Jinja to say it."""

MESSAGE_CHARS = 256
"""Characters that a message counts more than its own, where a rendered text is bounded."""


class BadTemplate(ValueError):
    """A chat template that cannot be read; the message says why."""


class Refused(ValueError):
    """Messages that a chat template cannot or will not render; the message says why."""
