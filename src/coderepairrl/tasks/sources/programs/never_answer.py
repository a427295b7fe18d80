"""Holds a port of localhost where no connection is ever made or refused: the queue of its one listener is full, and the
kernel drops what else asks. Prints the port."""

import signal
import socket

listener = socket.create_server(("127.0.0.1", 0), backlog=0)
waiting = socket.create_connection(listener.getsockname())  # as many as a queue of length 0 takes
print(listener.getsockname()[1], flush=True)
signal.pause()
