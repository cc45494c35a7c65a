"""Failures of capture in the user's terms: which module, which source line, what to do."""

from __future__ import annotations

import re
import traceback

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from autopart.capture_place import Where, own_frame
from autopart.runtime.errors import CaptureError

# How export fails where a bound of the batch's size is no whole number, as that of `(batch - 4) * 5 >= 2`.
_FRACTION = "Expected op to be '==', got"
# Where torch.func's transformations run; export itself uses others of torch's files of that name.
_TRANSFORMS = ("/_functorch/apis.py", "/_functorch/vmap.py")
# What is said of the tensors that they leave behind; the latter by PyTorch 2.11, without a line.
_TRANSFORMED = ("functorch tensor", "Expected FakeTensor, got <class 'torch.Tensor'>")


def fixes_batch(error: Exception) -> bool:
    text = str(error)
    return any(sign in text for sign in ("Constraints violated", "specialized", _FRACTION))


def depends_on_data(error: BaseException | None) -> bool:
    """Whether export failed because the model's code asks for a tensor's value."""
    return "data-dependent" in str(error).lower() or "GuardOnDataDependent" in type(error).__name__


def largest_batch(error: Exception) -> int:
    """The most samples for which the model's code runs as traced, where it asks for that many; 0: it asks for none.

    (Diffusers' upsampling makes large batches contiguous.) From what export says of the batch's dim.
    """
    if found := re.search(r"size\(\)\[\d+\] <= (\d+)", str(error)):
        return int(found[1])
    if found := re.search(r"for batch <(=?) (\d+)(?:/(\d+))?$", str(error).strip(), re.MULTILINE):
        number, parts = int(found[2]), int(found[3] or 1)
        return number // parts if found[1] else -(-number // parts) - 1
    return 0


def batch_reason(error: Exception) -> str:
    """Why the batch size cannot stay symbolic, from what export says."""
    text = str(error)
    constant = re.search(r"specialized it to be a constant \((\d+)\)", text)
    if constant:
        return f"the model's code holds for a batch of {constant[1]} samples only"
    guard = re.search(r"satisfy the generated guard (.+?)\.?(?:\n|Specializations unexpectedly)", text)
    if guard:
        return "the model's code asks that " + re.sub(r"L\['\w+'\](\[\d+\])*\.size\(\)\[\d+\]", "b", guard[1])
    if _FRACTION in text:
        return "the model's code asks that " + re.sub(r"\bbatch\b", "b", text.rpartition(" for ")[2].strip())
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def capture_error(error: Exception, where: Where) -> CaptureError:
    frames = traceback.extract_tb(error.__traceback__)
    own = own_frame(frames)
    place = f"{own.filename}:{own.lineno}: {own.line}" if own else "unknown source line"
    text = _first_line(error)
    suggestion = "the line cannot be traced with symbolic sizes; express it with tensor ops"
    recurrent = {frame.name for frame in frames if frame.filename.endswith("/rnn.py")}
    if recurrent & {"pack_padded_sequence", "pad_packed_sequence"} or (recurrent and "FakeTensor" in text):
        suggestion = (
            "how long a packed sequence's batches are depends on values; give the padded sequence to the module, and "
            "take each sample's last valid output by its length"
        )
    elif depends_on_data(error) and any(frame.filename.endswith("/batchnorm.py") for frame in frames):
        suggestion = "a batch norm with momentum=None divides by the number of batches so far; give it a momentum"
    elif depends_on_data(error) and "specialized integer" in text:
        suggestion = (
            "a whole number is read off a tensor, as by int(), item() or range(), and sizes or positions follow from "
            "it; index by the tensor itself (torch.where, index_copy, arange), or pass the number as an input"
        )
    elif depends_on_data(error):
        suggestion = (
            "the branch depends on tensor values; replace it with torch.where, or decide it from the configuration"
        )
    elif any(sign in text for sign in _TRANSFORMED) or any(frame.filename.endswith(_TRANSFORMS) for frame in frames):
        suggestion = (
            "no graph has the transformations of torch.func, such as grad, jacrev or vmap; write what they compute "
            "with plain tensor ops"
        )
    elif "fake tensor in the exported program constant" in str(error):
        suggestion = (
            "forward reads a tensor's .data (use .detach()), or calls autograd.grad (write the derivative with tensor "
            "ops): no graph has these"
        )
    elif isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        suggestion = (
            "the line calls an op that looks at values, or makes as many as these say, which no graph has; write it "
            "with ops that do not"
        )
    elif "satisfy the constraint" in str(error):
        suggestion = "no trace has the values that torch.distributions checks; leave validate_args out, or False"
    elif isinstance(error, torch._dynamo.exc.Unsupported):
        suggestion = "replace the construct, or move it out of forward"
    elif isinstance(error, TypeError | AttributeError | RuntimeError | ValueError | KeyError | IndexError):
        suggestion = "run the model once on these inputs; if that fails too, the inputs do not fit the model"
    return CaptureError(
        f"cannot capture module {where.path or '(root)'} at {place}\n  {type(error).__name__}: {text}\n  {suggestion}"
    )
