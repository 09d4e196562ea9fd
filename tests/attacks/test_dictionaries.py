"""Requests put together from what has hurt servers before, against the real one: no answer is a server error.

REGRAFT_FUZZ_EXAMPLES sets how many are drawn for each test (default: 25). A night takes 20,000.
"""

import os
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.errors import UnsupportedSchema

from tests.attacks.conftest import GRADER, Attacked

EXAMPLES = int(os.environ.get("REGRAFT_FUZZ_EXAMPLES", "25"))
fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize="REGRAFT_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

COUNTS = st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**63, 10**8, 10**9, 10**100, 1e300, -0.0, 1.5])
HOSTS = st.sampled_from(
    [
        "xn--",
        "xn--a",
        "xn--0",
        "xn--ls8h.example",
        "a.xn--",
        "xn--a" * 20,
        "faß.de",
        "bücher.example",
        "例え.jp",
        "\u202eexample.com",
        "a\u200db.example",
        "ⓛocalhost",
        "127。0。0。1",
        "0x7f.1",
        "2130706433",
        "[::]",
        "[::1%25lo]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b:1::7f00:1]",
        "168.63.129.16",
        "a" * 64 + ".example",
        "a." * 127 + "a",
        ".",
        "a..b",
        "",
        "user:pw@example.com",
        "example.com:99999",
        "example.com:0",
        "example.com\\@127.0.0.1",
        "[",
        "[::1",
        "%00",
    ]
)
TEXTS = st.sampled_from(["", "\0", "\u202e", "{{", "{{item." + "a." * 500 + "a}}"])


def finally_blocks(depth: int, ways: int) -> str:
    """Nested try statements with `ways` ways out of each."""
    lines = ["def grade(sample, item):"]
    for level in range(depth):
        pad = " " * (level + 1)
        lines += [
            f"{pad}try:",
            *(f"{pad} if item.get({way}): return {way}" for way in range(ways)),
            f"{pad}finally:",
        ]
    return "\n".join([*lines, " " * (depth + 2) + "return 1"])


SOURCES = st.one_of(
    st.builds(finally_blocks, st.integers(1, 19), st.integers(0, 4)),
    st.builds(
        lambda n: "def grade(sample, item): return " + "(" * n + "1" + ")" * n,
        st.sampled_from([90, 199, 5000]),
    ),
    st.builds(lambda n: "def grade(sample, item): return " + "-" * n + "1", st.sampled_from([100, 20_000])),
    st.builds(lambda n: "def grade(sample, item): return 1" + "+1" * n, st.sampled_from([100, 20_000])),
    st.builds(
        lambda n: "def grade(sample, item): return f'" + "{item:" * n + "}" * n + "'",
        st.sampled_from([2, 150]),
    ),
    st.just("x = '\\N{' + 'a' * 10\ndef grade(sample, item): return 1"),
    st.just(
        "def grade(sample, item):\n"
        + "".join(" " * n + "if 1:\n" for n in range(1, 120))
        + " " * 120
        + "return 1"
    ),
)
MATHEMATICS = st.sampled_from(
    [
        "10E99999999",
        r"\boxed{\sqrt[10^{-9}]{7}}",
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{" + "(a+b)" * 20 + "}",
        r"\boxed{" + r"\frac{1}{" * 40 + "1" + "}" * 40 + "}",
        r"\boxed{\int_0^1 x^x dx}",
        r"\boxed{100000!}",
        "0." + "1" * 5000,
    ]
)
PATTERNS = st.sampled_from(
    ["(a+)+$", "(a|a)*b", "a{1000000000}", "(?:a{1000}){1000}", "[" * 500, "(" * 5000 + ")" * 5000]
)


