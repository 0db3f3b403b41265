"""Visit the pages of a folder in a headless browser, and list what is wrong with each.

`serve` makes the folder reachable on a local port, since a browser lets no script of a local file
read another file, as the search does. A `Visitor` opens its pages at one width. `Visit.faults` are
texts for the reader of a failed test:

- an error or a warning on the console, or an exception that no script caught;
- a request that failed, or that left the folder: the pages need no network;
- an image without a picture or without a text for readers who do not see it;
- a page wider than its window. Elements that scroll by themselves, such as code, may be wider.

`Visitor.broken_links` opens the targets of a page's links, and needs the ids that scripts add.
"""

import contextlib
import dataclasses
import functools
import http.server
import pathlib
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
"""Names of the browser's program, in the order in which they are tried."""

WIDTHS = (1280, 390)
"""Widths of a laptop's window and of a phone, in pixels."""

_SEEN = """async () => {
  const faults = [];
  const say = (element) => {
    const text = (element.textContent || "").trim().replace(/\\s+/g, " ").slice(0, 50);
    const classes = (element.getAttribute("class") || "").trim().replace(/\\s+/g, ".");
    return element.tagName.toLowerCase() + (classes && "." + classes) + (text && ` '${text}'`);
  };
  for (const image of document.images) {
    const name = image.getAttribute("src");
    image.loading = "eager";
    try { await image.decode(); } catch { faults.push(`the image ${name} has no picture`); }
    if (!(image.getAttribute("alt") || "").trim()) {
      faults.push(`the image ${name} has no alt text`);
    }
  }
  await document.fonts.ready;
  await new Promise((done) => setTimeout(done, 50));  // scripts that start after loading
  const root = document.scrollingElement;
  if (root.scrollWidth > window.innerWidth) {
    const keeps = (e) => getComputedStyle(e).overflowX !== "visible";  // what is wider inside
    const isKept = (e) => e && e !== document.body && (keeps(e) || isKept(e.parentElement));
    const right = (e) => e.getBoundingClientRect().left +
      Math.max(e.getBoundingClientRect().width, keeps(e) ? 0 : e.scrollWidth);
    const wide = [...document.body.querySelectorAll("*")].filter(
      (e) => right(e) > window.innerWidth + 1 && !isKept(e.parentElement));
    const causes = wide.filter((e) => !wide.some((other) => other !== e && e.contains(other)));
    faults.push(`scrolls sideways: ${root.scrollWidth} px in a window of ${window.innerWidth} px: ` +
      causes.slice(0, 5).map(say).join(", "));
  }
  return {
    faults,
    ids: [...document.querySelectorAll("[id], a[name]")].map((e) => e.id || e.name),
    links: [...document.querySelectorAll("a[href]")].map((e) => e.href),
  };
}"""
"""What a page's elements show once it has loaded: faults, ids and targets of links."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """One page at one width.

    Attributes:
      faults: what is wrong with the page, except its links.
      ids: fragments that links to the page may have.
      links: targets of the page's links, as complete addresses.
    """

    faults: list[str]
    ids: frozenset[str]
    links: frozenset[str]


class Visitor:
    """A window of one width, and the visits made with it.

    Attributes:
      address: where the folder is served, with a slash.
      page: Playwright's page, for what a test does itself.
      problems: faults that were noticed outside the page's elements since the last visit began.
    """

    def __init__(self, browser: Any, folder: pathlib.Path, address: str, width: int) -> None:
        """Open a window of `width` pixels for the pages of `folder`, served at `address`."""
        self._folder, self.address = folder, address
        self._visits: dict[str, Visit] = {}
        self.problems: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.on("request", self._on_request)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.on("requestfailed", lambda request: self._failed(request, request.failure))
        self.page.on("response", self._on_response)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.problems.append(f"needs the network: {request.url}")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _failed(self, request: Any, why: object) -> None:
        self.problems.append(f"request failed: {request.url}: {why}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 400:
            self._failed(response.request, response.status)

    def visit(self, name: str) -> Visit:
        """Return the visit of a page, which is opened the first time.

        Args:
          name: path of the page in the folder, with a query if it needs one.
        """
        if name not in self._visits:
            self.problems.clear()
            self.page.goto(self.address + name)
            seen = self.page.evaluate(_SEEN)
            faults = [*self.problems, *seen["faults"]]
            self._visits[name] = Visit(faults, frozenset(seen["ids"]), frozenset(seen["links"]))
        return self._visits[name]

    def broken_links(self, name: str) -> list[str]:
        """Return the links of a page that lead nowhere in the folder, each with the reason."""
        broken = []
        for link in sorted(self.visit(name).links):
            if not link.startswith(self.address):
                if not link.startswith(("https://", "mailto:")):
                    broken.append(f"{link}: outside the site")
                continue
            parts = urllib.parse.urlsplit(link)
            target = urllib.parse.unquote(parts.path).removeprefix("/") or "index.html"
            if not (self._folder / target).is_file():
                broken.append(f"{link}: no such file")
                continue
            anchor = urllib.parse.unquote(parts.fragment)
            if anchor and target.endswith(".html") and anchor not in self.visit(target).ids:
                broken.append(f"{link}: no such anchor")
        return broken


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve files, and log nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer without content if a page that names no icon makes the browser ask for one."""
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: pathlib.Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine, and yield its address, with a slash."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def launch(playwright: Any, chromium: str) -> Any:
    """Start a browser that reaches this machine only.

    Requests could be refused one by one, but then the browser would keep no style sheet and no
    script from one page to the next.
    """
    rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    return playwright.chromium.launch(executable_path=chromium, args=[rules])


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, None if there is none."""
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
