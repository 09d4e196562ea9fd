"""Runs with OpenAI's client: what is sampled, graded, counted and shown."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import FilePurpose
from openai.types.evals.runs.output_item_list_response import Sample
from sqlalchemy import Engine, delete, event

from core.database.tables import EvalJournal, EvalPage
from core.evals import items
from core.telemetry.metrics import COUNTED
from graders.judge.model_graders import MAX_SHOWN, clipped
from graders.spec import parse_grader
from graders.types import Grade, JudgeSample
from tests.evals.conftest import EXACT, JUDGED, House, completions, row
from tests.present import untyped
from worker.evals.grading import result_of

PYTHON = {
    "type": "python",
    "name": "short",
    "source": "def grade(sample, item):\n    return len(sample['output_text']) < 3\n",
}
NEAR = {
    "type": "text_similarity",
    "name": "near",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
    "pass_threshold": 0.9,
}
SCORED = {
    "type": "score_model",
    "name": "scored",
    "model": "judge",
    "input": [{"role": "user", "content": "Rate {{sample.output_text}}"}],
    "range": [0, 10],
    "pass_threshold": 7,
}


def inline(*rows: dict[str, Any]) -> Any:
    return {"type": "jsonl", "source": {"type": "file_content", "content": list(rows)}}


def upload(client: OpenAI, *rows: dict[str, Any], purpose: FilePurpose = "evals") -> str:
    text = "\n".join(json.dumps(one) for one in rows)
    return client.files.create(file=("rows.jsonl", text.encode()), purpose=purpose).id


@pytest.mark.both_databases
def test_rows_with_samples_are_graded_as_they_are(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval(EXACT, NEAR)
    rows = [
        row(1, "red") | {"sample": {"output_text": "red"}},
        row(2, "red") | {"sample": {"choices": [{"message": {"content": "blue"}}]}},
    ]

    queued = client.evals.runs.create(made.id, name="mine", data_source=inline(*rows))
    assert (queued.status, queued.result_counts.total) == ("queued", 0)
    house.work()
    run = client.evals.runs.retrieve(queued.id, eval_id=made.id)

    assert run.status == "completed"
    assert run.result_counts.model_dump() == {"total": 2, "passed": 1, "failed": 1, "errored": 0}
    assert [(one.testing_criteria, one.passed, one.failed) for one in run.per_testing_criteria_results] == [
        ("exact", 1, 1),
        ("near", 1, 1),
    ]
    assert untyped(run.data_source.source).content[0].item == rows[0]["item"]
    assert untyped(run).pass_rate == 0.5
    assert untyped(run).standard_error == pytest.approx(0.5)
    assert not house.model.requests


def test_an_item_shows_its_row_its_sample_and_every_result(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval(EXACT, JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(1, sampling_params={"seed": 7}))
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    assert item.object == "eval.run.output_item"
    assert (item.run_id, item.eval_id, item.status) == (run.id, made.id, "pass")
    assert item.datasource_item == {"question": "q0", "answer": "q0"}
    assert [(one.name, one.type, one.passed, one.score) for one in item.results] == [
        ("exact", "string_check", True, 1.0),
        ("polite", "label_model", True, 1.0),
    ]
    assert item.sample.input[0].content == "q0"
    assert item.sample.output[0].content == "q0"
    assert item.sample.usage.total_tokens == 15
    assert (item.sample.model, item.sample.seed) == ("tiny", 7)
    same = client.evals.runs.output_items.retrieve(item.id, eval_id=made.id, run_id=run.id)
    assert same.to_dict() == item.to_dict()


def test_the_result_of_a_model_grader_has_the_prompt_and_the_reply_of_its_judge(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    strict = JUDGED | {"sampling_params": {"temperature": 0.2, "max_completions_tokens": 90}}
    made = new_eval(EXACT, JUDGED, strict | {"name": "strict"})
    run = client.evals.runs.create(made.id, data_source=completions(1))
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    exact, polite, strict_sample = (untyped(result).sample for result in item.results)
    assert exact is None
    assert polite["input"] == [{"role": "user", "content": "Is q0 polite?"}]
    assert json.loads(polite["output"][0]["content"])["result"] == "yes"
    assert (polite["model"], polite["finish_reason"], polite["error"]) == ("judge", "stop", None)
    assert polite["usage"]["total_tokens"] == 15
    assert (polite["temperature"], strict_sample["temperature"]) == (None, 0.2)
    assert strict_sample["max_completions_tokens"] == 90


def test_the_judges_of_an_item_share_the_characters_that_are_kept() -> None:
    prompt, reply = clipped("p" * 2 * MAX_SHOWN, MAX_SHOWN), "r" * MAX_SHOWN
    judge = JudgeSample("judge", [{"role": "user", "content": prompt}], {}, output=reply)
    exact, polite, scored = (parse_grader(raw) for raw in (EXACT, JUDGED, SCORED))

    sample = result_of(polite, Grade(1.0, judge=judge), [exact, polite, scored])["sample"]

    half = MAX_SHOWN // 2
    assert sample["input"][0]["content"] == "p" * half + f"… ({2 * MAX_SHOWN - half} more characters)"
    assert sample["output"][0]["content"] == "r" * half + f"… ({half} more characters)"


def test_the_result_of_a_judge_without_a_reply_has_its_prompt_and_the_error(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    house.judge.fails.add("Is q0 polite?")
    made = new_eval(JUDGED)
    run = client.evals.runs.create(made.id, data_source=completions(1))
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    sample = untyped(item.results[0]).sample
    assert (sample["input"][0]["content"], sample["output"]) == ("Is q0 polite?", [])
    assert sample["error"]["code"] == "model_grader_server_error"


@pytest.mark.parametrize("source", [inline(row(1) | {"sample": {"output_text": "q1"}}), completions(1)])
def test_a_sample_has_the_types_of_the_client_where_parameters_are_not_set(
    client: OpenAI, new_eval: Callable[..., Any], house: House, source: Any
) -> None:
    """`error` is null in OpenAI's own answers, although the client's type has no null; so is what has no default."""
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    sample = item.sample.to_dict()
    assert (sample.pop("error"), sample.pop("seed"), sample.pop("max_completion_tokens")) == (
        None,
        None,
        None,
    )
    filled = {"error": {"code": "", "message": ""}, "seed": 1, "max_completion_tokens": 1}
    Sample.model_validate(sample | filled, strict=True)


def test_the_thought_of_a_reasoning_model_is_shown_and_graded(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    house.model.thoughts["q0"] = "q0, of course"
    made = new_eval(
        EXACT | {"input": "{{sample.output_reasoning}}", "operation": "like"}, EXACT | {"name": "b"}
    )
    run = client.evals.runs.create(made.id, data_source=completions(1))
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    assert [result.passed for result in item.results] == [True, True]
    message = untyped(item.sample.output[0])
    assert (message.content, message.reasoning_content) == ("q0", "q0, of course")


@pytest.mark.parametrize("has_function", [True, False])
def test_a_run_has_tools_and_its_criteria_read_calls(
    client: OpenAI, new_eval: Callable[..., Any], house: House, has_function: bool
) -> None:
    """The form of chats and that of responses."""
    function = {"name": "find", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function} if has_function else {"type": "function", **function}
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    house.model.calls["q0"] = [call]
    made = new_eval(
        EXACT | {"input": "{{sample.output_tools[0].function.name}}", "reference": "find"},
    )
    run = client.evals.runs.create(
        made.id, data_source=completions(1) | {"sampling_params": {"tools": [tool]}}
    )
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data

    assert item.results[0].passed
    assert untyped(item.sample.output[0]).tool_calls == [call]
    assert house.model.requests[-1]["tools"] == [{"type": "function", "function": function}]


def test_messages_of_an_item_may_have_calls_and_results(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q0"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "q0"},
    ]
    source = completions(1) | {
        "source": {"type": "file_content", "content": [{"item": row(0)["item"] | {"messages": messages}}]},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
    }
    made = new_eval(EXACT)
    client.evals.runs.create(made.id, data_source=source)
    house.work()

    assert house.model.requests[-1]["messages"] == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "q0", "tool_call_id": "c"},
    ]


def test_every_kind_of_criterion_grades(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    made = new_eval(EXACT, NEAR, JUDGED, SCORED, PYTHON)
    run: Any = client.evals.runs.create(made.id, data_source=completions(2))
    house.work()

    run = client.evals.runs.retrieve(run.id, eval_id=made.id)
    [first, *_] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    results: dict[str, Any] = {one.name: one for one in first.results}

    assert results["short"].passed
    # The judge answers "yes", which is no number: the criterion could not be graded, which is not 0.
    assert (results["scored"].score, results["scored"].error) == (None, "model_grader_parse_error")
    assert run.result_counts.errored == 2
    usage = {one.run_model_name: one for one in run.per_model_usage}
    assert usage["tiny"].invocation_count == 2
    assert usage["tiny"].total_tokens == 30
    assert usage["judge"].prompt_tokens > 0


def test_responses_take_templates_in_parts_and_a_text_format(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    source: Any = completions(1) | {
        "type": "responses",
        "input_messages": {
            "type": "template",
            "template": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": {"type": "input_text", "text": "Say {{item.question}}"}},
            ],
        },
        "sampling_params": {
            "temperature": 0,
            "max_completion_tokens": 9,
            "reasoning_effort": "low",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
    }
    client.evals.runs.create(made.id, data_source=source)
    house.work()

    [listed] = client.evals.runs.list(made.id).data
    assert untyped(listed.data_source).sampling_params is not None
    assert untyped(listed.data_source).sampling_params.text is not None
    assert untyped(listed.data_source).sampling_params.text.format is not None
    assert untyped(listed.data_source).sampling_params.text.format.to_dict() == {
        "type": "json_schema",
        "name": "x",
        "schema": schema,
    }
    [sent] = house.model.requests
    assert sent["response_format"]["json_schema"]["name"] == "x"
    assert [message["content"] for message in sent["messages"]] == ["Be brief.", "Say q0"]
    assert (sent["temperature"], sent["max_completion_tokens"]) == (0, 9)
    assert sent["response_format"]["json_schema"]["schema"] == schema
    assert sent["regraft"]["base_model"] == "tiny"


def test_messages_may_be_in_the_rows(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    made = new_eval()
    trajectory = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    item = row(0)["item"] | {"input_trajectory": [*trajectory, {"role": "user", "content": "q0"}]}
    source: Any = completions(0) | {
        "source": {"type": "file_content", "content": [{"item": item}]},
        "input_messages": {"type": "item_reference", "item_reference": "item.input_trajectory"},
    }
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    assert house.model.requests[0]["messages"] == item["input_trajectory"]
    assert client.evals.runs.retrieve(run.id, eval_id=made.id).result_counts.passed == 1


def test_a_row_in_the_request_without_item_and_sample_is_itself_the_item(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    source: Any = completions(0) | {"source": {"type": "file_content", "content": [row(0)["item"]]}}
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    [item] = client.evals.runs.output_items.list(run.id, eval_id=made.id)
    assert item.datasource_item == row(0)["item"]


def test_a_row_in_the_request_that_is_no_item_is_refused(
    client: OpenAI, new_eval: Callable[..., Any]
) -> None:
    source: Any = completions(0) | {"source": {"type": "file_content", "content": [{"other": 1}]}}

    with pytest.raises(BadRequestError, match="has the key 'other'; a row has 'item' and perhaps 'sample'"):
        client.evals.runs.create(new_eval().id, data_source=source)


def test_a_model_that_the_operator_names_is_asked_with_its_own_name_and_key(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    source: Any = completions(2, model="gpt-foreign", sampling_params={"reasoning_effort": "low"})
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    assert client.evals.runs.retrieve(run.id, eval_id=made.id).result_counts.failed == 2
    assert {sent["model"] for sent in house.foreign.requests} == {"gpt-4o"}
    assert house.foreign.requests[0]["reasoning_effort"] == "low"
    assert "regraft" not in house.foreign.requests[0]


def test_rows_may_be_in_a_file_which_may_be_deleted_while_the_run_waits(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    file = upload(client, row(1), row(2))
    run = client.evals.runs.create(
        made.id, data_source=completions(0) | {"source": {"type": "file_id", "id": file}}
    )
    client.files.delete(file)
    house.work()

    assert client.evals.runs.retrieve(run.id, eval_id=made.id).result_counts.passed == 2


@pytest.mark.both_databases
def test_items_page_across_blocks_in_both_orders_and_by_status(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    count = items.BLOCK_ROWS + 20
    rows = [row(number, "x" if number % 10 == 0 else None) for number in range(count)]
    source: Any = completions(0) | {"source": {"type": "file_content", "content": rows}}
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    listed = client.evals.runs.output_items.list
    lines = [item.datasource_item_id for item in listed(run.id, eval_id=made.id, limit=50)]
    assert lines == list(range(1, count + 1))
    backwards = [item.datasource_item_id for item in listed(run.id, eval_id=made.id, limit=50, order="desc")]
    assert backwards == lines[::-1]
    failed = [item.datasource_item_id for item in listed(run.id, eval_id=made.id, limit=4, status="fail")]
    assert failed == list(range(1, count + 1, 10))
    with house.database.read() as session:
        assert not items.items_of_run(session, run.id).loose


@pytest.mark.both_databases
def test_items_that_become_a_page_during_the_read_are_there_once(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    """The read sees one snapshot: the pages before the worker's transaction, and the journal before it."""
    made = new_eval()
    run = client.evals.runs.create(made.id, data_source=completions(2))
    found: list[dict[str, Any]] = [
        {"id": items.item_id(run.id, line), "line": line, "datasource_item_id": line, "status": "pass",
         "created_at": 1, "datasource_item": {}, "results": [], "sample": {}}
        for line in (1, 2)
    ]  # fmt: skip
    with house.database.write() as session:
        session.add_all(EvalJournal(run_id=run.id, line=one["line"], data={"item": one}) for one in found)
    page = items.encode(found)
    house.blobs.put_bytes("page", page.data)

    def becomes_a_page() -> None:
        with house.database.write() as session:
            session.add(
                EvalPage(run_id=run.id, number=0, blob_key="page", items=2, bytes=1, sha256=page.sha256)
            )
            session.execute(delete(EvalJournal).where(EvalJournal.run_id == run.id))

    def listed() -> list[Any]:
        return [item.id for item in client.evals.runs.output_items.list(run.id, eval_id=made.id)]

    with after_first_read(house.database.engine, "eval_pages", becomes_a_page) as done:
        during = listed()

    assert done.is_set()
    assert during == listed() == [one["id"] for one in found]


