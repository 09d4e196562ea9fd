"""What OpenAI's client does not have a word for: follow a job live, and read its graded answers.

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=...)
job = client.fine_tuning.jobs.create(...)
regraft.show(client, job.id)                          # a live bar until the job ends
for answer in regraft.rollouts(client, job.id, step=0, split="valid"): ...
"""

from regraft.jobs import FINAL, events, metrics, rollouts, show

__all__ = ["FINAL", "events", "metrics", "rollouts", "show"]
