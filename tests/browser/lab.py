"""What the browser tests hold: a running JupyterLab, and a record of what a page did."""

import json
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Lab:
    """A running JupyterLab: its address, its token, and the folder it serves."""

    base: str
    token: str
    folder: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """Asks the server's REST API; the answer's JSON, or None where it has no body."""
        request = urllib.request.Request(f"{self.base}{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def page(self, name: str) -> str:
        """Address of a notebook in the Lab."""
        return f"{self.base}/lab/tree/{name}?token={self.token}"


@dataclass
class Watch:
    """What a page did besides showing itself: errors on its console, and requests to other hosts."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    num_requests: int = 0

    def follow(self, page: Any) -> None:
        """Listens to a page."""
        page.on("console", lambda m: self.errors.append(f"{m.text} ({m.location})") if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)
        page.on("websocket", lambda socket: self._seen(socket.url))

    def _requested(self, request: Any) -> None:
        self._seen(request.url)

    def _seen(self, url: str) -> None:
        self.num_requests += 1
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "file") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.outside.append(url)