@contextmanager
def after_first_read(engine: Engine, table: str, act: Callable[..., None]) -> Iterator[threading.Event]:
    """Act between the first read of a table and the reader's next statement. Yields the event that it did."""
    done = threading.Event()

    def on_execute(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if f"FROM {table}" in statement and not done.is_set():
            done.set()
            act()

    event.listen(engine, "after_cursor_execute", on_execute)
    yield done
    event.remove(engine, "after_cursor_execute", on_execute)


def test_runs_are_listed_by_status(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    made = new_eval()
    done = client.evals.runs.create(made.id, data_source=completions(1))
    house.work()
    waiting = [client.evals.runs.create(made.id, data_source=completions(1)).id for _ in range(3)]

    listed = client.evals.runs.list
    assert [run.id for run in listed(made.id, limit=2)] == [done.id, *waiting]
    assert [run.id for run in listed(made.id, status="queued", order="desc", limit=2)] == waiting[::-1]
    assert client.evals.runs.delete(waiting[0], eval_id=made.id).deleted
    assert [run.id for run in listed(made.id, after=waiting[0])] == waiting[1:]


def test_a_sample_that_fails_is_an_errored_item_and_not_a_failed_run(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    source: Any = completions(0, model="gpt-foreign") | {
        "source": {"type": "file_content", "content": [row(1), row(2)]},
    }
    house.foreign.fails.add("q1")
    run: Any = client.evals.runs.create(made.id, data_source=source)
    house.work()

    run = client.evals.runs.retrieve(run.id, eval_id=made.id)
    assert (run.status, run.result_counts.errored, run.result_counts.failed) == ("completed", 1, 1)
    [item, _] = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    assert item.sample.error.code == "no"
    assert item.results == []


BAD = [
    ({"source": {"type": "file_content", "content": [{"question": "?"}]}}, "data_source", "item"),
    ({"source": {"type": "file_content", "content": []}}, "data_source", ""),
    (
        {"source": {"type": "file_content", "content": [row(1), {"item": {"question": 3, "answer": "x"}}]}},
        "data_source.source.content",
        "line 2: item: question: 3 is not of type 'string'",
    ),
    ({"source": {"type": "file_id", "id": "file-none"}}, "data_source.source.id", "file-none"),
    ({"source": {"type": "stored_completions"}}, "data_source.source.type", "stored_completions"),
    ({"source": {"type": "responses"}}, "data_source.source.type", "responses"),
    (
        {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.city}}"}]}},
        "data_source.source.content",
        "line 1: the input messages read {{item.city}}",
    ),
    (
        {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{sample.x}}"}]}},
        "data_source.input_messages.template",
        "sample",
    ),
    (
        {
            "input_messages": {
                "type": "template",
                "template": [
                    {"role": "user", "content": {"type": "input_image", "image_url": "{{item.question}}"}}
                ],
            }
        },
        "data_source.input_messages.template[0].content",
        "images",
    ),
    ({"input_messages": {"type": "song"}}, "data_source.input_messages.type", "song"),
    ({"sampling_params": {"temperature": 9}}, "data_source.sampling_params.temperature", "9"),
    ({"sampling_params": {"vibes": 9}}, "data_source.sampling_params.vibes", "Unknown"),
    (
        {"sampling_params": {"tools": [{"type": "function"}]}},
        "data_source.sampling_params.tools[0].function.name",
        "required",
    ),
]


MESSAGES = "data_source.input_messages"


def template(*messages: dict[Any, Any] | int) -> dict[Any, Any]:
    return {"input_messages": {"type": "template", "template": list(messages)}}


def content(value: int | list[Any] | str) -> dict[Any, Any]:
    return template({"role": "user", "content": value})


WRONG_TYPES = [
    ({"input_messages": {}}, f"{MESSAGES}.type", "Missing required parameter"),
    (
        {"input_messages": {"type": 3}},
        f"{MESSAGES}.type",
        "expected 'template' or 'item_reference', but got an integer",
    ),
    (template(), f"{MESSAGES}.template", "expected at least one message"),
    (template(3), f"{MESSAGES}.template[0]", "expected an object, but got an integer"),
    (
        template({"role": "user", "content": "x"}, {"role": "robot", "content": "x"}),
        f"{MESSAGES}.template[1].role",
        "'robot'. Supported values are: 'user'",
    ),
    (template({"role": 3, "content": "x"}), f"{MESSAGES}.template[0].role", "but got an integer"),
    (template({"role": "user"}), f"{MESSAGES}.template[0].content", "Missing"),
    (template({"role": "user", "content": "x", "name": "y"}), f"{MESSAGES}.template[0].name", "Unknown"),
    (content(3), f"{MESSAGES}.template[0].content", "expected a string, a content part, or an array"),
    (content([]), f"{MESSAGES}.template[0].content", "expected at least 1 entry, but got 0"),
    (content([{"type": "x"}]), f"{MESSAGES}.template[0].content[0]", "whose type is 'input_text'"),
    (content("{{foo}}"), f"{MESSAGES}.template[0].content", "unknown namespace 'foo'"),
    ({"source": {"type": "x"}}, "data_source.source.type", "'x'. Supported values are: 'file_content'"),
    ({"source": {}}, "data_source.source.type", "Missing"),
    ({"type": "x"}, "data_source.type", "'x'. Supported values are: 'jsonl'"),
]


@pytest.mark.parametrize(("wrong", "param", "words"), WRONG_TYPES, ids=[case[1] for case in WRONG_TYPES])
def test_a_parameter_is_named_as_it_was_written(
    client: OpenAI, new_eval: Callable[..., Any], wrong: dict[str, Any], param: str, words: str
) -> None:
    made = new_eval()

    with pytest.raises(BadRequestError) as refused:
        client.evals.runs.create(made.id, data_source=completions(1) | wrong)

    assert refused.value.param == param
    assert words in str(refused.value)


@pytest.mark.parametrize(("wrong", "param", "words"), BAD, ids=[case[2] or case[1] for case in BAD])
def test_a_bad_run_is_refused_by_name_and_leaves_nothing(
    client: OpenAI, new_eval: Callable[..., Any], wrong: dict[str, Any], param: str, words: str
) -> None:
    made = new_eval()

    with pytest.raises(BadRequestError) as refused:
        client.evals.runs.create(made.id, data_source=completions(1) | wrong)

    assert refused.value.param is not None
    assert refused.value.param.startswith(param), refused.value.param
    assert words in str(refused.value)
    assert client.evals.runs.list(made.id).data == []


@pytest.mark.both_databases
def test_runs_are_in_the_usage_of_the_project(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    made = new_eval()
    for _ in range(3):
        client.evals.runs.create(made.id, data_source=completions(1))
    house.runner().claim()

    usage = client.get(f"/organization/projects/{house.project.id}/usage", cast_to=dict[str, Any])

    assert (usage["running_eval_runs"], usage["queued_eval_runs"]) == (1, 2)


def test_a_model_that_does_not_exist_is_not_found(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval()

    with pytest.raises(NotFoundError, match="gpt-foreign") as refused:
        client.evals.runs.create(made.id, data_source=completions(1, model="gpt-5"))

    assert (refused.value.param, refused.value.code) == ("data_source.model", "model_not_found")


def test_a_row_without_item_whose_keys_fit_the_schema_is_the_item(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    file = upload(client, row(1)["item"], row(2), row(3)["item"] | {"source": "a book"})
    run = client.evals.runs.create(
        made.id, data_source=completions(0) | {"source": {"type": "file_id", "id": file}}
    )
    house.work()

    assert client.evals.runs.retrieve(run.id, eval_id=made.id).result_counts.passed == 3
    items = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    assert {item.datasource_item["question"] for item in items} == {"q1", "q2", "q3"}


def test_one_fault_of_many_rows_is_one_sentence(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval()
    file = upload(client, *[{"question": "no answer"}] * 30)

    with pytest.raises(BadRequestError) as refused:
        client.evals.runs.create(
            made.id, data_source=completions(0) | {"source": {"type": "file_id", "id": file}}
        )

    assert (
        "line 1: has the key 'question'; a row has 'item' and perhaps 'sample', or is itself an item that fits "
        in str(refused.value)
    )
    assert "'answer' is a required property (and in 29 more lines: 2, 3, 4, 5, …)" in str(refused.value)


def test_a_file_that_is_no_jsonl_is_named(client: OpenAI) -> None:
    content = json.dumps([row(1), row(2)]).encode()

    with pytest.raises(BadRequestError, match="the file is one JSON array; write one object per line"):
        client.files.create(file=("rows.json", content), purpose="evals")


def test_every_bad_line_of_a_file_is_named(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval()
    file = upload(client, row(1), {"input": "x"}, row(2), {"item": {"question": "a"}})

    with pytest.raises(BadRequestError) as refused:
        client.evals.runs.create(
            made.id, data_source={"type": "jsonl", "source": {"type": "file_id", "id": file}}
        )

    assert "line 2: has the key 'input'" in str(refused.value)
    assert "line 4: item: 'answer' is a required property" in str(refused.value)
    # Neither row brings the sample that the criterion reads.
    assert "line 1: has no 'sample', which the criterion 'exact' reads" in str(refused.value)


def test_a_row_whose_reference_has_no_word_for_the_metric_is_refused(
    client: OpenAI, new_eval: Callable[..., Any]
) -> None:
    rouge = NEAR | {"evaluation_metric": "rouge_l"}
    source = inline(row(1), row(2, "你好") | {"sample": {"output_text": "你好"}})

    with pytest.raises(BadRequestError, match="line 2: the reference '你好' of 'near' has no word of a-z"):
        client.evals.runs.create(new_eval(rouge).id, data_source=source)
    made = new_eval(rouge | {"tokenizer": "unicode"})
    samples = inline(row(2, "你好") | {"sample": {"output_text": "你好"}})

    assert client.evals.runs.create(made.id, data_source=samples).status == "queued"


def test_a_deleted_file_and_one_of_another_purpose_are_refused(
    client: OpenAI, new_eval: Callable[..., Any]
) -> None:
    made = new_eval()
    file, other = upload(client, row(1)), upload(client, row(1), purpose="user_data")
    client.files.delete(file)

    for wrong in (file, other):
        with pytest.raises(BadRequestError) as refused:
            client.evals.runs.create(
                made.id, data_source=completions(0) | {"source": {"type": "file_id", "id": wrong}}
            )
        assert refused.value.param == "data_source.source.id"


def test_the_messages_of_a_row_are_bounded_together(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    long = row(1) | {"item": {"question": "q" * 30_000, "answer": "a"}}
    messages = [{"role": "user", "content": "{{item.question}}"}] * 100
    source: Any = completions(0) | {
        "source": {"type": "file_content", "content": [row(0), long]},
        "input_messages": {"type": "template", "template": messages},
    }
    run = client.evals.runs.create(made.id, data_source=source)
    house.work()

    first, second = client.evals.runs.output_items.list(run.id, eval_id=made.id).data
    assert (first.status, second.status) == ("pass", "error")
    assert second.sample.error.message == "the messages have more than 2000000 characters together"


def test_the_references_of_all_messages_are_bounded(client: OpenAI, new_eval: Callable[..., Any]) -> None:
    made = new_eval()
    message = {"role": "user", "content": "{{item.question}}" * 900}
    template = {"type": "template", "template": [message] * 30}

    with pytest.raises(BadRequestError, match="at most 20000 references in all"):
        client.evals.runs.create(made.id, data_source=completions(1, input_messages=template))


def test_parameters_of_sampling_reach_our_own_server(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    params = {"max_completions_tokens": 7, "reasoning_effort": "low"}
    run = client.evals.runs.create(made.id, data_source=completions(1, sampling_params=params))
    house.work()

    assert untyped(run.data_source).sampling_params is not None
    assert untyped(run.data_source).sampling_params.to_dict() == {
        "max_completion_tokens": 7,
        "reasoning_effort": "low",
    }
    [sent] = house.model.requests
    assert (sent["max_completion_tokens"], sent["reasoning_effort"]) == (7, "low")


def test_finished_items_and_their_seconds_are_counted(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    def counted() -> dict[tuple[str, ...], float]:
        samples = [sample for family in COUNTED.collect() for sample in family.samples]
        return {(one.name, *one.labels.values()): one.value for one in samples if "le" not in one.labels}

    before = counted()
    content = [row(0), row(1, "x"), row(2)]
    source: Any = completions(0, model="gpt-foreign") | {
        "source": {"type": "file_content", "content": content}
    }
    house.foreign.fails.add("q2")
    client.evals.runs.create(new_eval().id, data_source=source)
    house.work()

    new = {key: value - before.get(key, 0.0) for key, value in counted().items()}
    assert new["regraft_eval_items_total", "fail"] == 2
    assert new["regraft_eval_items_total", "error"] == 1
    assert new["regraft_eval_item_seconds_count", "sampling"] == 3
    assert new["regraft_eval_item_seconds_count", "grading"] == 2


@pytest.mark.both_databases
def test_a_lone_surrogate_in_a_reason_is_replaced(
    client: OpenAI, new_eval: Callable[..., Any], house: House, database_kind: str
) -> None:
    """UTF-8 cannot encode it, and JSON can carry it."""
    source = "def grade(sample, item):\n    raise ValueError('broken: \\ud800')\n"
    made = new_eval({"type": "python", "name": "broken", "source": source})
    sampled = row(1, "red") | {"sample": {"output_text": "red"}}
    run = client.evals.runs.create(made.id, data_source=inline(sampled)).id
    house.work()

    assert client.evals.runs.retrieve(run, eval_id=made.id).status == "completed"
    [item] = client.evals.runs.output_items.list(run, eval_id=made.id)
    assert "broken: \\ufffd" in json.dumps(item.model_dump())


def test_a_row_that_is_nested_too_deeply_is_refused_by_its_line(
    client: OpenAI, new_eval: Callable[..., Any]
) -> None:
    deep: Any = "red"
    for _ in range(150):
        deep = [deep]
    made = new_eval()

    with pytest.raises(BadRequestError, match="line 2: is nested too deeply"):
        client.evals.runs.create(
            made.id, data_source=inline(row(1, "red"), {"item": {"question": deep, "answer": "x"}})
        )
