"""A JobSet's reaction to a failed pod: the pod failure policy of its Job, then the failure policy of the JobSet."""

from __future__ import annotations

from typing import Any

__all__ = ["JobSetPolicies"]


class JobSetPolicies:
    """The policies of one JobSet, and the number of restarts so far.

    Args:
        spec: The `spec` of the JobSet.
    """

    def __init__(self, spec: Any) -> None:
        self._spec, self._restarts = spec, 0

    def job(self, name: str) -> Any:
        """The replicated job of this name."""
        (job,) = (job for job in self._spec["replicatedJobs"] if job["name"] == name)
        return job

    def action(self, name: str, code: int, *, disrupted: bool = False) -> str:
        """Return the action for a failed pod of this job, such as "RestartJobSet", "FailJobSet" or "ReplacePod".

        Args:
            name: The replicated job.
            code: Exit code of its container, as in Python: minus a signal.
            disrupted: Whether the pod was lost with its node, or evicted.
        """
        reason = self._reason(name, code, disrupted)
        if reason == "ReplacePod":
            return reason
        policy = self._spec["failurePolicy"]
        for rule in policy["rules"]:
            if name in rule["targetReplicatedJobs"] and reason in rule["onJobFailureReasons"]:
                action = str(rule["action"])
                break
        else:
            action = "RestartJobSet"
        if action in {"RestartJobSet", "RestartJob"}:
            self._restarts += 1
            if self._restarts > policy["maxRestarts"]:
                return "FailJobSet"
        return action

    def _reason(self, name: str, code: int, disrupted: bool) -> str:
        """Why the pod's Job fails: its pod failure policy, else its backoffLimit, which is 0.

        "ReplacePod" where the Job does not fail: its policy ignores the failure, and the Job makes another pod.
        """
        job = self.job(name)["template"]["spec"]
        assert job["backoffLimit"] == 0
        for rule in job["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule:
                matches = disrupted
            else:
                codes = rule["onExitCodes"]
                shown = 128 - code if code < 0 else code
                matches = (shown in codes["values"]) == (codes["operator"] == "In")
            if matches:
                reasons = {
                    "FailJob": "PodFailurePolicy",
                    "Count": "BackoffLimitExceeded",
                    "Ignore": "ReplacePod",
                }
                return reasons[rule["action"]]
        return "BackoffLimitExceeded"
