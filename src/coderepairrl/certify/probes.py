"""What the attacks of `redteam` run: bash scripts by name, in the workspace of whoever is attacked.

Their environment tells them what to go for: ``SECRET`` (a file), ``OUTSIDE`` (a folder that their user may write to),
``HOLDER`` (a process with a secret), ``TCP UNIX ABSTRACT`` (servers), ``REMOTE FIXED`` (a repository and the commit
that repairs the task), the limits, and ``A`` and ``B``: a probe that got through says the two as one word, or leaves
``$OUTSIDE/plant``. A name that ends in ``(root)`` needs root where nothing stops it.
"""

from __future__ import annotations

import shlex


def _python(code: str) -> str:
    return f"python3 -ISc {shlex.quote(_PRELUDE + code)}"


_PRELUDE = """
import os, sys, socket, ctypes, signal
E = os.environ
def found(): print(E["A"] + E["B"], flush=True)
"""

ESCAPES = {
    "nested shells": """bash -c 'sh -c "echo x > $OUTSIDE/plant"'""",
    "a path upwards": 'echo x > "../../../../../../../../../..$OUTSIDE/plant"',
    "python": _python('open(E["OUTSIDE"] + "/plant", "w")'),
    "awk": """awk 'BEGIN { print "x" > ENVIRON["OUTSIDE"] "/plant" }'""",
    "awk system": """awk 'BEGIN { system("touch $OUTSIDE/plant") }'""",
    "find -exec": r'find . -maxdepth 0 -exec touch "$OUTSIDE/plant" \;',
    "git alias": """git -c alias.x='!touch "$OUTSIDE/plant"' x""",
    "git fsmonitor": """git -c core.fsmonitor='touch "$OUTSIDE/plant"; false' status""",
    "git filter": """echo '* filter=x' > .gitattributes
        git -c filter.x.clean='touch "$OUTSIDE/plant"; cat' add -A""",
    "git hook": """mkdir -p .git/hooks; printf '#!/bin/sh\\ntouch "$OUTSIDE/plant"\\n' > .git/hooks/pre-commit
        chmod +x .git/hooks/pre-commit; git commit --allow-empty -m x""",
    "git external diff": """echo >> app.py; git -c diff.external='touch "$OUTSIDE/plant"; true' diff""",
    "sed w": 'sed -n "w $OUTSIDE/plant" app.py',
    "sed e": 'sed "1e touch $OUTSIDE/plant" app.py',
    "tee": 'echo x | tee "$OUTSIDE/plant"',
    "xargs": 'echo "$OUTSIDE/plant" | xargs touch',
    "tar checkpoint": 'tar cf /dev/null --checkpoint=1 --checkpoint-action=exec="touch $OUTSIDE/plant" app.py',
    "a write through a link": 'ln -sfn "$OUTSIDE" link; echo x > link/plant',
    "a hard link": 'ln -f "$SECRET" hard; cat hard',
    "a magic link of /proc": 'cat "/proc/self/root$SECRET"; touch "/proc/thread-self/root$OUTSIDE/plant"',
    "a descriptor of /": _python("""
d = os.open("/", os.O_PATH)
print(os.read(os.open(E["SECRET"].lstrip("/"), os.O_RDONLY, dir_fd=d), 99).decode())"""),
    "root of the keeper (root)": 'cat "/proc/$PPID/root$SECRET" "/proc/1/root$SECRET"',
    "working folder of the keeper (root)": 'cat "/proc/1/cwd/$SECRET" "/proc/$PPID/cwd/../../../../..$SECRET"',
}
"""Out of the workspace, by every tool that can be made to write, read or run."""

