"""/docs: the documentation that `make docs` has built, from a folder and without a key."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

# The pages have inline scripts, and search runs in a worker. Nothing may be loaded from, or sent to, another host.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; worker-src 'self' blob:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers ask whether a page has changed, by its etag, so that an upgrade shows at once.
    "cache-control": "no-cache",
}


def router(folder: Path) -> APIRouter:
    """Routes for the site in `folder`, or none where no site has been built."""
    routes = APIRouter(include_in_schema=False)
    if not (folder / "index.html").is_file():
        return routes
    files = StaticFiles(directory=folder, html=True)

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    async def home() -> Response:
        return RedirectResponse("/docs/")

    @routes.api_route("/docs/{path:path}", methods=["GET", "HEAD"])
    async def page(request: Request, path: str) -> Response:
        if "\0" in path:
            raise HTTPException(404)
        response = await files.get_response(path or ".", request.scope)
        response.headers.update(SECURITY_HEADERS)
        return response

    return routes
