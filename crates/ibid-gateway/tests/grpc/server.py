"""A stock grpcio server: server.py

Prints its port. Answers every unary call to shop.Orders/Create with how many have run, this one included, and
shop.Orders/Runs with the same without counting.
"""

from concurrent import futures

import grpc

runs = 0


def create(request, context):
    global runs
    runs += 1
    return str(runs).encode()


handlers = {
    "Create": grpc.unary_unary_rpc_method_handler(create),
    "Runs": grpc.unary_unary_rpc_method_handler(lambda request, context: str(runs).encode()),
}
# One at a time, so that counting needs no lock.
server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shop.Orders", handlers)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
