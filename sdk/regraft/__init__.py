"""Reinforcement fine-tuning with a regraft server.

    from regraft import Regraft

    client = Regraft()                                      # an openai.OpenAI, and more
    job = client.jobs.submit("job.toml")                    # uploads what is a local file
    job = client.jobs.wait(job.id, progress=True)           # a live bar, or plain lines in a pipe
    client.checkpoints.download(job.id, to="adapter")

Imports are lazy: `import regraft` takes a few milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regraft._rules.datasets import InvalidDataset, LineError
    from regraft.client import AsyncRegraft
    from regraft.config import NotConfigured
    from regraft.errors import (
        AliasNotFound,
        BudgetReached,
        CheckpointNotFound,
        DownloadCorrupt,
        FileNotFound,
        GraderNotFound,
        InsufficientPermissions,
        InvalidApiKey,
        InvalidGrader,
        InvalidJobState,
        JobFailed,
        JobNotFound,
        ModelNotFound,
        NotARegraftServer,
        NotSupportedByServer,
        QuotaExceeded,
        RateLimited,
    )
    from regraft.jobs import JobEvent, events, metrics, rollouts, show
    from regraft.progress import FINAL
    from regraft.requests import InvalidRequestFile
    from regraft.resources.graders import GraderTest
    from regraft.sync.client import Regraft
    from regraft.types import (
        Alias,
        AliasChange,
        Attribution,
        Estimate,
        FileProfile,
        GoldenCase,
        GraderCheck,
        GraderVersion,
        JobComparison,
        JobLedger,
        Preview,
        PreviewAnswer,
        PreviewProgress,
        PreviewReport,
        PromptHistory,
        Queue,
        Regrade,
        RegradedAnswer,
        Rollout,
        RolloutToken,
        RolloutTokens,
        StepMetrics,
        StoredGrader,
        UsageReport,
        Verdict,
        WhatIf,
        Worker,
    )

_HOME = {
    "regraft._rules.datasets": "InvalidDataset LineError",
    "regraft.client": "AsyncRegraft",
    "regraft.config": "NotConfigured",
    "regraft.errors": "AliasNotFound BudgetReached CheckpointNotFound DownloadCorrupt FileNotFound GraderNotFound "
    "InsufficientPermissions "
    "InvalidApiKey InvalidGrader InvalidJobState JobFailed JobNotFound ModelNotFound "
    "NotARegraftServer NotSupportedByServer QuotaExceeded RateLimited",
    "regraft.jobs": "JobEvent events metrics rollouts show",
    "regraft.progress": "FINAL",
    "regraft.requests": "InvalidRequestFile",
    "regraft.resources.graders": "GraderTest",
    "regraft.sync.client": "Regraft",
    "regraft.types": "Alias AliasChange Attribution Estimate FileProfile GoldenCase GraderCheck GraderVersion "
    "JobComparison JobLedger Preview PreviewAnswer PreviewProgress PreviewReport PromptHistory Queue Regrade "
    "RegradedAnswer Rollout RolloutToken RolloutTokens StepMetrics StoredGrader UsageReport Verdict "
    "WhatIf Worker",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("agents", "types"):  # modules of this package, as `openai.types` is
        return import_module(f"regraft.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'regraft' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)


__all__ = [
    "FINAL",
    "Alias",
    "AliasChange",
    "AliasNotFound",
    "AsyncRegraft",
    "Attribution",
    "BudgetReached",
    "CheckpointNotFound",
    "DownloadCorrupt",
    "Estimate",
    "FileNotFound",
    "FileProfile",
    "GoldenCase",
    "GraderCheck",
    "GraderNotFound",
    "GraderTest",
    "GraderVersion",
    "InsufficientPermissions",
    "InvalidApiKey",
    "InvalidDataset",
    "InvalidGrader",
    "InvalidJobState",
    "InvalidRequestFile",
    "JobComparison",
    "JobEvent",
    "JobFailed",
    "JobLedger",
    "JobNotFound",
    "LineError",
    "ModelNotFound",
    "NotARegraftServer",
    "NotConfigured",
    "NotSupportedByServer",
    "Preview",
    "PreviewAnswer",
    "PreviewProgress",
    "PreviewReport",
    "PromptHistory",
    "Queue",
    "QuotaExceeded",
    "RateLimited",
    "Regrade",
    "RegradedAnswer",
    "Regraft",
    "Rollout",
    "RolloutToken",
    "RolloutTokens",
    "StepMetrics",
    "StoredGrader",
    "UsageReport",
    "Verdict",
    "WhatIf",
    "Worker",
    "events",
    "metrics",
    "rollouts",
    "show",
]
