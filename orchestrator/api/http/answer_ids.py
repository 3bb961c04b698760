"""Ids of answers in each dialect, derived from their task's id, and back."""

from orchestrator.tasks.job import Api
from orchestrator.tasks.task import Task

ID_PREFIXES = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "msg_",
}


def answer_id(task: Task) -> str:
    """Id of the client's answer; a request with several choices has one for all of them."""
    return ID_PREFIXES.get(task.job.api, "") + task.leader_id


def task_id_of(name: str) -> str:
    """The task's own id, from itself or from its answer's id."""
    for prefix in ID_PREFIXES.values():
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
