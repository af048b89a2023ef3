"""Serves the files of one folder on loopback, as fast as the kernel can: ``server.py FOLDER``; says its port."""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with (FOLDER / Path(self.path).name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("ETag", f'"{size}"')
            self.end_headers()
            self.wfile.flush()
            sent = 0
            while sent < size:
                sent += os.sendfile(self.connection.fileno(), file.fileno(), sent, size - sent)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