SECRETS = {
    "a file": 'cat "$SECRET"',
    "a search": """find "${SECRET%/*}" -maxdepth 1 -type f -exec cat {} +""",
    "environment": "env",
    "everybody's environment": r"cat /proc/[0-9]*/environ | tr '\0' '\n'",
    "the process list": "ps axww; cat /proc/[0-9]*/cmdline",
    "another's environment": 'cat "/proc/$HOLDER/environ"',
    "another's command line": 'cat "/proc/$HOLDER/cmdline"',
    "another's memory": _python("""
pid = E["HOLDER"]
for line in open(f"/proc/{pid}/maps"):
    if "[stack]" in line:
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(low)
            if (E["A"] + E["B"]).encode() in memory.read(high - low): found()"""),
    "another's root": 'cat "/proc/$HOLDER/root$SECRET"',
    "a signal to another": 'kill -CONT "$HOLDER" && echo "$A$B"',
    "another's limits": _python("""
import resource
resource.prlimit(int(E["HOLDER"]), resource.RLIMIT_CORE, (0, 0)); found()"""),
    "another's priority": 'renice -n 19 -p "$HOLDER" && echo "$A$B"',
    "answers in this package": 'cat "$PACKAGE"/tasks/handmade/*/fix.patch && echo "$A$B"',
    "a search for answers": """find "$PACKAGE" /usr/lib/python3* /usr/local/lib /opt -path '*/handmade/*/fix.patch' |
        grep -q . && echo "$A$B\"""",
}
"""Keys, files and processes of the host."""

_CONNECT = """
def reach(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as s:
        s.settimeout(5); s.connect(address); found()
"""
NETWORK = {
    "the host's loopback": _python(_CONNECT + 'reach(socket.AF_INET, ("127.0.0.1", int(E["TCP"])))'),
    "the host's loopback, mapped": _python(_CONNECT + 'reach(socket.AF_INET6, ("::ffff:127.0.0.1", int(E["TCP"])))'),
    "a socket file": _python(_CONNECT + 'reach(socket.AF_UNIX, E["UNIX"])'),
    "an abstract socket": _python(_CONNECT + 'reach(socket.AF_UNIX, chr(0) + E["ABSTRACT"])'),
    "the internet": _python(_CONNECT + 'reach(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)'),
    "vsock": _python("socket.socket(40, socket.SOCK_STREAM); found()"),
    "netlink of the firewall": _python("socket.socket(16, socket.SOCK_RAW, 12); found()"),
    "netlink of the kernel's events": _python("socket.socket(16, socket.SOCK_RAW, 15); found()"),
    "raw packets (root)": _python("socket.socket(17, socket.SOCK_RAW, 0x300); found()"),
    "a raw socket (root)": _python("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); found()"),
}
"""Anything beyond the bridge. A datagram socket that connects sends nothing: it only finds a route."""

