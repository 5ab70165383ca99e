"""One tree for everything that can go wrong, shown here at its top.

    HybridschedError                exit  meaning for whoever reads it
    |- UserError                       2  the input is wrong; one message, never a traceback
    |  |- ConfigError                  2  run.yaml or an override (file, key, cure)
    |  |- DataError                    2  prompts, tokenizer, model folder, reward function
    |  `- RunFolderError               2  not empty, not writable, of another run
    |- OwnershipLost                   3  another controller owns the run folder
    |- FaultError                      4  something died, hung or failed while running; resume is possible
    |  |- DeadlineExceeded             4  a bounded wait ended: names what, where, since when
    |  |- WorkerDied                   4  a worker process ended (worker, node, signal)
    |  |- WeightSyncError              4  a sync failed after all its attempts
    |  |- QueueError                   4  a segment cannot be written or read
    |  |  |- NoSpace                   -  the disk is full: admission stops, nothing is lost
    |  |  `- SegmentDamaged            -  quarantined; its prompts are issued again
    |  `- RunStalled                   4  everything filtered or failing
    |- Interrupted                   130  orderly stop asked for by the user (Ctrl-C)
    |- RequeueRequested               75  time limit or preemption: checkpointed, start me again
    `- InternalError                  70  a rule of the house was broken (illegal transition): a bug

Exit codes: 0 done · 1 unexpected exception · the column above otherwise.
A message says what happened, where (file, key, line, rank, node) and what to do.
"""

from __future__ import annotations


class HybridschedError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UserError(HybridschedError):
    """The input is wrong: shown as one message, never as a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """run.yaml, an override or a policy file is wrong."""


class DataError(UserError):
    """Prompts, tokenizer, model folder or reward function cannot be used."""


class RunFolderError(UserError):
    """The run folder is not empty, not writable or belongs to another run."""


class OwnershipLost(HybridschedError):
    """Another controller owns the run folder; this one must stop at once."""

    exit_code = 3


class FaultError(HybridschedError):
    """Something failed while running. The run can be resumed."""

    exit_code = 4


class DeadlineExceeded(FaultError):
    """A bounded wait ended. The message names what, where, since when and what to do."""


class AgentSilent(DeadlineExceeded):
    """Node agents have not been heard of for too long: their nodes are suspected to be lost."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerDied(FaultError):
    """A worker process ended while somebody waited for it."""


class WeightSyncError(FaultError):
    """A weight sync failed after its configured attempts."""


class QueueError(FaultError):
    """A segment or log of the sample queue cannot be written or read."""


class NoSpace(QueueError):
    """The file system is full or a quota is reached. Keep the samples, stop admission, try later."""


class SegmentDamaged(QueueError):
    """A sealed segment is torn, truncated or fails its checksum."""


class RunStalled(FaultError):
    """Nothing trainable comes out: everything is filtered or fails."""


class Interrupted(HybridschedError):
    """The user asked for an orderly stop."""

    exit_code = 130


class RequeueRequested(HybridschedError):
    """Time limit or preemption: the run has checkpointed and wants to be started again."""

    exit_code = 75


class InternalError(HybridschedError):
    """A rule of the house was broken. This is a bug in hybridsched."""

    exit_code = 70
