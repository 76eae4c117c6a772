"""Which errors are echoes of another failure."""

import pytest

from runtime.launcher.echoes import is_echo, is_echo_in_output


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RuntimeError", "[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        ("RuntimeError", "[pair.cc:446] writev [127.0.0.1]:1: Broken pipe"),
        ("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
        ("RuntimeError", "Gloo connectFullMesh failed with [pair.cc:144] no error"),
        ("RuntimeError", "[Rank 0] Rank 0 successfully reached monitoredBarrier, but received errors while waiting"),
        ("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
        ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//cpu//0"),
        ("torch.distributed.DistBackendError", "NCCL error in: a.cpp:1, remote process exited or there was a network"),
        ("torch.distributed.DistBackendError", "ncclRemoteError: A call failed possibly due to a network error"),
        ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1."),
        ("horovod.common.exceptions.HorovodInternalError", "Horovod has been shut down. This was caused by an"),
        ("tensorflow.python.framework.errors_impl.UnavailableError", "Collective ops is aborted by: Socket closed"),
        ("tensorflow.python.framework.errors_impl.AbortedError", "recvmsg:Connection reset by peer"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", ""),
    ],
)
def test_framework_errors_about_a_lost_peer_are_echoes(kind, text):
    assert is_echo([(kind, text)])
    assert is_echo([("TrainingError", "step 5 failed"), (kind, text)]), "another exception was raised from the echo"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x2)"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("torch.distributed.DistNetworkError", "The server socket has failed to listen on any local network address"),
        (
            "tensorflow.python.framework.errors_impl.InvalidArgumentError",
            "{{function_node __wrapped__MatMul_device_/job:worker/replica:0/task:1/device:CPU:0}} Matrix size",
        ),
        # Nothing listened there, often because the script has a wrong address. A lost peer resets connections instead.
        ("ConnectionRefusedError", "[Errno 111] Connection refused"),
        ("SystemExit", "3"),
    ],
)
def test_a_failure_of_the_code_is_no_echo(kind, text):
    assert not is_echo([(kind, text)])


def test_the_output_of_an_aborted_process_can_be_an_echo():
    line = "  what():  [third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242"
    assert is_echo_in_output(["terminate called after throwing an instance of 'gloo::IoException'", line])
    assert not is_echo_in_output(["free(): invalid pointer"])