def keyworded(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A JSON schema around others, with a count that it may not have."""
    return st.one_of(
        st.builds(lambda one, n: {"type": "array", "items": one, "minItems": n}, inner, COUNTS),
        st.builds(
            lambda one, n: {"type": "array", "items": one, "maxItems": n, "minItems": n}, inner, COUNTS
        ),
        st.builds(
            lambda one: {"type": "object", "properties": {"a": one, "b": one}, "required": ["a"]}, inner
        ),
        st.builds(lambda one, other: {"anyOf": [one, other] * 10}, inner, inner),
        st.builds(lambda one: {"$defs": {"a": one}, "$ref": "#/$defs/a"}, inner),
    )


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda n: {"type": "string", "minLength": n}, COUNTS),
    st.builds(lambda n: {"type": "string", "maxLength": n}, COUNTS),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
    st.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n}, COUNTS),
    st.builds(lambda n: {"enum": [f"{number}" for number in range(n)]}, st.sampled_from([1, 5000])),
    st.just({"$ref": "#"}),
)
SCHEMAS = st.recursive(LEAVES, keyworded, max_leaves=6)


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


GRADERS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda source: {"type": "python", "name": "p", "source": source}, SOURCES),
    st.builds(lambda text: GRADER | {"input": text}, TEXTS),
    st.builds(lambda n: GRADER | {"input": "{{sample.output_text}}" * n}, st.sampled_from([1, 2000])),
    st.builds(
        lambda pattern: {"type": "format", "name": "f", "input": "{{sample.output_text}}", "pattern": pattern}, PATTERNS
    ),
    st.just({"type": "math", "name": "m", "input": "{{sample.output_text}}", "reference": "1"}),
    st.builds(
        lambda n: {
            "type": "multi", "name": "m", "calculate_output": "+".join(["g"] * n), "graders": {"g": GRADER},
        },
        st.sampled_from([1, 500, 50_000]),
    ),
    st.builds(
        lambda host: {"type": "endpoint", "name": "e", "url": f"http://{host}/"}, HOSTS
    ),
)  # fmt: skip


def assert_no_server_error(answer: httpx.Response) -> None:
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    assert answer.json()


def test_no_host_of_a_webhook_is_a_server_error(contained: Attacked) -> None:
    with contained.client() as client:

        @fuzzed
        @given(HOSTS, st.sampled_from(["http", "https", "HTTPS", "ftp", ""]))
        def send(host: str, scheme: str) -> None:
            body = {"name": "w", "url": f"{scheme}://{host}/", "event_types": ["fine_tuning.job.succeeded"]}
            assert_no_server_error(client.post("/webhook_endpoints", json=body))

        send()


def test_no_schema_of_a_job_is_a_server_error(contained: Attacked) -> None:
    with contained.client() as client:

        @fuzzed
        @given(SCHEMAS)
        def send(schema: dict[str, Any]) -> None:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            method = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "response_format": form}}
            body = {"model": "tiny", "training_file": "file-a", "validation_file": "file-b", "method": method}
            assert_no_server_error(client.post("/fine_tuning/jobs", json=body))

        send()


def test_no_grader_is_a_server_error(contained: Attacked) -> None:
    with contained.client() as client:

        @fuzzed
        @given(GRADERS, MATHEMATICS)
        def send(grader: dict[str, Any], text: str) -> None:
            assert_no_server_error(
                client.post("/fine_tuning/alpha/graders/validate", json={"grader": grader})
            )
            body = {"grader": grader, "model_sample": text, "item": {"a": "x" * 1000}}
            assert_no_server_error(client.post("/fine_tuning/alpha/graders/run", json=body))

        send()


def test_no_number_and_no_depth_is_a_server_error(contained: Attacked) -> None:
    fields = ["batch_size", "n_epochs", "eval_interval", "eval_samples", "learning_rate_multiplier"]
    with contained.client() as client:

        @fuzzed
        @given(st.sampled_from(fields), COUNTS, st.sampled_from([1, 50, 400]), COUNTS)
        def send(name: str, count: float, depth: int, limit: float) -> None:
            reinforcement = {"grader": GRADER, "hyperparameters": {name: count}}
            method = {"type": "reinforcement", "reinforcement": reinforcement}
            body = {"model": "tiny", "training_file": "file-a", "validation_file": "file-b", "method": method}
            assert_no_server_error(client.post("/fine_tuning/jobs", json=body | {"seed": count}))
            assert_no_server_error(client.post("/fine_tuning/jobs", json=body | {"metadata": deep(depth)}))
            assert_no_server_error(client.get("/files", params={"limit": limit, "after": str(count)}))

        send()


# Those whose bodies reach furthest; the long mode takes all that have one.
QUICK = {
    "/v1/fine_tuning/jobs",
    "/v1/fine_tuning/alpha/graders/run",
    "/v1/regraft/estimate",
    "/v1/webhook_endpoints",
    "/v1/uploads",
}


def spiced(draw: st.DrawFn, value: Any) -> Any:
    """The same with a word of a dictionary in place of some of its texts and numbers."""
    if isinstance(value, dict):
        return {key: spiced(draw, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [spiced(draw, inner) for inner in value]
    if isinstance(value, bool) or value is None or not draw(st.booleans()):
        return value
    if isinstance(value, str):
        return draw(st.one_of(TEXTS, SOURCES, MATHEMATICS, PATTERNS, HOSTS.map("https://{}/".format)))
    return draw(COUNTS)


def test_no_spiced_body_of_the_document_is_a_server_error(contained: Attacked) -> None:
    """Bodies as schemathesis makes them from the OpenAPI document, then with words of the dictionaries in them."""
    document = schemathesis.openapi.from_url(f"http://127.0.0.1:{contained.server.port}/openapi.json")
    many = "REGRAFT_FUZZ_EXAMPLES" in os.environ
    with contained.client() as client:
        for path, methods in document.raw_schema["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" not in content or not (many or path in QUICK) or "{" in path:
                continue
            cases = document[path]["post"].as_strategy(GenerationMode.POSITIVE)

            send_spiced(contained, client, path, cases, EXAMPLES if many else 5)


def send_spiced(attacked: Attacked, client: httpx.Client, path: str, cases: Any, examples: int) -> None:
    @settings(fuzzed, max_examples=examples)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        try:
            body = data.draw(cases).body
        except UnsupportedSchema:
            reject()
        spiced_body = data.draw(st.composite(lambda draw: spiced(draw, body))())
        assert_no_server_error(
            client.post(f"http://127.0.0.1:{attacked.server.port}{path}", json=spiced_body)
        )

    send()