_CALLS: dict[str, tuple[int, int, str]] = {  # x86_64, aarch64, arguments: harmless, and refused late where allowed
    "ptrace": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "os.getpid(), 0, 0, 0, 0, 0"),
    "kcmp": (312, 272, "os.getpid(), os.getpid(), 2, 0, 0"),
    "pidfd_getfd": (438, 438, "-1, 0, 0"),
    "unshare of the user": (272, 97, "0x10000000"),
    "clone of a user namespace": (56, 220, "0x10000000 | 17 | os._exit(0) if 0 else 0x50000000, 0, 0, 0, 0"),
    "clone3": (435, 435, "0, 0"),
    "setns": (308, 268, "-1, 0"),
    "io_uring_setup": (425, 425, "1, 0"),
    "keyctl": (250, 219, "0, -3, 1"),
    "add_key": (248, 217, "0, 0, 0, 0, 0"),
    "perf_event_open": (298, 241, "0, 0, 0, 0, 0"),
    "userfaultfd": (323, 282, "1"),
    "memfd_create": (319, 279, 'b"m", 0xFFFF'),
    "shmget": (29, 194, "0, 0, 0"),
    "msgget": (68, 186, "0x43525245, 0"),
    "semget": (64, 190, "0x43525245, 0, 0"),
    "request_key": (249, 218, "0, 0, 0, 0"),
    "name_to_handle_at": (303, 264, "-1, 0, 0, 0, 0"),
    "process_madvise": (440, 440, "-1, 0, 0, 0, 0"),
    "disk priority of all of a user's processes": (251, 30, "3, 0, 7 << 13"),
    "mount (root)": (165, 40, "0, 0, 0, 0, 0"),
    "umount (root)": (166, 39, "0, 0"),
    "pivot_root (root)": (155, 41, "0, 0"),
    "chroot (root)": (161, 51, 'b"/"'),
    "fsopen (root)": (430, 430, 'b"tmpfs", 0xFF'),
    "open_tree (root)": (428, 428, 'b"/", 0, 0xFFFFFF'),
    "move_mount (root)": (429, 429, "-1, 0, -1, 0, 0"),
    "mount_setattr (root)": (442, 442, "-1, 0, 0, 0, 0"),
    "bpf (root)": (321, 280, "0, 0, 0"),
    "open_by_handle_at (root)": (304, 265, "-1, 0, 0"),
    "init_module (root)": (175, 105, "0, 0, 0"),
    "kexec_load (root)": (246, 104, "0, 0, 0, 0xFF"),
    "swapon (root)": (167, 224, "0, 0"),
    "reboot (root)": (169, 142, "0, 0, 0, 0"),
    "syslog (root)": (103, 116, "10, 0, 0"),
    "clock_settime (root)": (227, 112, "0, 0"),
    "clock_adjtime (root)": (305, 266, "0, 0"),
    "settimeofday (root)": (164, 170, "0, 0"),
    "adjtimex (root)": (159, 171, "0"),
    "acct (root)": (163, 89, 'b"/nonexistent"'),
    "fsmount (root)": (432, 432, "-1, 0, 0"),
    "fanotify_init (root)": (300, 262, "0xFFFFFF, 0"),
    "delete_module (root)": (176, 106, 'b"nothing", 0x800'),
    "kexec_file_load (root)": (320, 294, "-1, -1, 0, 0, 0xFF"),
}


def _call(x86_64: int, aarch64: int, arguments: str) -> str:
    return _python(
        f"""
call = ctypes.CDLL(None, use_errno=True).syscall
number = {x86_64} if os.uname().machine == "x86_64" else {aarch64}
result = call(number, {arguments})
if result >= 0 or ctypes.get_errno() not in (1, 13, 38): found()"""
    )


_ANY = """
def all_of(folder):
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False): yield from all_of(entry.path)
        else: yield entry.path
for folder in {folders}:
    try:
        for path in all_of(folder):
            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); found(); sys.exit()
            except OSError: pass
    except OSError: pass
"""
"""Says the word at the first file that can be opened for writing."""

