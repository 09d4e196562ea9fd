"""Configuration of server and key: arguments, the environment, or the file written by `regraft login`."""

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from regraft._rules.system_errors import file_problem


class NotConfigured(Exception):
    """No server or no key is configured."""


@dataclass(frozen=True)
class Login:
    base_url: str
    api_key: str


def config_file() -> Path:
    """REGRAFT_CONFIG, or config.toml in the user's configuration folder.

    Raises:
        NotConfigured: the user has no home folder.
    """
    if path := os.environ.get("REGRAFT_CONFIG"):
        return Path(path)
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:
        raise NotConfigured(
            "This user has no home folder: set REGRAFT_CONFIG to the path of a file."
        ) from None
    return Path(home) / "regraft" / "config.toml"


def find(base_url: str | None = None, api_key: str | None = None) -> Login:
    """Return the arguments, else REGRAFT_BASE_URL and REGRAFT_API_KEY, else the saved login.

    A saved key is only sent to the server for which it was saved.

    Raises:
        NotConfigured: no server or no key is configured.
    """
    saved = _saved()
    url = base_url or os.environ.get("REGRAFT_BASE_URL") or (saved.base_url if saved else None)
    if url is None:
        raise NotConfigured("No server is configured: run `regraft login`, or set REGRAFT_BASE_URL.")
    key = api_key or os.environ.get("REGRAFT_API_KEY")
    if key is None and saved and normal(saved.base_url) == normal(url):
        key = saved.api_key
    if key is None:
        raise NotConfigured(f"There is no API key for {url}: run `regraft login`, or set REGRAFT_API_KEY.")
    return Login(normal(url), key)


def save(login: Login) -> Path:
    """Save a login, readable only by this user."""
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # A JSON string is also a TOML string.
    text = f"base_url = {json.dumps(login.base_url)}\napi_key = {json.dumps(login.api_key)}\n"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
    return path


def normal(url: str) -> str:
    """Append /v1 if it is missing."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _saved() -> Login | None:
    try:
        path = config_file()
    except NotConfigured:
        return None
    try:
        values = tomllib.loads(path.read_text())
        return Login(values["base_url"], values["api_key"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as cause:
        raise NotConfigured(
            f"{path} cannot be read ({file_problem(cause)}): run `regraft login` again, or delete it."
        ) from cause
