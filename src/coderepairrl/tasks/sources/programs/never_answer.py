"""Hold a port of localhost that never connects or refuses: its listener's queue is full. Prints the port."""

import signal
import socket

listener = socket.create_server(("127.0.0.1", 0), backlog=0)
waiting = socket.create_connection(listener.getsockname())  # as many as a queue of length 0 takes
print(listener.getsockname()[1], flush=True)
signal.pause()
