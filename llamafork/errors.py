"""Every failure a user can meet: what happened, why, what to do next, and its exit code.

The table in docs/exit-codes.md is generated from :class:`Exit`; tests compare the two.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes. ``serve``, ``cli`` and ``bench`` return the child's own code once it has run."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    PATCH = 4
    BUILD = 5
    MODEL = 6
    NO_FIT = 7
    REGRESSION = 8
    UNHEALTHY = 9
    SOURCE = 10
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "an expected failure, explained in the message",
    Exit.USAGE: "the command line is wrong",
    Exit.ENVIRONMENT: "this machine lacks something: a tool, disk space, permission",
    Exit.PATCH: "the patch series does not apply, is damaged, or the work tree is not as expected",
    Exit.BUILD: "configuring or compiling failed, or the result lacks a requested backend",
    Exit.MODEL: "a model file is missing, damaged or of a kind this build cannot read",
    Exit.NO_FIT: "the model does not fit the memory given",
    Exit.REGRESSION: "a comparison found the fork slower than or different from stock",
    Exit.UNHEALTHY: "a built program failed, or the server did not become ready",
    Exit.SOURCE: "the upstream source could not be fetched or is not the pinned one",
    Exit.INTERRUPTED: "stopped by Ctrl-C (SIGINT)",
    Exit.TERMINATED: "stopped by SIGTERM",
}


class LlamaforkError(Exception):
    """One line what, one line why, one line what to do."""

    code: Exit = Exit.FAILED

    def __init__(self, what: str, *, why: str = "", do: str = "", code: Exit | None = None) -> None:
        super().__init__(what)
        self.what, self.why, self.do = what, why, do
        if code is not None:
            self.code = code

    def as_dict(self) -> dict[str, object]:
        return {"error": self.what, "why": self.why, "do": self.do, "exit": int(self.code)}


class UsageError(LlamaforkError):
    code = Exit.USAGE


class EnvironmentFault(LlamaforkError):
    code = Exit.ENVIRONMENT


class SourceError(LlamaforkError):
    code = Exit.SOURCE


class PatchError(LlamaforkError):
    code = Exit.PATCH


class BuildError(LlamaforkError):
    code = Exit.BUILD


class ModelError(LlamaforkError):
    code = Exit.MODEL


class UnhealthyError(LlamaforkError):
    code = Exit.UNHEALTHY


class Interrupted(LlamaforkError):
    code = Exit.INTERRUPTED


class Terminated(SystemExit):
    """SIGTERM, as KeyboardInterrupt is Ctrl-C: no failure, and caught only to say what it stopped."""


def disk_full(where: object, error: OSError) -> EnvironmentFault:
    """A full disk, said the same way wherever it strikes."""
    return EnvironmentFault(
        f"no space left while writing {where}",
        why=str(error),
        do="free some space, or put the data elsewhere with LLAMAFORK_HOME=/path; then run the same command again",
    )
