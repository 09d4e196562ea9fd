"""`regraft-server environments`: install the packages of python graders."""

import argparse

from graders.environments.build import BuildFailed, build
from graders.environments.catalog import DEFAULT, UnknownEnvironment
from worker.cli.configuration import read_settings
from worker.cli.parser import UsageError


def main(arguments: argparse.Namespace) -> int:
    """Build an environment, unless it exists and is up to date."""
    folder = read_settings().grader_environments
    try:
        environment, built = build(folder, arguments.tag or DEFAULT, arguments.nltk_data)
    except (UnknownEnvironment, BuildFailed) as failed:
        raise UsageError(str(failed)) from failed
    print(f"{environment.folder}: {'built' if built else 'up to date'}")
    return 0
