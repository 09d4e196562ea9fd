"""Check the API of a release: it is ready, and it lists its models. `helm test` runs it in the image `api`.

API_URL is the address of the API. API_KEY is its first key; without it the API has to refuse the list with 401.
RETRY_SECONDS is how long it waits for an API that cannot be reached or returns 503, as while its pods start.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["API_URL"]
KEY = os.environ.get("API_KEY", "")
DEADLINE = time.monotonic() + float(os.environ["RETRY_SECONDS"])


def main() -> None:
    status, body = get("/readyz")
    if status != 200:
        sys.exit(f"{URL}/readyz returned {status}: {body}. See the log of the API.")
    status, body = get("/v1/models")
    if not KEY and status == 401:
        report(
            "The API is ready, and refuses requests without a key. Set firstKey.existingSecret to test the models, too."
        )
    elif status == 401:
        sys.exit("The API refused the first key. If it was revoked, this test cannot list models.")
    elif status != 200:
        sys.exit(f"{URL}/v1/models returned {status}: {body}. See the log of the API.")
    else:
        models = [model["id"] for model in json.loads(body)["data"]]
        if not models:
            sys.exit("The API lists no model. Check `models` in the values.")
        report(f"The API is ready and lists {len(models)} models: {', '.join(models[:10])}")


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def get(path: str) -> tuple[int, str]:
    """Return status and body, after retries. A server that cannot be reached in time ends the test."""
    while True:
        try:
            status, body = request(path)
        except OSError as error:
            if time.monotonic() >= DEADLINE:
                sys.exit(f"{URL} cannot be reached: {error}. Check the API's pods and networkPolicy.")
        else:
            if status != 503 or time.monotonic() >= DEADLINE:
                return status, body
        time.sleep(1)


def request(path: str) -> tuple[int, str]:
    """Return status and body of one request. Raises OSError if the server cannot be reached."""
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(URL + path, headers=headers), timeout=30
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:1000]


main()
