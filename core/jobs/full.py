"""Jobs that train all weights of a model (`train: "full"`): what the service's settings must not ask for."""

from core.database.tables import Job
from core.settings import Settings

MAX_PARAMETERS = 8.5e9  # models that are called 8B have up to 8.3 billion


def is_full(job: Job) -> bool:
    """Whether the job trains all weights."""
    advanced = job.body["hyperparameters"].get("advanced") or {}
    return bool(advanced.get("train") == "full")


def too_large(parameters: int) -> str:
    """Return why a model with this number of parameters is refused; "" if it is not."""
    if parameters <= MAX_PARAMETERS:
        return ""
    size = f"{parameters / 1e9:.1f}B"
    return f"train 'full' is for models of at most 8B parameters, and this one has {size}. Use train 'lora'."


def problem(name: str, settings: Settings) -> str:
    """Return why no job that samples answers can train all weights of the model under these settings; "" if it can.

    The trainer's own model and the job's own vLLM engines sample all weights: those of a fleet take adapters.
    """
    if name in settings.samplers:
        return (
            f"train 'full' is not supported for '{name}': the operator has samplers for it (REGRAFT_SAMPLERS), which "
            "take adapters only. Use train 'lora'."
        )
    return ""


def several_machines(settings: Settings) -> str:
    """Return why no job can train all weights of a model on the machines of these settings; "" if it can."""
    if settings.nodes == 1:
        return ""
    return (
        f"train 'full' is not supported for jobs of several machines, and these have {settings.nodes} (REGRAFT_NODES). "
        "Use train 'lora', or workers of one machine."
    )
