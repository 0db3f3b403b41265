"""What can be wrong between a chat template and a conversation."""


class TemplateError(ValueError):
    """The chat template failed on a conversation."""


class EndlessError(TemplateError):
    """The chat template does not end, or writes without end."""


class ContextError(ValueError):
    """The chat template writes messages in another way when more follows."""
