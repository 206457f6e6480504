"""What is asked of validations: the function, its arguments, and how far to go with it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..options import check_seconds, longest_wait_s
from ..processes.functions import check_json, reference_of

__all__ = ["ValidationConfig", "ValidationTaskConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationTaskConfig:
    """One validation.

    Attributes:
        fn_kwargs: Arguments of the function by name, beside the checkpoint. Must be what JSON can
            hold. Those of a report replace those of the configuration one by one.
        timeout_s: Seconds that it may take; ``math.inf`` for as long as it likes. ``None`` in a
            report stands for what the configuration says, and there for as long as it likes.
    """

    fn_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.fn_kwargs is not None:
            if not isinstance(self.fn_kwargs, Mapping):
                raise UsageError(f"fn_kwargs={self.fn_kwargs!r} is no dictionary.")
            check_json(dict(self.fn_kwargs), "fn_kwargs")
        check_seconds("timeout_s", self.timeout_s, may_be_none=True)


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """How checkpoints are validated.

    Attributes:
        fn: Called as ``fn(checkpoint, **fn_kwargs)`` in a process of its own; returns a dictionary
            of metrics. A function at the top level of a module, or its name: ``"module:function"``.
        task_config: Arguments and timeout for reports that do not give their own.
        max_concurrent: How many validations run at the same time.
        max_retries: How often one is tried again whose process was killed or left without an
            answer. An exception is an answer.
        grace_s: Seconds between SIGTERM and SIGKILL for a process that has to end.
        sys_path: Where the module is looked for first; by default where this process looks.
    """

    fn: Callable[..., Mapping[str, Any]] | str
    task_config: ValidationTaskConfig = field(default_factory=ValidationTaskConfig)
    max_concurrent: int = 1
    max_retries: int = 2
    grace_s: float = 5.0
    sys_path: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fn, str):
            module, _, name = self.fn.partition(":")
            if not module or not name.isidentifier():
                raise UsageError(f"{self.fn!r} names no function.", hint='Write "module:function".')
        elif callable(self.fn):
            reference_of(self.fn)
            _check_takes(self.fn, self.task_config.fn_kwargs or {})
        else:
            raise UsageError(f"{self.fn!r} is no function.")
        for name, least in (("max_concurrent", 1), ("max_retries", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r} is no whole number of at least {least}.")
        check_seconds("grace_s", self.grace_s, is_zero_fine=True)
        object.__setattr__(self, "grace_s", longest_wait_s(self.grace_s))

    @property
    def reference(self) -> tuple[str, tuple[str, ...]]:
        """Return how another process imports the function: its name, and the search path."""
        if not isinstance(self.fn, str):
            name, path = reference_of(self.fn)
        else:
            name, path = self.fn, tuple(str(Path(part or ".").absolute()) for part in sys.path)
        return name, self.sys_path or path

    def to_json(self) -> dict[str, Any]:
        """Return it as what JSON can hold, for a process that goes on with it."""
        name, path = self.reference
        task = self.task_config
        return {
            "fn": name,
            "sys_path": list(path),
            "fn_kwargs": None if task.fn_kwargs is None else dict(task.fn_kwargs),
            "timeout_s": task.timeout_s,
            "max_concurrent": self.max_concurrent,
            "max_retries": self.max_retries,
            "grace_s": self.grace_s,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ValidationConfig:
        """Return what :meth:`to_json` was called on; the function is not imported."""
        return cls(
            fields["fn"],
            ValidationTaskConfig(fn_kwargs=fields["fn_kwargs"], timeout_s=fields["timeout_s"]),
            max_concurrent=fields["max_concurrent"],
            max_retries=fields["max_retries"],
            grace_s=fields["grace_s"],
            sys_path=tuple(fields["sys_path"]),
        )


def _check_takes(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind_partial(None, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{function!r} cannot be called with a checkpoint and fn_kwargs: {error}.",
            hint="Define it as validate(checkpoint, **fn_kwargs).",
        ) from error
