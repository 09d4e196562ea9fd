import pytest

from tests.api.conftest import GRADER

VALIDATE, RUN = "/v1/fine_tuning/alpha/graders/validate", "/v1/fine_tuning/alpha/graders/run"


def run(api, grader=GRADER, model_sample="4", **fields):
    return api.post(RUN, json={"grader": grader, "model_sample": model_sample} | fields)


def test_a_good_grader_comes_back_normalised(api):
    assert api.post(VALIDATE, json={"grader": GRADER}).json() == {"grader": GRADER}


@pytest.mark.parametrize("url", [VALIDATE, RUN])
@pytest.mark.parametrize(
    ("grader", "param"),
    [
        ({"type": "vibes", "name": "g"}, "grader.type"),
        (GRADER | {"colour": "red"}, "grader.colour"),
        (GRADER | {"input": "{{item.}}"}, "grader.input"),
        ("exact", "grader"),
    ],
)
def test_a_bad_grader_is_a_400_that_names_the_mistake(api, url, grader, param):
    answer = api.post(url, json={"grader": grader, "model_sample": "4"} if url == RUN else {"grader": grader})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_type_is_told_which_there_are(api):
    message = api.post(VALIDATE, json={"grader": {"type": "vibes", "name": "g"}}).json()["error"]["message"]

    assert "'string_check'" in message
    assert "'multi'" in message


def test_a_right_answer_earns_its_reward(api):
    report = run(api, item={"answer": "4"}).json()

    assert report["reward"] == 1.0
    assert (report["metadata"]["name"], report["metadata"]["type"]) == ("exact", "string_check")
    assert not any(report["metadata"]["errors"].values())


def test_a_wrong_answer_earns_nothing_and_is_no_error(api):
    report = run(api, item={"answer": "5"}).json()

    assert report["reward"] == 0.0
    assert not any(report["metadata"]["errors"].values())


@pytest.mark.parametrize("fields", [{}, {"item": None}, {"item": {"other": "4"}}])
def test_a_grader_that_fails_is_an_answer_too(api, fields):
    answer = run(api, **fields)

    assert answer.status_code == 200
    assert answer.json()["reward"] == 0.0
    assert answer.json()["metadata"]["errors"]["invalid_variable_error"] is True
    assert len(answer.json()["metadata"]["errors"]) == 24


def test_a_sample_that_is_json_can_be_read_as_such(api):
    grader = GRADER | {"input": "{{sample.output_json.answer}}"}

    assert run(api, grader, '{"answer": "4"}', item={"answer": "4"}).json()["reward"] == 1.0
    assert run(api, grader, "four", item={"answer": "4"}).json()["metadata"]["errors"]["sample_parse_error"]


def test_the_parts_of_a_multi_grader_are_shown(api):
    multi = {"type": "multi", "name": "m", "graders": {"a": GRADER}, "calculate_output": "0.5 * a"}

    report = run(api, multi, item={"answer": "4"}).json()

    assert (report["reward"], report["sub_rewards"]) == (0.5, {"a": 1.0})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "grader"),
        ({"grader": GRADER}, "model_sample"),
        ({"grader": GRADER, "model_sample": 4}, "model_sample"),
        ({"grader": GRADER, "model_sample": "4", "item": []}, "item"),
        ({"grader": GRADER, "model_sample": "4", "samples": 2}, "samples"),
    ],
)
def test_a_malformed_request_is_a_400(api, body, param):
    answer = api.post(RUN, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
