"""A user id without an entry in /etc/passwd and without HOME, as `docker run --user 54321` gives a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def printed_by_unknown_user(imports: str, expression: str) -> str:
    """Print the expression as that user. Root imports the modules: the other user may not read the checkout."""
    code = (
        f"import os\n{imports}\nos.setgroups([])\nos.setgid({USER})\nos.setuid({USER})\nprint({expression})"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME")
        and not name.startswith(("REGRAFT_", "OPENAI_"))
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_cache_of_a_model_of_the_hub_is_looked_for() -> None:
    imports = (
        "from pathlib import Path\nfrom core.model_templates import folder_of\n"
        "from core.registry import BaseModelEntry"
    )

    assert printed_by_unknown_user(imports, "folder_of(BaseModelEntry(hub='a/b'), Path('/tmp'))") == "None"


def test_a_client_is_configured_by_its_arguments() -> None:
    find = "config.find('http://127.0.0.1:8000', 'key').base_url"

    assert printed_by_unknown_user("from regraft import config", find) == "http://127.0.0.1:8000/v1"


def test_a_login_names_the_variable_of_its_file() -> None:
    imports = (
        "from regraft import config\ndef refusal():\n    try:\n        return config.save(config.Login('u', 'k'))\n"
        "    except config.NotConfigured as refused:\n        return refused"
    )

    assert "set REGRAFT_CONFIG" in printed_by_unknown_user(imports, "refusal()")
