"""The node service and its clients: messages over a unix socket, or straight into a loop thread of this process."""
