"""What vllm_server.py and its plugin for vLLM's processes, thoughts.py, call things."""

THOUGHTS = "regraft"  # vLLM's name for our reasoning parser
# In chat_template_kwargs: the fields of a core.reasoning.Format, and whether the request's grammar has the thought.
THOUGHTS_FORMAT, THOUGHTS_IN_GRAMMAR = "regraft_format", "regraft_thought_in_grammar"
