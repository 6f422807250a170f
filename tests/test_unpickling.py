"""All places that unpickle, and what makes sure that no stranger has written what they read."""

import ast

from sources import FILES, ROOT, tree_of

READERS = {
    "pickle": ("load", "loads", "Unpickler"),
    "cloudpickle": ("load", "loads", "Unpickler"),
    "marshal": ("load", "loads"),
    "shelve": ("open",),
    "joblib": ("load",),
    "torch": ("load",),
    "rpc": ("rpc_sync", "rpc_async", "remote"),
}

OWN = "it was packed by the same process"
SOCKET_PAIR = "it came over a socket pair, which only this process and its children have"
NAMELESS = "it is in memory without a name, whose descriptor came over such a socket pair"
PRIVATE_FILE = "read_private: a file that only this user has written"
CHOSEN = "the user has named the file, and given --unsafe-pickle"
SEALED = "unseal: an HMAC with a key that only the driver and this worker have"
CARRIED = "it is part of a message that was read elsewhere"
RAY = "Ray brings it, which is trusted; or the line to the driver, which unseals it"
RPC = "none: torch.distributed.rpc unpickles what comes to it (docs/clusters.md says so)"

PLACES = {
    "backends/failure.py: Failure.original": CARRIED,
    "backends/failure.py: _can_be_sent": OWN,
    "backends/failure.py: _pickled": OWN,
    "backends/inline.py: _InlinePort.send": OWN,
    "extras/clusters/launching/submitit.py: _run_private": PRIVATE_FILE,
    "backends/portable.py: PortableWorker.receive": SOCKET_PAIR,
    "backends/portable.py: _Port.make_service": SOCKET_PAIR,
    "backends/portable.py: _Port._receive": SOCKET_PAIR,
    "backends/processes/payload.py: Shared.__reduce__": SOCKET_PAIR,
    "backends/processes/payload.py: unpack": SOCKET_PAIR,
    "backends/processes/payload.py: _Unpickler": CARRIED,
    "extras/clusters/ray/actor.py: RayActor.backend_ask": OWN,
    "extras/clusters/network/frames.py: _Unpickler": SEALED,
    "extras/clusters/network/frames.py: read_delivery": RAY,
    "extras/clusters/network/rank.py: Rank.make_service": CARRIED,
    "backends/ipc.py: IpcConnection.receive": SOCKET_PAIR,
    "testing/env_checks.py: Subject.another": "what it has pickled itself",
    "extras/cli/evaluate.py: _normalization": "torch.load with weights_only=True",
    "extras/cli/statistics.py: load_statistics": "torch.load with weights_only=True",
    "extras/cli/policies.py: load_file": CHOSEN,
    "collectors/workers/assembler.py: WorkerBatch.batch": CARRIED,
    "extras/clusters/ray/eval_worker.py: _actor_class.EvaluationActor.evaluate": RAY,
    "collectors/workers/pool.py: WorkerPool.call": CARRIED,
    "envs/capture/pickling.py: _Unpickler": "only what this program signed, or the user trusts",
    "data/state_files.py: read_state": "torch.load with weights_only=True",
    "data/state_files.py: _read_back": "torch.load with weights_only=True",
    "data/state_files.py: _unreadable": "torch.load with weights_only=True",
    "collectors/workers/snapshots.py: recover": CARRIED,
    "collectors/workers/service.py: CollectorService._call": CARRIED,
    "envs/attributes.py: packed_result": CARRIED,
    "envs/processes/own_process.py: _unpacked": CARRIED,
    "envs/build.py: EnvCopy.__call__": CARRIED,
    "envs/env_member.py: EnvMember.set_reset_kwargs": CARRIED,
    "envs/processes/workers.py: EnvWorkers.apply": CARRIED,
    "weights/store.py: _File.__init__": NAMELESS,
    "extras/clusters/compat/network_transports.py: RPCTransport.send_weights_async": RPC,
    "compat/transports.py: "
    "SharedMemTransport.setup_connection_and_weights_on_receiver": SOCKET_PAIR,
    "weights/tensors.py: unpacked_extra": CARRIED,
}

# Whoever makes a message of what came from a network has to unseal it.
MAKERS = {
    # From what it is given to send.
    "extras/clusters/network/frames.py: pack": OWN,
    "extras/clusters/network/frames.py: pack_code": OWN,
    "extras/clusters/network/frames.py: pack_for_ray": OWN,
    "extras/clusters/network/frames.py: seal": OWN,
    "extras/clusters/ray/backend.py: RayWorker._write": OWN,
    "extras/clusters/network/backend.py: RemoteWorker._give_up_reaching": OWN,
    "extras/clusters/network/backend.py: RemoteWorker.kill": OWN,
    "extras/clusters/network/backend.py: RemoteWorker.stop": OWN,
    "extras/clusters/network/weights.py: NetworkChannel._send_all": OWN,
    # From what it has read.
    "extras/clusters/network/control.py: _received": SEALED,
    "extras/clusters/network/frames.py: read_delivery": RAY,
    "extras/clusters/network/frames.py: unseal": SEALED,
}


def places(tree, path, wanted):
    """The functions of a program, by file and name, that have a node in them that is wanted."""
    found = set()

    def visit(node, names):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [*names, node.name]
        if wanted(node):
            found.add(f"{path}: {'.'.join(names)}")
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(tree, [])
    return found


def unpickles(node):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr in READERS.get(node.value.id, ())
    if isinstance(node, ast.ImportFrom):
        return any(name.name in READERS.get(node.module, ()) for name in node.names)
    if isinstance(node, ast.keyword):
        return node.arg == "allow_pickle" and not (
            isinstance(node.value, ast.Constant) and node.value.value is False
        )
    return False


def makes_a_message(node):
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Frame"
    )


def all_places(wanted):
    return set().union(
        *(
            places(tree_of(name), path.relative_to(ROOT).as_posix(), wanted)
            for name, path in FILES.items()
        )
    )


def test_every_place_that_unpickles_is_known():
    """One that is new belongs here, with what authenticates what it reads."""
    assert all_places(unpickles) == PLACES.keys()


def test_every_place_that_makes_messages_is_known():
    """One that reads from a connection has to unseal what it makes."""
    assert all_places(makes_a_message) == MAKERS.keys()
    assert "unseal(" in (ROOT / "extras/clusters/network/control.py").read_text()


def test_places_are_found():
    program = """
import pickle
from cloudpickle import loads
class Reader:
    def read(self):
        return pickle.Unpickler(self.file)
def look(path):
    return np.load(path, allow_pickle=True)
def allow(path):
    return np.load(path, allow_pickle=False), json.loads(path)
reader = torch.load
"""
    found = places(ast.parse(program), "file.py", unpickles)
    assert found == {"file.py: Reader.read", "file.py: look", "file.py: "}
