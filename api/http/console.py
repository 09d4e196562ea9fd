"""/: the console, a single page that `make setup` has built from console/, and its files under hashed names.

The page uses the endpoints that all users have. Everything it shows is text from models and users, so it may load and
run nothing but its own files.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

NOT_BUILT = "The console has not been built here: run `make console`. The documentation is at /docs, the API at /v1.\n"
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
NEVER_CHANGES = "public, max-age=31536000, immutable"


# By this the page knows that it may log in without a key.
SINGLE_SIGN_ON = '<head><meta name="regraft-single-sign-on" content="on" />'


def router(folder: Path, *, single_sign_on: bool = False) -> APIRouter:
    """Routes for the built console in `folder`."""
    routes = APIRouter(include_in_schema=False)
    index = folder / "index.html"
    is_built = index.is_file()
    files = StaticFiles(directory=folder) if is_built else None

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)  # as for any other address: clients of the API read JSON
        if files is None:
            return PlainTextResponse(NOT_BUILT, 404)
        response = await files.get_response("index.html", request.scope)
        if single_sign_on:
            response = HTMLResponse(index.read_text().replace("<head>", SINGLE_SIGN_ON, 1))
        response.headers.update(SECURITY_HEADERS | {"cache-control": "no-cache"})
        return response

    @routes.api_route("/assets/{name}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        if files is None or "\0" in name:
            raise HTTPException(404)
        response = await files.get_response(f"assets/{name}", request.scope)
        response.headers.update(SECURITY_HEADERS | {"cache-control": NEVER_CHANGES})
        return response

    return routes
