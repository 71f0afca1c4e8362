"""The errors Octavo raises on purpose; each message is one sentence for a person. Knows nothing else of Octavo."""


class OctavoError(Exception):
    """Whatever a caller may want to catch and show; the CLI prints its text and never a traceback."""


class ModelError(OctavoError):
    """A model cannot be found, read or run: the message names the file, the tensor or key, and what is supported."""


class ConfigError(OctavoError, ValueError):
    """An engine setting cannot be: the message names it, its value and what would work."""


class RequestError(OctavoError, ValueError):
    """A request cannot be served as asked: bad parameters, or a prompt that can never fit."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the one at fault, where it is one
