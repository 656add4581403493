"""Why a requirement is not met, or was not tried."""


class Unmet(Exception):
    """A requirement is not met; the message says so with numbers.

    compared: what came and what was expected, if the two were compared.
    """

    def __init__(self, message: str, compared: tuple | None = None):
        super().__init__(message)
        self.compared = compared


class Explained(Unmet):
    """Not met, and the message names the remedy: a hint would only distract."""


class Skipped(Exception):
    """This machine cannot run the exercise; the message says so, and what to do."""


class NotWritten(Exception):
    """The answer still raises a bare NotImplementedError."""

    def __init__(self, error):
        super().__init__()
        self.error = error


class Crashed(Exception):
    """The answer raised an exception of its own."""

    def __init__(self, error):
        super().__init__()
        self.error = error