DOORS = {name: _call(*call) for name, call in _CALLS.items()} | {
    "unshare": 'unshare -Ur true && echo "$A$B"',
    "priority of all of a user's processes": _python("""
call = ctypes.CDLL(None, use_errno=True).setpriority
if os.getuid() and call(2, 0, -20) and ctypes.get_errno() == 13: found()  # it looked at each, and may not raise it"""),
    "/proc/sys (root)": ': 2> /dev/null >> /proc/sys/kernel/core_pattern && echo "$A$B"',
    "any setting in /proc/sys (root)": _python(_ANY.format(folders='["/proc/sys"]')),
    "any setting in /sys (root)": _python(_ANY.format(folders='["/sys/kernel", "/sys/module", "/sys/power"]')),
    "what runs when a control group is empty (root)": """for file in /sys/fs/cgroup/release_agent \\
        /sys/fs/cgroup/*/release_agent; do : 2> /dev/null >> "$file" && echo "$A$B"; done""",
    "userfaultfd by its device (root)": ': 2> /dev/null < /dev/userfaultfd && echo "$A$B"',
    "the kernel's log (root)": ': 2> /dev/null < /dev/kmsg && echo "$A$B"',
    "sysrq (root)": ': 2> /dev/null >> /proc/sysrq-trigger && echo "$A$B"',
    "the kernel's memory (root)": 'head -c 1 /proc/kcore > /dev/null && echo "$A$B"',
    "a disk (root)": """for disk in $(awk '$4 ~ /[a-z]/ { print "/dev/" $4 }' /proc/partitions)
        do head -c 1 "$disk" > /dev/null && echo "$A$B"; done""",
    "a new device (root)": 'mknod null c 1 3 && echo "$A$B"',
    "a control group (root)": """for root in /sys/fs/cgroup /sys/fs/cgroup/*/
        do mkdir "$root/crrl-probe" && rmdir "$root/crrl-probe" && echo "$A$B"; done""",
    "a set-user-id program (root)": _python("""
import shutil, subprocess
shutil.copy("/usr/bin/id", "id"); os.chown("id", 0, 0); os.chmod("id", 0o4755)
if subprocess.run(["./id", "-u"], capture_output=True).stdout == b"0\\n": found()"""),
    "higher priority (root)": 'nice -n -5 true 2>&1 | grep -q . || echo "$A$B"',
}
"""System calls that no repair needs, and files of the kernel. Refused is what answers EPERM, EACCES or ENOSYS."""

REFERENCE = {
    "the log of all branches": "git log --all -p",
    "the fixing commit by its name": 'git show "$FIXED"',
    "every object there is": "git cat-file --batch-all-objects --batch",
    "packs by hand": "for p in .git/objects/pack/*.idx; do git show-index < $p | cut -d' ' -f2 | xargs git show; done",
    "lost objects": "git fsck --unreachable --no-reflogs | cut -d' ' -f3 | xargs git show; git reflog show -p --all",
    "the remote": "git fetch -q origin main && git show FETCH_HEAD",
    "a clone of the remote": 'git clone -q "$REMOTE" again && git -C again log --all -p',
    "objects borrowed from the remote": """echo "$REMOTE/objects" > .git/objects/info/alternates; git show "$FIXED" """,
    "reading every file around": 'grep -rsh "$A$B" . "$OUTSIDE/.." | head -c 4096',
}
"""The repair that the task was made from."""

_FORK = """
kids = []
try:
    for _ in range({count}):
        pid = os.fork()
        if pid == 0:
            signal.pause(); os._exit(0)
        kids.append(pid)
    found()
finally:
    for pid in kids: os.kill(pid, 9)
    for pid in kids: os.waitpid(pid, 0)
"""
_LEFT = """
def gone(count):
    \"\"\"Whether fewer than `count` processes were alive together: those below say so.\"\"\"
    read, write = os.pipe()
    for _ in range(count):
        if os.fork(): continue
        os.setsid()
        if os.fork(): os._exit(0)
        os.close(read)
        os.write(write, b"%8d" % os.getpid()); signal.pause()
    os.close(write)
    pids = []
    import select
    while len(pids) < count and select.select([read], [], [], 3)[0]: pids.append(int(os.read(read, 8)))
    for pid in pids: os.kill(pid, 9)
    return len(pids) < count
if not gone(int(E["PROCESSES"]) + 16): found()
"""
_MANY = """
import subprocess, tempfile, time
at = os.path.abspath(tempfile.mkdtemp(dir={where}))
try:
    for number in range(int(E["FILES"]) + 99): {make}
    time.sleep(4); found()
finally: subprocess.run(["timeout", "5", "rm", "-rf", at], cwd="/")"""
_IN_SOCKETS = """
import time
kids = []
for _ in range(24):
    if not (pid := os.fork()):
        kept, left = [], int(E["MEMORY"]) // 8
        while left > 0:
            kept.append(socket.socketpair()); kept[-1][0].setblocking(False)
            try:
                while True: left -= kept[-1][0].send(bytes(1 << 16))
            except BlockingIOError: pass
        time.sleep(4); os._exit(0)
    kids.append(pid)
if all([os.waitpid(pid, 0)[1] == 0 for pid in kids]): found()
"""
"""Thrice the memory of a sandbox, in the kernel's hands, by processes that have few descriptors each."""
_FILL = """
import shutil, tempfile
size = int(E[{limit!r}]) + (1 << 20)
folder = tempfile.mkdtemp(dir={where})
try:
    files = []
    while size > 0:
        files.append(open(os.path.join(folder, str(len(files))), "wb", 0))
        {then}
        for _ in range(4):
            files[-1].write(bytes(1 << 20)); size -= 1 << 20
    found()
finally:
    shutil.rmtree(folder)
"""


