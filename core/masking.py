"""Masks secrets where the API shows what users have stored: graders, endpoints, imported evals, and errors.

This module imports nothing of ours, so that graders can use it too.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"

# Names of fields, headers and parameters whose text is a secret, with any prefix: `bearer_token`, `X-Api-Key`.
_NAME = (
    r"[\w.-]*(?:authorization|api[-_]?key|access[-_]?key(?:[-_]?id)?|private[-_]?key|passw(?:or)?d|passphrase"
    r"|secret(?:[-_]?(?:access[-_]?)?key)?|credentials?|signature|token|cookie)"
)
_OPTION = re.compile(rf"--{_NAME}", re.IGNORECASE)
_SECRET_FIELD = re.compile(
    rf"{_NAME}|(?:[\w.-]*[_.-])?(?:auth[-_]?header|bearer|jwt|pat)", re.IGNORECASE
)  # in sentences the short names mean something else
# Objects whose every text is one: `credentials: {user, id}`.
_SECRET_OBJECT = re.compile(
    r"[\w.-]*(?:credentials?|secrets?|auth|authorization|authentication)", re.IGNORECASE
)
# Objects whose keys are the user's own names, or those of a schema.
_OWN_NAMES = (
    "graders",
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)
_HEADERS = re.compile(r"[\w.-]*headers", re.IGNORECASE)
# In the query of a URL also short names that mean something else in other places.
_QUERY_NAME = re.compile(
    rf"(?:{_NAME}|[\w.-]*[_-]?key|code|sig|auth|pwd|pass|jwt|session[-_]?id)(?:\[\w*\])?|auth\[\w+\]",
    re.IGNORECASE,
)
# Keys of these services and for these uses are secrets. Others are not: `answer_key`, `sort_key`, `primary_key`.
_OWNERS_OF_KEYS = (
    "account|admin|anthropic|auth|aws|azure|client|cohere|datadog|deepseek|deploy|encryption|fireworks|functions"
    "|gcp|gemini|github|gitlab|google|groq|hf|hmac|hugging[-_]?face|langfuse|langsmith|license|master|mistral|ngc"
    "|nvidia|openai|open[-_]?router|perplexity|pinecone|qdrant|replicate|sendgrid|service|session|shared|signing"
    "|slack|ssh|stripe|subscription|tavily|together|twilio|wandb|webhook|xai"
)
# In objects of other services, which mean more by such names than ours do.
_FOREIGN_NAME = re.compile(
    rf"(?:{_SECRET_FIELD.pattern}|{_SECRET_OBJECT.pattern}|(?:x[-_])?key|[\w.-]*(?:{_OWNERS_OF_KEYS})[-_.]?key"
    r"|sig|pwd|pass|session[-_]?id|[\w.-]*(?:api[-_]?key|passw(?:or)?d)s)(?:\[\w*\])?",
    re.IGNORECASE,
)
_LONGEST_NAME = 200  # beyond it the `name` of a foreign object is a text
_COUNTED = ("key", "pass")  # an object or a list with such a name may hold figures
_PARAMETER = re.compile(r"(?<=[?&;#])([^=?&;#\s]+)=([^&#\s]+)")
_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")
_ENDS_OF_USER = re.compile(r"([\s\"'<>@])")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
# Webhooks whose path is the secret: Slack's, Discord's and Microsoft's.
_SECRET_PATH = re.compile(
    r"(hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
    r"|webhook\.office\.com/webhookb2/)[^\s\"'<>?#]+",
    re.IGNORECASE,
)
_MASKED_URL = re.compile(
    rf"://{re.escape(MASK)}@|[?&;#][^?&;#=]+={re.escape(MASK)}(?=[&;#]|$)|/{re.escape(MASK)}(?=[?#]|$)"
)
# Secrets in the sentences of an error. A value has at least 6 characters: "unexpected token: a" is none.
# A text may have a megabyte, so no pattern may look at a part of it from each of its characters: those that begin with
# a run of characters begin where the run does.
_IN_TEXT = (
    # A private key in PEM, first of all: its line breaks would end the others. Without its last line, all that follows.
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?s:.*?)"
            r"(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
        ),
        MASK,
    ),
    # The scheme of a header may have any name.
    (
        re.compile(
            r"(?<![\w.-])((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:[A-Za-z][\w-]*\s+)?)(?!\*)[^\s\"',;&<>]{6,}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    # Cookies have several parts.
    (
        re.compile(r"(?<![\w.-])((?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)(?!\*)[^\"'\r\n]{6,}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (re.compile(r"(?<![\w.-])([\w.-]*headers[\"']?\s*[:=]\s*)\{[^{}]*\}", re.IGNORECASE), rf"\1{{{MASK}}}"),
    (re.compile(r"\b(Bearer +|Basic +(?=[A-Za-z+/]*[0-9=]))[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(rf"(?<![\w.-])({_NAME}[\"']?\s*[:=]\s*)([\"'])(?!\*)(?:(?!\2).){{6,}}\2", re.IGNORECASE),
        rf"\1\2{MASK}\2",
    ),
    (
        re.compile(
            rf"(?<![\w.-])({_NAME}[\"']?\s*[:=]\s*)(?!Bearer |Basic |[\"'*])[^\s\"',&<>]{{6,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    # Options of commands: `--api-key VALUE`. A short word without a digit is one of a sentence.
    (
        re.compile(
            rf"(?<![\w.-])({_OPTION.pattern}[ \t]+)(?:([\"'])(?!\*)(?:(?!\2).){{6,}}\2"
            r"|(?![\"'*-])(?=[^\s\"',;&<>\d]*\d|[^\s\"',;&<>]{12})[^\s\"',;&<>]{6,})",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    # Keys whose first characters say what they are: OpenAI's and ours, Hugging Face's, GitHub's, GitLab's, Google's,
    # Slack's and AWS's; npm's, Groq's and Stripe's, which have no hyphen or underscore; PyPI's; and SendGrid's.
    (
        re.compile(
            r"\b(sk-|rg-|hf_|gh[opsu]_|github_pat_|glpat-|AIza|xox[a-z]-|AKIA|ASIA)[\w-]{12,}"
            r"|\b(npm_|gsk_|sk_live_)[A-Za-z0-9]{20,}|\b(pypi-AgE)[\w-]{20,}|\b(SG\.)[\w-]{16,}\.[\w-]{20,}"
        ),
        rf"\1\2\3\4{MASK}",
    ),
    # JSON web tokens, signed and encrypted.
    (re.compile(r"(?<![\w-])eyJ[\w-]{8,}(?:\.[\w-]*){2,4}"), MASK),
)


# A file of a machine, and an address of one. Not the path of a URL, which follows a host, and not a route of the API,
# which begins with /v1.
_MACHINE_FILE = re.compile(r"(?<![\w./:-])(?!/v1/)(?:file://)?/(?:[\w.@+~-]+/)+[\w.@+~-]*")
_MACHINE_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w.])")


def hide_addresses(text: str) -> str:
    """Return an error text without the files and addresses of our machines, for clients of an API."""
    return _MACHINE_ADDRESS.sub(MASK, _MACHINE_FILE.sub(MASK, text))


def hide_secrets(value: Any) -> Any:
    """Return JSON with its secrets masked, checked or not: a grader, or what another service has exported.

    Masks the values of headers, the text of fields and all texts of objects with the names of secrets, and, in texts
    that are a URL, the user and password and the query parameters with such names. Other texts, such as prompts and
    source code, are unchanged.
    """
    if isinstance(value, Mapping):
        return {name: _hidden(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hide_secrets(inner) for inner in value]
    if isinstance(value, str) and _URL.fullmatch(value.strip()):
        return _hide_in_urls(value)
    return value


def hide_in_method(method: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a job's method with the secrets of its graders and its tools masked."""
    return {
        name: hide_secrets(value) if name in ("grader", "shadow_grader", "tools") else value
        for name, value in method.items()
    }


