"""Hold a port of localhost that neither accepts nor refuses connections: its queue is full. Prints the port."""

import signal
import socket

listener = socket.create_server(("127.0.0.1", 0), backlog=0)
waiting = socket.create_connection(listener.getsockname())  # fills the queue, which takes one with a backlog of 0
print(listener.getsockname()[1], flush=True)
signal.pause()
