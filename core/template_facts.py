"""Facts of a chat template, found by rendering conversations. No torch and no transformers: the API shows them.

A template is a program, and a mistake in it raises no error: a prompt without the header of the answer, or a token
after answers that no engine stops at, only makes answers worse.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from core.chat_templates import reads_clock
from core.reasoning import QUESTION, Format

_SYSTEM, _ANSWER, _SECOND = "System7Q", "Answer7Q", "Second7Q"
_SECOND_ANSWER, _THIRD = "Reply7Q", "Third7Q"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tool7q",
        "description": "Tool7Q",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_USER = {"role": "user", "content": QUESTION}
_SYSTEM_MESSAGE = {"role": "system", "content": _SYSTEM}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_NEXT = {"role": "user", "content": _SECOND}
_THREE_TURNS = [
    _USER,
    _ASSISTANT,
    _NEXT,
    {"role": "assistant", "content": _SECOND_ANSWER},
    {"role": "user", "content": _THIRD},
]

# (messages, tools, with a generation prompt) -> the text of the conversation
RenderChat = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]


class TemplateFacts(BaseModel):
    """The behavior of a chat template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # The special token after an answer, at which every engine stops; null: none follows it.
    end_of_turn: str | None
    # Whether that token is none of the model's own end tokens, so that only the template shows it.
    end_of_turn_added: bool
    generation_prompt: bool  # false: prompts lack the header of the answer
    question: bool  # false: the user's message is not in the prompt
    # false: the text after the question lacks in prompts what it has in conversations, where an answer follows.
    question_end: bool
    header: bool  # false: the generation prompt is another text than conversations have before an answer
    answer: bool  # false: the text of an earlier answer is not in the prompt
    history: bool  # false: the prompt after three questions lacks earlier turns
    system_role: Literal["rendered", "ignored", "rejected"]
    alternation: bool  # two messages of one role in a row are rejected
    tools: bool
    thoughts: bool
    date: bool  # prompts have the time at which they are rendered; a job fixes it

    @property
    def warnings(self) -> list[str]:
        """Sentences about what makes answers worse without an error."""
        found = []
        lost = [
            *([] if self.question else ["the user's message is not in the prompt"]),
            *([] if self.answer else ["answers are not in the conversation"]),
        ]
        if lost:
            found.append(
                f"The model's chat template loses text: {' and '.join(lost)}. Set chat_template in the model's "
                "entry of the registry to a template that renders messages whose content is a string."
            )
        if not self.generation_prompt:
            found.append(
                "The model's chat template writes nothing before an answer (it ignores add_generation_prompt), so "
                "prompts lack the header of the answer. Set chat_template in the model's entry of the "
                "registry to a template that writes it."
            )
        if not self.question_end:
            found.append(
                "The model's chat template ends the user's message only if an answer follows it, so training rows have "
                "that end and prompts lack it. Set chat_template in the model's entry of the registry to a template "
                "that writes it after every message."
            )
        if not self.header:
            found.append(
                "The model's chat template ends prompts with another text than it writes before the answers of "
                "training rows. Set chat_template in the model's entry of the registry to a template that writes the "
                "same header in both."
            )
        if not self.history:
            found.append(
                "The model's chat template leaves out earlier turns of a conversation: the model sees only the last "
                "ones. Set chat_template in the model's entry of the registry to a template that writes all messages."
            )
        if self.system_role == "ignored":
            found.append("The model's chat template leaves out system messages: the model does not see them.")
        return found

    @property
    def notes(self) -> list[str]:
        """Sentences about what the service does because of the template."""
        found = []
        if self.answer and self.end_of_turn is None:  # as in the templates of GLM, where it is no fault
            found.append(
                "The model's chat template writes no special token after an answer, so only the model's own end "
                "tokens end one, and rows of training files end with the tokenizer's EOS."
            )
        if self.end_of_turn_added:
            found.append(
                f"Answers also end at '{self.end_of_turn}', which follows them in the chat template: it is none of the "
                "model's own end tokens (eos_token, generation_config.json)."
            )
        return found

    def __str__(self) -> str:
        end = f"answers end with '{self.end_of_turn}'" if self.end_of_turn else "no token after answers"
        return ", ".join(
            [
                end + (" (not an EOS of the model)" if self.end_of_turn_added else ""),
                "a generation prompt" if self.generation_prompt else "NO generation prompt",
                f"system messages {self.system_role}",
                *(["strict alternation of roles"] if self.alternation else []),
                "tools" if self.tools else "no tools",
                "thoughts" if self.thoughts else "no thoughts",
                *(["the date"] if self.date else []),
            ]
        )


