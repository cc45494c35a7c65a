"""The error of a comparison that cannot be made."""

from autopart.runtime.errors import AutopartError


class VerifyError(AutopartError):
    """The two programs cannot be compared."""
