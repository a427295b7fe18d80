"""Questions about isolation, with controls on the host."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from coderepairrl.checks.sandbox.scene import Scene, expect, printed, program


async def no_secrets(scene: Scene) -> str:
    """The host's files, processes and environment are out of sight."""
    secret = scene.folder / "secret"
    me = os.getpid()
    probe = f"cat {secret} /root/.bashrc /home/*/.bashrc /etc/shadow; env; cat /proc/1/environ /proc/{me}/cmdline"
    async with scene.open() as box:
        result = await box.exec(["bash", "-c", probe])
        output = result.output.decode(errors="replace")
        expect("a host secret" not in output, "a file of the host was read")
        expect("CRRL_EXAM_KEY" not in output, "the host's environment was read")
        ids = await printed(box, "count_processes")
        expect(ids.isdigit() and int(ids) <= 4, f"{ids} processes are in sight")
    control = subprocess.run(["cat", secret], capture_output=True, text=True)
    expect(control.stdout == "a host secret\n", "the control failed: the host cannot read it either")
    return "control: the host reads the secret"


async def no_writes(scene: Scene) -> str:
    """Nothing outside the workspace and the temporary folders can be written."""
    writable = scene.folder / "theirs"
    writable.mkdir(exist_ok=True)
    writable.chmod(0o777)
    if (user := scene.backend.info().user) is not None:
        os.chown(writable, user, user)
    async with scene.open() as box:
        output = await printed(box, "write_outside", f"crrl-probe-{os.getpid()}", str(writable), timeout=60)
        expect(output == "[]\n[]\nFalse False\nTrue True True", output[:500])
    left = [place for place in ("/tmp", "/dev/shm") if Path(place, f"crrl-probe-{os.getpid()}").exists()]
    expect(not left, f"the host sees what was written in {left}")
    control = writable / "control"
    control.touch()
    control.unlink()
    return "control: the temporary folder and the workspace are writable; the host writes where the probe cannot"


async def no_network(scene: Scene) -> str:
    """No network: not the host's loopback, not abstract sockets, not vsock."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        port, name = str(tcp.getsockname()[1]), f"crrl-exam-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        async with scene.open() as box:
            output = await printed(box, "network", port, name)
            expect(output == "False False\nFalse False False False", output)
        control = subprocess.run(
            [sys.executable, "-P", *program("network", port, name)[1:]], capture_output=True, text=True
        ).stdout
        expect(control.startswith("True True"), f"the control failed: on the host, {control!r}")
    return "control: the host reaches both"


async def no_kernel_doors(scene: Scene) -> str:
    """System calls that no repair needs are refused."""
    async with scene.open() as box:
        output = await printed(box, "kernel")
        expect(output == "", output)
    return "no capabilities, no new privileges, filter on"


async def no_daemons(scene: Scene) -> str:
    """No process outlives its command, whatever it does to."""
    beat = "while :; do date +%N >> beat; done"
    daemon = f'nohup setsid bash -c \'trap "" HUP TERM INT; (setsid bash -c "{beat}" &) ; {beat}\' > /dev/null 2>&1 &'
    async with scene.open() as box:
        control = await box.exec(["bash", "-c", f"{daemon} sleep 0.3; wc -l < beat"])
        expect(int(control.output) > 0, "the control failed: the daemon never ran")
        before = await box.read("beat")
        await asyncio.sleep(0.2)
        expect(await box.read("beat") == before, "a daemon still writes after its command")
        await box.exec(["bash", "-c", daemon])
        expect(await box.diff() == await box.diff(), "a daemon writes between two diffs")
    return "control: while its command runs, it writes"


async def unstoppable(scene: Scene) -> str:
    """Commands cannot kill, stop, trace or change the process that keeps them."""
    async with scene.open() as box:
        output = await printed(box, "attack_keeper")
        expect(output == "", output)
        expect((await box.exec(["true"])).ok, "the guest does not answer any more")
    return "no signal reaches it, its memory and descriptors are closed"
