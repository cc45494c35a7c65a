"""Errors that a user can act on.

Every error says what is wrong, where (module path, source line, stage or rank) and what to do next. They derive from
ValueError, so code that guards against bad input keeps working; an internal contradiction is an AssertionError.
"""


class AutopartError(ValueError):
    """Base of every error that autopart raises on purpose."""


class CaptureError(AutopartError):
    """The model could not be turned into a graph; names the module path and the source line."""


class BatchError(AutopartError):
    """The batch cannot be split: the model mixes samples, or a size does not divide."""


class ClusterError(AutopartError):
    """The description of the cluster cannot be read, or does not match the running job."""


class PlanError(AutopartError):
    """A plan cannot be read, does not belong to this model, or cannot be realised."""


class NotHereError(PlanError, AttributeError):
    """A part or method of the original model that its parallel program does not give; so ``hasattr`` says no."""


class UndividedBatchError(PlanError):
    """Equal replicas and microbatches, of the numbers asked for, do not divide the batch."""


class InfeasibleError(PlanError):
    """No plan fits; names what binds, by how many bytes, and the smallest change that would fit.

    excess_bytes: by how much the fullest device is over its memory; None when something else binds.
    """

    def __init__(self, message: str, excess_bytes: float | None = None) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes


class InputError(AutopartError):
    """What was passed to a parallel model does not match what was captured."""


class ScheduleError(AutopartError):
    """A schedule's action list cannot be read or would deadlock."""


class CheckpointError(AutopartError):
    """A checkpoint cannot be written or read, is damaged, or does not belong to this model; names what differs."""