def _many(make: str, where: str = ".") -> str:
    return _python(_MANY.format(where=repr(where), make=make))


LIMITS = {
    "processes": _python(_FORK.format(count='int(E["PROCESSES"]) + 16')),
    "threads": _python("""
import threading
end = threading.Event(); count = int(E["PROCESSES"]) + 16
threading.stack_size(1 << 16)
try:
    for _ in range(count): threading.Thread(target=end.wait, daemon=True).start()
    end.wait(2); found()
finally: end.set()"""),
    "processes that have left": _python(_LEFT),
    "memory of one process": _python('x = b"x" * (2 * int(E["MEMORY"])); found()'),
    "memory of many processes": _python("""
import time
size, kids = int(E["MEMORY"]) * 6 // 10, []
for _ in range(3):
    if not (pid := os.fork()):
        x = b"x" * size; time.sleep(6); os._exit(0)
    kids.append(pid)
if all(os.waitpid(pid, 0)[1] == 0 for pid in kids): found()"""),
    "memory that is shared": _python("""
import mmap, time
maps = []
for _ in range(8):
    maps.append(mmap.mmap(-1, int(E["MEMORY"]) // 4)); maps[-1].write(b"x" * len(maps[-1]))
time.sleep(4); found()"""),
    "memory in sockets": _python(_IN_SOCKETS),
    "one large file": """head -c "$((FILE_BYTES + (1 << 20)))" /dev/zero > big
        test "$(stat -c %s big)" -gt "$FILE_BYTES" && echo "$A$B"; rm big""",
    "/tmp": _python(_FILL.format(limit="TMP_BYTES", where='"/tmp"', then="pass")),
    "/dev/shm": _python(_FILL.format(limit="TMP_BYTES", where='"/dev/shm"', then="pass")),
    "the workspace": _python(_FILL.format(limit="DISK_BYTES", where='"."', then="pass")),
    "files that are deleted but open": _python(
        _FILL.format(limit="DISK_BYTES", where='"."', then="os.unlink(files[-1].name)")
    ),
    "a sparse file": """truncate -s "$((FILE_BYTES + (1 << 20)))" sparse
        test "$(stat -c %s sparse)" -gt "$FILE_BYTES" && echo "$A$B"; rm sparse""",
    "a great many files": _many("os.close(os.open(f'{at}/{number}', os.O_CREAT))"),
    "a great many files in /tmp": _many("os.close(os.open(f'{at}/{number}', os.O_CREAT))", "/tmp"),
    "a great many files in /dev/shm": _many("os.close(os.open(f'{at}/{number}', os.O_CREAT))", "/dev/shm"),
    "a great many folders": _many("os.mkdir(f'{at}/{number}')"),
    "folders in folders": _many("os.chdir(at if not number else 'd'); os.mkdir('d')"),
    "a great many links": _many("os.symlink('x' * 900, f'{at}/{number}')"),
    "a great many names of one file": _many("os.link('app.py', f'{at}/{number}')"),
    "attributes of files": _many("os.setxattr(at, f'user.{number}', bytes(9000))", "/dev/shm"),
    "CPU time": _python("""
import time
while time.process_time() < int(E["CPU_SECONDS"]) + 2: pass
found()"""),
    "terminals": _python("""
import time
for _ in range(4):
    if not os.fork():
        try: kept = [os.openpty() for _ in range(100)]
        except OSError: os._exit(1)
        time.sleep(4); os._exit(0)
if all([os.wait()[1] == 0 for _ in range(4)]): found()"""),
    "open files": _python("""
import resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
for _ in range(int(E["OPEN_FILES"])): os.dup(0)
found()"""),
}
"""More than is allowed, of everything; bounded, so that it can be tried on a host."""

