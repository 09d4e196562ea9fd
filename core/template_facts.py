"""Facts of a chat template, found by rendering conversations. No torch and no transformers: the API shows them.

A template is a program, and a mistake in it raises no error: a prompt without the header of the answer, or a token
after answers that no engine stops at, only makes answers worse.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from core.chat_templates import reads_clock
from core.reasoning import QUESTION, Format
from core.template_process import draws_at_random
from core.template_tools import CALLS, DEFINITIONS, MESSAGES, PARALLEL, RESULTS, TEXT, TOOLS, RenderChat

_SYSTEM, _ANSWER, _SECOND = "System7Q", "Answer7Q", "Second7Q"
_USER = {"role": "user", "content": QUESTION}
_SYSTEM_MESSAGE = {"role": "system", "content": _SYSTEM}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_NEXT = {"role": "user", "content": _SECOND}
_QUESTIONS, _LINES = 12, 200  # of the long conversation: its questions, and the lines of each of its messages
_MARK = re.compile(r"Part(\d+)Line(\d+)\.")


def _long_message(part: int) -> dict[str, Any]:
    """The message at a place of the long conversation, 0 for the system's. Each of its lines ends with a mark."""
    role = "system" if part == 0 else "user" if part % 2 else "assistant"
    lines = [f"A line of a long message: Part{part}Line{line}." for line in range(_LINES)]
    return {"role": role, "content": "\n".join(lines)}


_LONG_CONVERSATION = [_long_message(part) for part in range(2 * _QUESTIONS)]
SystemRole = Literal["rendered", "ignored", "rejected"]


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
    history: bool  # false: the prompt after many questions lacks some of the messages
    order: bool  # false: it has them in another order, or twice
    full_text: bool  # false: it has only a part of the text of a message
    random: bool  # renderings of one conversation differ
    system_role: SystemRole
    alternation: bool  # two messages of one role in a row are rejected
    tools: bool
    definitions: bool  # false: a tool, or a part of its definition, is not in the prompt
    calls: bool  # false: calls of earlier answers are not in the prompt
    results: bool  # false: their results are not in the prompt, or not whole
    parallel_calls: bool  # false: of several calls in an answer, some or their results are not in the prompt
    text_beside_calls: bool  # false: the text of an earlier answer with calls is not in the prompt
    messages_with_tools: bool  # false: prompts with tools lack messages that prompts without them have
    thoughts: bool
    date: bool  # prompts have the time at which they are rendered; a job fixes it

    @property
    def warnings(self) -> list[str]:
        """Sentences about what makes answers worse without an error, with tools or without."""
        return self.warnings_for(has_tools=True)

    def warnings_for(self, *, has_tools: bool) -> list[str]:
        """Those of conversations with tools, or of others."""
        found = [
            f"The model's chat template {fault}. Set chat_template in the model's entry of the registry to a template "
            f"that {remedy}."
            for is_found, fault, remedy in [*_faults(self), *(_faults_with_tools(self) if has_tools else [])]
            if is_found
        ]
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
                _tools_text(self),
                "thoughts" if self.thoughts else "no thoughts",
                *(["the date"] if self.date else []),
            ]
        )


def _faults(facts: TemplateFacts) -> list[tuple[bool, str, str]]:
    """Whether the template has each fault, what it does then, and what another one should do."""
    lost = [
        *([] if facts.question else ["the user's message is not in the prompt"]),
        *([] if facts.answer else ["answers are not in the conversation"]),
    ]
    return [
        (bool(lost), f"loses text: {' and '.join(lost)}", "renders messages whose content is a string"),
        (
            not facts.generation_prompt,
            "writes nothing before an answer (it ignores add_generation_prompt), so prompts lack the header of the "
            "answer",
            "writes it",
        ),
        (
            not facts.question_end,
            "ends the user's message only if an answer follows it, so training rows have that end and prompts lack it",
            "writes it after every message",
        ),
        (
            not facts.header,
            "ends prompts with another text than it writes before the answers of training rows",
            "writes the same header in both",
        ),
        (not facts.history, "leaves out messages of a long conversation", "writes all messages"),
        (
            not facts.order,
            "writes messages in another order, or several times",
            "writes each once, in their order",
        ),
        (not facts.full_text, "leaves out parts of long messages", "writes their whole text"),
        (
            facts.random,
            "writes text that differs each time, so one conversation has many prompts",
            "writes the same text each time",
        ),
    ]


def _faults_with_tools(facts: TemplateFacts) -> list[tuple[bool, str, str]]:
    """Those of conversations with tools; none of a template without a place for tools."""
    if not facts.tools:
        return []
    return [
        (
            bool(_unseen(facts)),
            f"renders tools and leaves out {_unseen(facts)} of functions, which jobs and requests with tools need",
            "writes them",
        ),
        (
            facts.calls and not facts.parallel_calls,
            "leaves out calls of an answer that has several, or their results",
            "writes all of them",
        ),
        (
            facts.calls and not facts.text_beside_calls,
            "leaves out the text that an answer has beside its calls",
            "writes it",
        ),
        (
            not facts.messages_with_tools,
            "leaves out messages of a conversation that has tools",
            "writes all messages",
        ),
    ]


