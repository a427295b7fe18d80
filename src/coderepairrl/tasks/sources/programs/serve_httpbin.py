"""Serve httpbin on a free port of localhost: HTTP, HTTPS, and a proxy to httpbin.org by HTTPS.

Needs httpbin, werkzeug and trustme. Writes its certificate authority to the path given, then prints the port.
"""

import socket
import ssl
import sys

import trustme
from httpbin import app
from werkzeug.serving import WSGIRequestHandler, make_server

TLS_HANDSHAKE = b"\x16"
authority = trustme.CA()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
authority.issue_cert("httpbin.org", "localhost").configure_cert(context)


class Handler(WSGIRequestHandler):  # type: ignore[misc]
    """A connection, with or without TLS."""

    request: socket.socket
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Speak TLS if the client begins with it."""
        if self.request.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE:
            self.request = context.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_CONNECT(self) -> None:
        """Answer as the host that the proxy's client asks for."""
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self.setup()
        self.close_connection = False


server = make_server("localhost", 0, app, threaded=True, request_handler=Handler)
authority.cert_pem.write_to_path(sys.argv[1])
print(server.port, flush=True)
server.serve_forever()
