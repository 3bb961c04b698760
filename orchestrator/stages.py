"""The stages of a request."""

from dataclasses import dataclass

from orchestrator.admission.admission import Admission
from orchestrator.admission.rate_limits import Limiter
from orchestrator.admission.reader import PromptReader
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.instances.registry import Registry
from orchestrator.instances.served_models import ServedModels
from orchestrator.loading.demand import ModelDemand
from orchestrator.loading.swaps import Swaps
from orchestrator.prediction.prediction import Prediction
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.sharing import Sharing
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task, TaskStore


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a request, in order."""

    limits: Limiter
    registry: Registry
    models: ServedModels
    reader: PromptReader
    prediction: Prediction
    admission: Admission
    queue: TaskQueue[Task]
    dispatcher: Dispatcher
    settler: Settler
    store: TaskStore
    swaps: Swaps
    demand: ModelDemand
    sharing: Sharing
    """The state shared with other orchestrators."""
    durable: DurableTasks | None = None
    """The journal; None if tasks cannot be durable."""
