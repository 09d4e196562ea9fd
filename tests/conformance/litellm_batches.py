"""A batch that ends and one that is cancelled, by LiteLLM's functions. Writes what they answered, as JSON.

test_litellm.py runs it with the name of a model, in LiteLLM's own environment.
"""

import json
import sys
import time
from typing import Any

import litellm

FINAL = ("completed", "failed", "cancelled", "expired")
PROVIDER: Any = {"custom_llm_provider": "openai"}


def create(model: str, questions: int) -> tuple[Any, Any]:
    """Upload a file of requests and make a batch of it."""
    requests = (
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"q{number}"}],
                "max_tokens": 4,
            },
        }
        for number in range(questions)
    )
    content = "".join(json.dumps(request) + "\n" for request in requests).encode()
    file = litellm.create_file(file=("requests.jsonl", content), purpose="batch", **PROVIDER)
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        metadata={"team": "search"},
        **PROVIDER,
    )
    return file, batch


def ended(batch_id: str) -> Any:
    while (batch := litellm.retrieve_batch(batch_id=batch_id, **PROVIDER)).status not in FINAL:
        time.sleep(0.2)
    return batch


def main(model: str) -> dict[str, Any]:
    file, created = create(model, questions=3)
    done = ended(created.id)
    output = litellm.file_content(file_id=done.output_file_id, **PROVIDER)
    _, other = create(model, questions=400)
    cancelling = litellm.cancel_batch(batch_id=other.id, **PROVIDER)
    answers = {
        "file": file,
        "created": created,
        "ended": done,
        "cancelling": cancelling,
        "cancelled": ended(other.id),
    }
    return {name: answer.model_dump() for name, answer in answers.items()} | {
        "lines": [json.loads(line) for line in output.text.splitlines()],
        "listed": [batch.id for batch in litellm.list_batches(limit=2, **PROVIDER)],
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
