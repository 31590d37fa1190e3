"""The web server: access control, limits, and errors.

It is the server of the standard library, with a thread and a single request per connection. `App` computes the answers.
"""

import errno
import io
import ipaddress
import os
import socket
import socketserver
import sys
import threading
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from .app import App
from .gate import Busy
from .messages import HEADER_SECONDS, Request, RequestError, Response, TimedSocket

MAX_CONNECTIONS = 64
SILENT_SECONDS = 20.0  # an idle connection is closed; `messages` limits slow ones
LINGER_BYTES, LINGER_SECONDS = 64 * 2**20, 5.0
GONE = (ConnectionError, TimeoutError)  # the visitor has left

HEADERS = {
    # No content from other sites, no inline code, and no embedding in other pages.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def open_server(app: App, *, host: str, port: int) -> "ExploreServer":
    """Bind the address. `serve_forever` of the server then answers requests. Port 0 chooses a free port."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port}; expected 0 (any free one) to 65535")
    try:
        return ExploreServer(app, host=host, port=port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use: end the program that has it, or choose another with --port "
                "(0 takes any free one)"
            ) from error
        raise ValueError(f"cannot listen on port {port} of {host!r}: {error.strerror or error}") from error


class ExploreServer(socketserver.ThreadingTCPServer):
    daemon_threads = True  # open connections do not keep the program alive
    block_on_close = False
    allow_reuse_address = os.name != "nt"  # on Windows it would let two programs share a port
    request_queue_size = 64

    def __init__(self, app: App, *, host: str, port: int) -> None:
        self.app = app
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    @property
    def host(self) -> str:
        return str(self.server_address[0])

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        host = "localhost" if ipaddress.ip_address(self.host).is_unspecified else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(timeout=SILENT_SECONDS):  # further connections wait in the queue of the system
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread was started that would release the connection
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        # Ctrl-C while a request is handed to its thread closes the connection (EBADF).
        if not isinstance(error, GONE) and getattr(error, "errno", None) != errno.EBADF:
            traceback.print_exc()


def names_this_machine(host_header: str | None, *, bound_to: str) -> bool:
    """Whether a Host header is a valid name of this server.

    Another site can make its own name resolve to this machine. To a browser, it then has the same origin as this page
    (DNS rebinding). IP addresses and the name of the machine are safe.
    """
    try:
        host = urlsplit(f"//{host_header or ''}").hostname or ""
    except ValueError:
        return False
    local = ipaddress.ip_address(bound_to).is_loopback
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or (not local and host in (name := socket.gethostname().lower(), f"{name}.local"))
    return address.is_loopback or not local


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    timeout = SILENT_SECONDS
    server_version, sys_version = "inline-explore", ""

    def setup(self) -> None:
        super().setup()
        self._source = TimedSocket(self.connection, seconds=HEADER_SECONDS)
        self.rfile = io.BufferedReader(self._source)

    def do_GET(self) -> None:
        # The query string is ignored.
        request = Request(self.command, self.path.partition("?")[0], self.headers, self.rfile, self._source)
        try:
            self._check_sender()
            response = self.server.app.answer(request)
        except RequestError as error:
            response = Response.json({"error": str(error)}, status=error.status)
        except Busy as error:
            headers = {"Retry-After": "5"}
            response = Response.json({"error": str(error)}, status=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers)
        except GONE:
            raise
        except Exception:
            traceback.print_exc()
            message = "an error occurred on the server; its terminal shows the details"
            response = Response.json({"error": message}, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(response)
        if request.has_unread_body:
            self._linger()

    do_POST = do_GET

    def _check_sender(self) -> None:
        """Raise an error if the request comes from another page."""
        host = self.headers.get("Host")
        if not names_this_machine(host, bound_to=self.server.host):
            raise RequestError(HTTPStatus.FORBIDDEN, f"{host!r} is not the name of this server: open {self.server.url}")
        origin = self.headers.get("Origin")
        if origin not in (None, f"http://{host}"):
            raise RequestError(HTTPStatus.FORBIDDEN, "requests of other pages are not answered")
        # Browsers send this even without an origin. A link on another page may open this one.
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and self.path != "/":
            raise RequestError(HTTPStatus.FORBIDDEN, "requests of other pages are not answered")

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in {**HEADERS, **response.headers}.items():
            self.send_header(name, value)
        if isinstance(response.body, bytes):
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)
            return
        self.end_headers()
        for part in response.body:  # ends with an exception if the visitor has left
            self.wfile.write(part)

    def _linger(self) -> None:
        """Read the rest of the request, within limits. A browser shows no answer until it has sent its request."""
        self.connection.shutdown(socket.SHUT_WR)
        self._source.allow(LINGER_SECONDS)
        left = LINGER_BYTES
        while left > 0 and (part := self.rfile.read1(2**16)):
            left -= len(part)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that the standard library refuses: malformed ones and unknown methods."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(Response.json({"error": message or status.phrase}, status=status))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is for errors."""