LIFETIME = {
    "killing the keeper": "kill -9 $PPID; kill -9 1; sleep 0.2",
    "stopping the keeper": "kill -STOP $PPID; kill -STOP 1; sleep 0.2",
    "asking the keeper to end": "kill $PPID; kill 1; kill -HUP $PPID; kill -INT $PPID; kill -INT 1; sleep 0.2",
    "killing everything": "kill -9 -1; sleep 0.2",
    "its descriptors": _python("""
for pid in (os.getppid(), os.getppid() and 1):
    try: names = os.listdir(f"/proc/{pid}/fd")
    except OSError: continue
    if pid != 1 or os.getppid() == 1: os.kill(pid, 9)"""),
    "a forged frame": _python("""
import json, struct
said = (E["A"] + E["B"]).encode()
head = json.dumps({"code": 0, "output": said.decode()}).encode()
frame = struct.pack(">II", len(head), len(said)) + head + said
for number in range(3, 256):
    try: os.write(number, frame)
    except OSError: pass
for pid in (1, os.getppid()):
    for number in range(3, 64):
        try: open(f"/proc/{pid}/fd/{number}", "wb", 0).write(frame)
        except OSError: pass"""),
    "its limits": _python("""
import resource
for which, value in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_DATA, 4096), (resource.RLIMIT_CPU, 1)):
    resource.prlimit(os.getppid(), which, (value, value))"""),
    "its priority": _python("""
def tries(action, *values):
    try: action(*values); found()
    except OSError: pass
tries(os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
tries(os.sched_setscheduler, os.getppid(), os.SCHED_IDLE, os.sched_param(0))
tries(os.sched_setaffinity, os.getppid(), {0})"""),
    "a signal by a descriptor": _python("""
for pid in (os.getppid(), 1):
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)"""),
    "tracing it": _python("""
call = ctypes.CDLL(None).ptrace
call.argtypes = [ctypes.c_long] * 4
call(0x4206, os.getppid(), 0, 0x100000)  # PTRACE_SEIZE; the traced one ends with us"""),
    "a copy of its descriptors": _python("""
call, keeper = ctypes.CDLL(None).syscall, os.pidfd_open(os.getppid())
for number in range(3, 64):
    if (copy := call(438, keeper, number, 0)) >= 0:
        try: os.write(copy, (E["A"] + E["B"]).encode()); found()
        except OSError: pass"""),
    "its memory": _python("""
code = b""
pid = os.getppid()
for line in open(f"/proc/{pid}/maps"):
    if " rw-p " in line and "[heap]" in line:
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(low); memory.write(bytes(high - low))"""),
}
"""Against the process that runs commands and answers for them. It is the parent of each."""

THREADS = _python("""
import fcntl, subprocess, threading, time
def stay():
    lock = open("lock", "w"); fcntl.flock(lock, 2); time.sleep(300)
if not os.fork():
    os.setsid()
    with open("/dev/null", "w") as null: [os.dup2(null.fileno(), number) for number in (1, 2)]
    threading.Thread(target=stay).start()
    time.sleep(0.2)
    with open("started", "w") as file: file.write(str(os.getpid()))
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread alone
while not os.path.exists("started") or not os.path.getsize("started"): time.sleep(0.01)""")
"""A daemon that shows as a zombie and lives."""

