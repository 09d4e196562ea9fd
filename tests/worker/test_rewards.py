"""How answers of a batch, or of several batches at once, are graded."""

import asyncio
from collections.abc import AsyncIterator

from graders.types import Grade, Item, Sample
from tests.tiny import tiny_tokenizer
from worker.clock import Clock
from worker.model.tool_calls import CallReader
from worker.rollout.experience import Rewards
from worker.sampling import Answer
from worker.types import FinishReason, Node, ParsedAnswer, Prompt, Rollout


class CountingGrader:
    """Knows how many answers it graded at once, at most. Each grade ends after others could begin."""

    name, type = "counting", "string_check"

    def __init__(self) -> None:
        self.now = self.most = 0

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return Grade(1.0)


async def answers() -> AsyncIterator[Answer]:
    for member in range(6):
        yield Answer(0, member, Rollout((1,), (-0.5,), "a", "stop"))


def test_batches_that_are_graded_at_once_share_the_limit_of_grades_in_flight() -> None:
    grader = CountingGrader()
    rewards, prompts_P = Rewards(grader, concurrency=3), [Prompt(1, (1,), {})]

    async def both() -> None:
        batches = (rewards.grade(prompts_P, answers(), 6, Clock()) for _ in range(2))
        await asyncio.gather(*batches)

    asyncio.run(both())

    assert grader.most == 3


class RecordingGrader:
    """Keeps the samples that it grades."""

    name, type = "recording", "string_check"

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    async def grade(self, sample: Sample, item: Item) -> Grade:
        self.samples.append(sample)
        return Grade(float(len(sample.output_tools)))


CALL = 'Hm. <tool_call>{"name": "time", "arguments": {}}</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "time"}}]}


def graded(text: str, item: Item, reason: FinishReason = "stop") -> tuple[Sample, Rollout]:
    return graded_rollout(Rollout((1,), (-0.5,), text, reason), item)


def graded_rollout(sampled: Rollout, item: Item) -> tuple[Sample, Rollout]:
    """The sample of one answer as its grader has it, and the rollout that is trained on and stored."""
    grader = RecordingGrader()
    rewards = Rewards(grader, call_reader=CallReader.of("hermes", tiny_tokenizer()))

    async def one() -> AsyncIterator[Answer]:
        yield Answer(0, 0, sampled)

    [group] = asyncio.run(rewards.grade([Prompt(1, (1,), item)], one(), 1, Clock()))
    return grader.samples[0], group.rollouts_G[0]


def test_graders_get_content_and_calls_and_the_tokens_stay_as_they_are() -> None:
    sample, rollout = graded(CALL, TOOLS)

    assert sample.output_text == "Hm. "
    assert [call["function"] for call in sample.output_tools] == [{"name": "time", "arguments": "{}"}]
    assert sample.output_tools_error == ""
    assert (rollout.text, rollout.output_ids_T) == (CALL, (1,))
    assert rollout.tool_calls == sample.output_tools


def test_a_call_that_cannot_be_read_is_an_answer_like_any_other() -> None:
    sample, rollout = graded("<tool_call>time</tool_call>", TOOLS)

    assert (sample.output_text, sample.output_tools) == ("<tool_call>time</tool_call>", ())
    assert sample.output_tools_error.startswith("a call is not JSON")
    assert sample.as_namespace()["output_tools_error"] == sample.output_tools_error
    assert rollout.parsed is not None
    assert rollout.parsed.error == sample.output_tools_error


def test_half_a_call_of_an_answer_that_was_cut_is_not_read() -> None:
    sample, _ = graded(CALL, TOOLS, "length")

    assert (sample.output_text, sample.output_tools) == (CALL, ())
    assert "cut at its limit" in sample.output_tools_error


def test_the_calls_of_an_episode_that_a_limit_ended_are_those_of_its_last_answer() -> None:
    last = Node(None, (), Rollout((1,), (-0.5,), CALL, "stop"))

    sample, rollout = graded_rollout(Rollout.of_nodes([last], is_truncated=True), TOOLS)

    assert (sample.output_text, sample.output_tools_error) == ("Hm. ", "")
    assert [call["function"]["name"] for call in sample.output_tools] == ["time"]
    assert (rollout.nodes, rollout.is_truncated) == ((last,), True)


def test_a_row_without_tools_has_no_calls_whatever_the_answer_looks_like() -> None:
    sample, rollout = graded(CALL, {"tools": []})

    assert (sample.output_text, sample.output_tools, sample.output_tools_error) == (CALL, (), "")
    assert rollout.parsed is None


def test_marks_of_calls_that_are_special_tokens_are_read_too() -> None:
    """Texts of answers are without special tokens, as those of Mistral's models."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    ids = [tokenizer.convert_tokens_to_ids(one) for one in ("yes", "[TOOL_CALLS]", "no", "<end>")]

    parsed = CallReader.of("mistral", tokenizer).read("yes no", ids, TOOLS, is_cut=False)

    assert parsed is not None
    assert parsed.content.split() == ["yes", "[TOOL_CALLS]", "no"]
    assert parsed.error.startswith("a call is not JSON")


def mistral_reader() -> CallReader:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    return CallReader.of("mistral", tokenizer)


def ids_of(reader: CallReader, text: str) -> list[int]:
    return [reader.tokenizer.convert_tokens_to_ids(word) for word in text.split()]


def test_an_answer_without_marks_is_its_text_which_a_stop_may_have_cut() -> None:
    reader = mistral_reader()

    parsed = reader.read("yes ", ids_of(reader, "yes no <end>"), TOOLS, is_cut=False, stops=["no"])

    assert parsed == ParsedAnswer("yes ")


def test_stops_also_end_a_text_that_is_decoded_with_its_marks() -> None:
    reader = mistral_reader()

    parsed = reader.read(
        "yes ", ids_of(reader, "yes [TOOL_CALLS] no maybe"), TOOLS, is_cut=False, stops=["no"]
    )

    assert parsed is not None
    assert parsed.content.split() == ["yes", "[TOOL_CALLS]"]


def test_a_reader_of_calls_does_not_copy_the_vocabulary() -> None:
    """Each chat with tools has a reader, and a vocabulary has 150,000 tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.get_vocab = None

    assert CallReader.of("hermes", tokenizer).marks == frozenset()
