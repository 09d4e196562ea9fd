"""Names that vLLM's processes, our plugin for them and their clients share."""

PLUGIN = "regraft"  # in VLLM_PLUGINS
THOUGHTS = "regraft"  # vLLM's name for our reasoning parser
# In chat_template_kwargs: the fields of a core.reasoning.Format, and whether the request's grammar has the thought.
THOUGHTS_FORMAT, THOUGHTS_IN_GRAMMAR = "regraft_format", "regraft_thought_in_grammar"
NOTHING = "regraft-no-adapter"  # an engine's name for an adapter that adds 0