def hide_in_error(value: Any) -> Any:
    """Return an error, a sentence or JSON, with secrets masked also inside its sentences."""
    return _hide_in_texts(hide_secrets(value))


def _hide_in_texts(value: Any) -> Any:
    """Mask inside each text, and the text that follows an option with the name of a secret in a list."""
    if isinstance(value, Mapping):
        return {name: _hide_in_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [
            MASK if _is_of_option(before, inner) else _hide_in_texts(inner)
            for before, inner in zip([None, *value], value, strict=False)
        ]
    if not isinstance(value, str):
        return value
    text = _hide_in_urls(_hide_quoted_passwords(value))
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def _is_of_option(before: Any, value: Any) -> bool:
    """Whether a text of a list is the value of the option before it: `["--api-key", "..."]`."""
    are_texts = isinstance(before, str) and isinstance(value, str)
    return are_texts and not value.startswith("--") and _OPTION.fullmatch(before) is not None


def hide_in_foreign(value: Any) -> Any:
    """Mask the secrets of an object of unknown meaning.

    As `hide_in_error`, and texts, objects and lists with further names, such as `pwd` and `openai_key`, and the value
    beside a name of a secret: `{"name": "API_KEY", "value": "..."}`.
    """
    return hide_in_error(_without_named(value))


def _without_named(value: Any, *, has_own_names: bool = False) -> Any:
    """Mask by the names of fields. Of objects with the user's own names, no object is masked by its name."""
    if isinstance(value, list):
        return [_without_named(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    labels = (inner for name, inner in value.items() if name.lower() in ("name", "key"))
    is_pair = any(isinstance(label, str) and _names_secret(label) for label in labels)
    hidden = {}
    for name, inner in value.items():
        may_be = bool(inner) and isinstance(inner, str | list | Mapping)
        is_own = has_own_names and isinstance(inner, Mapping)
        is_counted = name.lower() in _COUNTED and not isinstance(inner, str)
        is_secret = (_names_secret(name) and not is_own and not is_counted) or (
            is_pair and name.lower() == "value"
        )
        hidden[name] = (
            _masked_texts(inner)
            if may_be and is_secret
            else _without_named(inner, has_own_names=name in _OWN_NAMES)
        )
    return hidden


def _names_secret(name: str) -> bool:
    if len(name) > _LONGEST_NAME:
        return False
    return _FOREIGN_NAME.fullmatch(name.strip().replace(" ", "_")) is not None


def mask_values(text: str, secrets: Collection[str]) -> str:
    """Return the text with these secrets masked, of which the scheme is none: `Bearer`.

    Those of fewer than 6 characters stay, since other text may contain them by chance.
    """
    parts = {part for secret in secrets for part in (secret, secret.rpartition(" ")[2]) if len(part) >= 6}
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, MASK)
    return text


def masked_path(value: Any, path: str, *, is_hidden: bool = False) -> str | None:
    """The path of a text that is masked as `hide_secrets` does; None: there is none.

    Args:
        path: of `value`.
        is_hidden: `hide_secrets` masks every text in `value`.
    """
    if isinstance(value, str):
        is_masked = (
            MASK in value if is_hidden else _URL.fullmatch(value.strip()) and _MASKED_URL.search(value)
        )
        return path if is_masked else None
    if isinstance(value, Mapping):
        names = path.endswith(tuple(f".{name}" for name in _OWN_NAMES))
        parts = (
            masked_path(
                inner,
                f"{path}.{name}",
                is_hidden=is_hidden or (not (names and isinstance(inner, Mapping)) and _hides(name, inner)),
            )
            for name, inner in value.items()
        )
    elif isinstance(value, list):
        parts = (
            masked_path(inner, f"{path}[{number}]", is_hidden=is_hidden) for number, inner in enumerate(value)
        )
    else:
        return None
    return next(filter(None, parts), None)


def _hidden(name: str, value: Any) -> Any:
    if name in _OWN_NAMES and isinstance(value, Mapping):
        return {
            key: hide_secrets(inner) if isinstance(inner, Mapping) else _hidden(key, inner)
            for key, inner in value.items()
        }
    return _masked_texts(value) if _hides(name, value) else hide_secrets(value)


def _hides(name: str, value: Any) -> bool:
    """Whether all texts of the field are masked."""
    is_text = isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    )
    if isinstance(value, Mapping) and _SECRET_OBJECT.fullmatch(name):
        return True
    return bool(_HEADERS.fullmatch(name) or (is_text and value and _SECRET_FIELD.fullmatch(name)))


def _masked_texts(value: Any) -> Any:
    """The value with each text in it masked, except for the names of its fields."""
    if isinstance(value, Mapping):
        return {name: _masked_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked_texts(inner) for inner in value]
    return value if value is None else MASK


def secrets_of_headers(headers: Mapping[str, str]) -> list[str]:
    """The values of headers with names of secrets, such as Authorization and Cookie."""
    return [value for name, value in headers.items() if _SECRET_FIELD.fullmatch(name)]


def secrets_of(url: str) -> list[str]:
    """The values of the query's parameters that `hide_secrets` masks."""
    return [unquote(value) for name, value in _PARAMETER.findall(url) if _QUERY_NAME.fullmatch(unquote(name))]


def _hide_quoted_passwords(text: str) -> str:
    """Mask users and passwords with a slash. They are no valid part of a URL, and drivers quote such URLs."""
    parts = _ENDS_OF_USER.split(text)
    for number, end in enumerate(parts[1::2]):
        before, scheme, user = parts[2 * number].partition("://")
        if end == "@" and ":" in user:
            parts[2 * number] = f"{before}{scheme}{MASK}"
    return "".join(parts)


def _hide_in_urls(text: str) -> str:
    text = _SECRET_PATH.sub(rf"\1{MASK}", _USER_OF_URL.sub(f"{MASK}@", text))
    return _PARAMETER.sub(_hidden_parameter, text)


def _hidden_parameter(found: re.Match[str]) -> str:
    name, value = found.groups()
    if not _QUERY_NAME.fullmatch(unquote(name)):
        return found[0]
    # In a sentence a comma or a quotation mark may end the URL.
    return f"{name}={MASK}{value[len(value.rstrip(',.)')) :]}"