def find_facts(
    render: RenderChat,
    template: str,
    *,
    special: Collection[str],
    stops: Collection[str],
    form: Format | None,
) -> TemplateFacts:
    """Render conversations and compare them.

    Args:
        template: the text of the template, whose clock does not run.
        special: the texts of the tokenizer's special tokens.
        stops: those of the model's own end tokens.
        form: of the model's thoughts.
    """

    def rendered(
        *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> str | None:
        try:
            return render([*first, *messages], tools, prompt)
        except Exception:  # a template is a program
            return None

    first: list[dict[str, Any]] = []
    system = rendered(_SYSTEM_MESSAGE, _USER, prompt=True)
    if system is not None and rendered(_USER, prompt=True) is None:
        first = [_SYSTEM_MESSAGE]  # some templates require it
    prompt, plain, conversation = rendered(_USER, prompt=True), rendered(_USER), rendered(_USER, _ASSISTANT)
    has_answer = conversation is None or _ANSWER in conversation
    has_question = prompt is None or QUESTION in prompt
    third = rendered(*_THREE_TURNS, prompt=True) if has_answer and has_question else None
    end = _end_of_turn(rendered, special, stops, form) if has_answer else None
    return TemplateFacts(
        end_of_turn=end,
        end_of_turn_added=end is not None and end not in stops,
        # A template that rejects the question alone says nothing of it.
        generation_prompt=prompt is None or prompt != plain or _has_header(prompt, conversation or "", form),
        question=has_question,
        question_end=prompt is None or conversation is None or _ends_question(prompt, conversation, form),
        header=prompt in (None, plain) or _is_header(prompt or "", conversation or "", form),
        answer=has_answer,
        history=third is None or all(message["content"] in third for message in _THREE_TURNS),
        system_role="rejected" if system is None else "rendered" if _SYSTEM in system else "ignored",
        alternation=plain is not None and rendered(_USER, _NEXT) is None,
        tools=rendered(_USER, tools=[_TOOL], prompt=True) not in (None, prompt),
        thoughts=form is not None,
        date=reads_clock(template),
    )


def _has_header(prompt: str, conversation: str, form: Format | None) -> bool:
    """Whether the prompt has the text between a question and its answer.

    Some templates always write the header, and with others, such as Mistral's, it is the end of the question.
    """
    between, answered, _ = conversation.partition(QUESTION)[2].partition(_ANSWER)
    header = _without_thought(between, form)
    return bool(answered) and prompt.partition(QUESTION)[2].strip().startswith(header.strip())


def _is_header(prompt: str, conversation: str, form: Format | None) -> bool:
    """Whether the text after the question begins as in a conversation: apart from thoughts, white space and its end."""
    between, answered, _ = conversation.partition(QUESTION)[2].partition(_ANSWER)
    after, between = (
        _without_thought(text, form).strip() for text in (prompt.partition(QUESTION)[2], between)
    )
    return not answered or between.startswith(after) or between.endswith(after) or after.startswith(between)


def _ends_question(prompt: str, conversation: str, form: Format | None) -> bool:
    """Whether the text between a question and its answer has nothing before the header that the prompt ends with."""
    after, between = (_without_thought(text.partition(QUESTION)[2], form) for text in (prompt, conversation))
    between = between.partition(_ANSWER)[0].strip()
    header = after.strip()
    return not header or between == header or not between.endswith(header)


def _without_thought(text: str, form: Format | None) -> str:
    """The text up to the thought that it begins."""
    return text if form is None else text.partition(form.start)[0]


def _end_of_turn(
    rendered: Callable[..., str | None], special: Collection[str], stops: Collection[str], form: Format | None
) -> str | None:
    """The special token that ends an answer: one of the model's own if the template writes it, else the first."""
    tags = "" if form is None else form.start + form.closing  # these occur in the middle of an answer
    last = _tokens((rendered(_USER, _ASSISTANT) or "").rpartition(_ANSWER)[2], special)
    # Some templates close only answers that a question follows.
    between = (rendered(_USER, _ASSISTANT, _NEXT) or "").rpartition(_ANSWER)[2].partition(_SECOND)[0]
    header = _tokens((rendered(_USER) or "").partition(QUESTION)[0], special)
    for after in (last, _without_end(_tokens(between, special), header)):
        tokens = [token for token in after if token in stops or token not in tags]
        if tokens:
            return next((token for token in tokens if token in stops), tokens[0])
    return None


def _without_end(tokens: list[str], end: list[str]) -> list[str]:
    """The tokens before the longest common end."""
    length = 0
    while length < min(len(tokens), len(end)) and tokens[-1 - length] == end[-1 - length]:
        length += 1
    return tokens[: len(tokens) - length]


def _tokens(text: str, special: Collection[str]) -> list[str]:
    """The special tokens in a text, in order."""
    found, at = [], 0
    while at < len(text):
        token = max((one for one in special if one and text.startswith(one, at)), key=len, default="")
        found += [token] if token else []
        at += len(token) or 1
    return found