def _unseen(facts: TemplateFacts) -> str:
    """Name what the prompt lacks of the definitions of tools, their calls and their results."""
    parts = ((DEFINITIONS, facts.definitions), (CALLS, facts.calls), (RESULTS, facts.results))
    return " and ".join(name for name, is_seen in parts if not is_seen)


def _tools_text(facts: TemplateFacts) -> str:
    if not facts.tools:
        return "no tools"
    return f"tools WITHOUT {_unseen(facts)}" if _unseen(facts) else "tools"


def find_facts(
    render: RenderChat,
    template: str,
    *,
    special: Collection[str],
    stops: Collection[str],
    form: Format | None,
    lost: Collection[str],
) -> TemplateFacts:
    """Render conversations and compare them.

    Args:
        template: the text of the template, whose clock does not run.
        special: the texts of the tokenizer's special tokens.
        stops: those of the model's own end tokens.
        form: of the model's thoughts.
        lost: what prompts with tools lack, as `lost_of_tools` of core/template_tools.py finds it.
    """
    rendered, system_role = _rendered_of(render)
    prompt, plain, conversation = rendered(_USER, prompt=True), rendered(_USER), rendered(_USER, _ASSISTANT)
    has_answer = conversation is None or _ANSWER in conversation
    has_question = prompt is None or QUESTION in prompt
    long = _LONG_CONVERSATION[0 if system_role == "rendered" else 1 :]
    end = _end_of_turn(rendered, special, stops, form) if has_answer else None
    return TemplateFacts(
        end_of_turn=end,
        end_of_turn_added=end is not None and end not in stops,
        # A template that rejects the question alone says nothing of it.
        generation_prompt=prompt is None or prompt != plain or _has_header(prompt, conversation or "", form),
        question=has_question,
        question_end=prompt is None or conversation is None or _ends_question(prompt, conversation, form),
        header=prompt in (None, plain)
        or _is_header(prompt or "", conversation or "", form, {*stops, end or ""}),
        answer=has_answer,
        **_long_facts(rendered(*long, prompt=True) if has_answer and has_question else None, len(long)),
        # A draw may be rare, or in prompts of another kind; and a template may write the address of an object.
        random=draws_at_random(template) or rendered(dict(_USER), prompt=True) != prompt,
        system_role=system_role,
        alternation=plain is not None and rendered(_USER, _NEXT) is None,
        tools=prompt is not None and TOOLS not in lost,
        definitions=DEFINITIONS not in lost,
        calls=CALLS not in lost,
        results=RESULTS not in lost,
        parallel_calls=PARALLEL not in lost,
        text_beside_calls=TEXT not in lost,
        messages_with_tools=MESSAGES not in lost,
        thoughts=form is not None,
        date=reads_clock(template),
    )


def _rendered_of(render: RenderChat) -> tuple[Callable[..., str | None], SystemRole]:
    """Render conversations, None if the template rejects one; and what the template does with a system message.

    If it requires a system message, conversations without one begin with ours.
    """

    def rendered(*messages: dict[str, Any], prompt: bool = False) -> str | None:
        try:
            return render([*([] if messages[0]["role"] == "system" else first), *messages], None, prompt)
        except Exception:  # a template is a program
            return None

    first: list[dict[str, Any]] = []
    system = rendered(_SYSTEM_MESSAGE, _USER, prompt=True)
    if system is None:
        return rendered, "rejected"
    if rendered(_USER, prompt=True) is None:
        first = [_SYSTEM_MESSAGE]
    return rendered, "rendered" if _SYSTEM in system else "ignored"


def _long_facts(text: str | None, count: int) -> dict[str, bool]:
    """Whether a text has all messages of the long conversation, in their order, and those that it has whole.

    Args:
        text: None: nothing is known.
        count: of the messages.
    """
    if text is None:
        return {"history": True, "order": True, "full_text": True}
    marks = [(int(part), int(line)) for part, line in _MARK.findall(text)]
    # Mistral's templates write the system message before the last question.
    turns = [mark for mark in marks if mark[0]]
    parts = {part for part, _ in marks}
    return {
        "history": len(parts) == count,
        "order": turns == sorted(turns),
        "full_text": len(set(marks)) == len(parts) * _LINES,
    }


def _has_header(prompt: str, conversation: str, form: Format | None) -> bool:
    """Whether the prompt has the text between a question and its answer.

    Some templates always write the header, and with others, such as Mistral's, it is the end of the question.
    """
    between, answered, _ = conversation.partition(QUESTION)[2].partition(_ANSWER)
    header = _without_thought(between, form)
    return bool(answered) and prompt.partition(QUESTION)[2].strip().startswith(header.strip())


def _is_header(prompt: str, conversation: str, form: Format | None, stops: Collection[str]) -> bool:
    """Whether the text after the question begins as in a conversation: apart from thoughts, white space and its end.

    A token that ends answers is no such end.
    """
    between, answered, _ = conversation.partition(QUESTION)[2].partition(_ANSWER)
    after, between = (
        _without_thought(text, form).strip() for text in (prompt.partition(QUESTION)[2], between)
    )
    if not answered or between.startswith(after) or between.endswith(after):
        return True
    return after.startswith(between) and not any(stop in after[len(between) :] for stop in stops if stop)


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