KEEPER = """
import os, socket, subprocess, sys
ours = socket.socket(fileno=int(sys.argv[1]))
rank = lambda: (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
before = rank()
subprocess.run(["bash", "-c", sys.argv[2]], pass_fds=[ours.fileno()], stdin=subprocess.DEVNULL)
open("/dev/null").close()
if rank() == before: ours.sendall(b"fine\\n")
"""
"""A keeper as one would write it first: an ordinary parent whose socket its commands inherit."""

FIX = "sed -i 's/a - b/a + b/' app.py; echo added > new.txt"
"""The repair that a diff must show, whatever else was done."""

_MARK = 'touch "$PWD/RAN"'
DIFF = {
    "a commit": "git add -A; git commit -qm done",
    "a hook": f"""mkdir -p .git/hooks; printf '#!/bin/sh\\n{_MARK}\\n' > .git/hooks/post-index-change
        chmod +x .git/hooks/post-index-change""",
    "fsmonitor": f"git config core.fsmonitor '{_MARK}; false'",
    "a clean filter": f"git config filter.x.clean '{_MARK}; echo gone'; echo '* filter=x' > .git/info/attributes",
    "a filter process": f"git config filter.x.process '{_MARK}; false'; echo '* filter=x' > .gitattributes",
    "textconv": f"git config diff.x.textconv '{_MARK}; echo gone'; echo '* diff=x' > .git/info/attributes",
    "an external diff": f"git config diff.external '{_MARK}; true'",
    "an included configuration": f"printf '[core]\\n\\tfsmonitor = {_MARK}; false\\n' | tr -d '\"' > .git/more"
    "; git config include.path more",
    "attributes of the tree": "echo '* -diff' > .gitattributes",
    "ignored files": "echo '*' > .gitignore",
    "the exclude file": "echo '*' > .git/info/exclude",
    "unchanged by declaration": "git update-index --assume-unchanged app.py",
    "skipped by declaration": "git update-index --skip-worktree app.py",
    "a sparse checkout": "git config core.sparseCheckout true; git config index.sparse true; "
    "printf '/new.txt\\n' > .git/info/sparse-checkout; git update-index --skip-worktree app.py",
    "no repository": "rm -rf .git",
    "no HEAD": "rm .git/HEAD",
    "a broken index": "echo x > .git/index",
    "a locked index": "touch .git/index.lock",
    "a repository elsewhere": "rm -rf .git; ln -s /nonexistent .git",
    "a worktree elsewhere": "git config core.worktree /tmp",
    "a bare repository": "git config core.bare true",
    "another HEAD": "git checkout -q --orphan other; git add -A; git commit -qm x",
    "a replaced commit": "old=$(git rev-parse HEAD); git add -A; new=$(git commit-tree $(git write-tree) -m x); "
    "git replace $old $new",
    "an alternate that is gone": "rm -rf .git/objects/*; mkdir -p .git/objects/info; "
    "echo /nonexistent > .git/objects/info/alternates",
    "a nested repository": "mkdir in; git init -q in; mv new.txt in; cd in; git add -A; "
    "git -c user.name=a -c user.email=a@a commit -qm x",
    "a submodule": "mkdir in; git init -q in; mv new.txt in; cd in; git add -A; "
    "git -c user.name=a -c user.email=a@a commit -qm x; cd ..; "
    "git -c protocol.file.allow=always submodule add -q ./in in",
    "a fifo": "mkfifo pipe",
    "a socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
    "bytes that are no text": r"printf '\377\376' > bytes",
    "a name that is no text": r"echo x > $'\377'",
    "a name of two lines": r"echo x > $'a\nb'",
    "a file that nobody may read": "chmod 000 new.txt",
    "a folder that nobody may enter": "mkdir shut; mv new.txt shut; chmod 000 shut",
    "a link to itself": "ln -s loop loop",
    "a link in the way of the repository": "rm -rf .git; ln -s /nonexistent .GIT; mkdir .git; touch .git/objects",
}
"""Ways to hide a change from whoever looks for it, or to have him run something."""
