"""Programs in the sandbox: limits hold, and each way out that docs/security.md lists is tried."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from verl_like.plugins.code_grading.sandbox import probe, seccomp, wire
from verl_like.plugins.code_grading.sandbox.client import Jail
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings
from verl_like.services import cleaning

SETTINGS = SandboxSettings(min_level="limits", timeout=3, memory_limit_mb=512, max_output_kb=256, scratch_mb=8)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or not seccomp.supported(), reason="needs Linux on x86-64 or arm64"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def assessment() -> probe.Assessment:
    return probe.assess(SETTINGS)


@pytest.fixture(scope="module")
def jail(assessment: probe.Assessment) -> Iterator[Jail]:
    if assessment.level != "isolated":
        pytest.skip(f"this machine's sandbox reaches only {assessment.summary()}")
    with Jail(SETTINGS) as made:
        yield made


def run(jail: Jail, code: str, stdin: str = "") -> dict:
    return jail.run_program(textwrap.dedent(code), stdin)


def alive(jail: Jail) -> bool:
    return run(jail, "print(int(input()) + 1)", "41")["stdout"] == "42\n"


class TestPrograms:
    def test_reads_input_and_prints(self, jail: Jail) -> None:
        reply = run(jail, "import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "abc\ndef\n")
        assert (reply["status"], reply["stdout"], reply["exit_code"]) == ("ok", "cba\nfed\n", 0)

    def test_exit_codes_threads_and_deep_recursion_are_as_in_an_interpreter(self, jail: Jail) -> None:
        assert run(jail, "import sys; sys.exit(3)")["exit_code"] == 3
        assert run(jail, "import sys; sys.exit('words')")["exit_code"] == 1
        assert run(jail, "1/0")["status"] == "error"
        assert "ZeroDivisionError" in run(jail, "1/0")["stderr"]
        threads = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()"
        assert run(jail, threads)["stdout"] == "late\n"
        deep = "import sys\nsys.setrecursionlimit(10**6)\nf = lambda n: n and 1 + f(n - 1)\nprint(f(30000))"
        assert run(jail, deep)["stdout"] == "30000\n"
        endless = "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()"
        assert jail.run_program(endless, "", timeout=1.0)["status"] != "ok"
        assert alive(jail)

    @pytest.mark.parametrize(
        ("code", "output"),
        [
            ("import atexit\natexit.register(print, 'end')\nprint('start')", "start\nend\n"),
            (
                "import atexit, io, sys\nsys.stdout = io.StringIO()\nprint('kept')\n"
                "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))",
                "kept\n",
            ),
            ("import io, sys\nprint('before')\nsys.stdout = io.StringIO()\nprint('lost')", "before\n"),
            ("file = open(1, 'w')\nfile.write('never closed')", "never closed"),
            ("class Last:\n    def __del__(self): print('deleted')\nlast = Last()", "deleted\n"),
            ("import sys\nprint('x')\nsys.stdout.close()", "x\n"),
            ("import sys\nprint('x')\nsys.stdout.flush()\nsys.stdout = sys.stderr = None", "x\n"),
        ],
    )
    def test_the_end_of_a_program_is_that_of_an_interpreter(self, jail: Jail, code: str, output: str) -> None:
        reply = run(jail, code)
        assert (reply["status"], reply["stdout"]) == ("ok", output), reply

    def test_text_of_all_kinds_passes(self, jail: Jail) -> None:
        text = "\u00e9\u4e2d\U0001f600"
        assert run(jail, "print(input())", text)["stdout"] == text + "\n"
        # A byte that is no UTF-8 is not the character that stands for such bytes
        assert (
            run(jail, r"import sys; sys.stdout.buffer.write(b'\xff\x00a')")["stdout"].encode("utf-8", "surrogateescape")
            == b"\xff\x00a"
        )

    def test_calls_give_plain_values_back(self, jail: Jail) -> None:
        code = "class Solution:\n    def f(self, a, b): return {'sum': (a + b, 2.5), 'set': {1}}"
        reply = jail.call(code, "f", [1, 2])
        assert wire.decode(json.loads(reply["result"])) == {"sum": (3, 2.5), "set": {1}}
        assert jail.call("x = 1", "f", [])["status"] == "error"

    def test_same_program_same_order(self, jail: Jail) -> None:
        code = "print(list({str(i) for i in range(50)}))"
        first = run(jail, code)["stdout"]
        with Jail(SETTINGS) as other:
            assert run(other, code)["stdout"] == first


class TestLimits:
    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("while True: pass", "timeout"),
            ("import time; time.sleep(60)", "timeout"),
            ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "timeout"),
            (
                "import os, time\nfor i in range(256):\n    try: os.close(i)\n    except OSError: pass\ntime.sleep(60)",
                "killed",
            ),
            ("while True: print('x' * 10000)", "output"),
            ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "output"),
            ("x = bytearray(10 ** 9)", "error"),
            ("import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 10 ** 7))", "error"),
            ("import mmap; mmap.mmap(-1, 10 ** 9)", "error"),
            ("open('big', 'wb').write(bytes(20 * 1024 ** 2))", "error"),
            ("for i in range(100): open(str(i), 'wb').write(bytes(1024 ** 2))", "error"),
            ("for i in range(10 ** 5): open(str(i), 'w').close()", "error"),
            ("f = [open('/tmp/x%d' % i, 'w') for i in range(1000)]", "error"),
        ],
    )
    def test_each_limit_stops_the_program_and_nothing_else(self, jail: Jail, code: str, status: str) -> None:
        started = time.monotonic()
        reply = jail.run_program(textwrap.dedent(code), "", timeout=1.0 if status == "timeout" else None)
        assert reply["status"] == status, reply
        assert len(reply["stdout"]) <= SETTINGS.max_output_kb * 1024
        assert time.monotonic() - started < 30
        assert alive(jail)

    def test_thread_bomb(self, jail: Jail) -> None:
        code = "import threading, time\nfor i in range(10000): threading.Thread(target=time.sleep, args=(60,)).start()"
        assert jail.run_program(code, "", timeout=1.0)["status"] in ("error", "timeout")
        assert alive(jail)

    def test_the_longest_reply_is_still_read(self) -> None:
        """In JSON a zero byte takes six."""
        settings = SandboxSettings(max_output_kb=1)
        output, errors, result = ("\0" * count for count in (1024, 2000, settings.report_bytes))
        reply = {"status": "ok", "stdout": output, "stderr": errors, "tester_stderr": errors, "result": result}
        assert len(json.dumps(reply)) < settings.reply_bytes

    def test_standard_input_cannot_be_made_a_memory_file(self, jail: Jail) -> None:
        code = (
            "import os\nfor f in (lambda: os.write(0, b'x'), lambda: os.truncate(0, 99), lambda: os.truncate(0, 0)):\n"
        )
        code += "    try: print(f())\n    except OSError: print('no')"
        assert run(jail, code, "text")["stdout"] == "no\n" * 3

    def test_a_shorter_time_may_be_asked_for(self, jail: Jail) -> None:
        started = time.monotonic()
        assert jail.run_program("while True: pass", "", timeout=0.3)["status"] == "timeout"
        assert time.monotonic() - started < 2.5

    def test_files_do_not_outlive_the_run(self, jail: Jail) -> None:
        hidden = (
            "import os\nos.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.chmod('a', 0)\nprint(os.listdir('.'))"
        )
        assert run(jail, hidden)["stdout"] == "['a']\n"
        assert run(jail, "import os; print(os.listdir('.'), os.getcwd())")["stdout"] == "[] /tmp\n"
        run(jail, "import os; os.utime('.', (7, 7)); os.chmod('.', 0o500)")
        assert (
            run(jail, "import os; print(os.stat('.').st_mtime, oct(os.stat('.').st_mode))")["stdout"] == "0.0 0o40700\n"
        )


# Way out -> program. Each prints OUT if it worked.
SECRET_NAME, SECRET = "VERL_LIKE_TEST_SECRET", "hunter2"
ESCAPES = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "other program": "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo OUT'], check=True); print('OUT')",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\nprint('OUT')",
    "new namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('OUT')",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('OUT')",
    "datagrams": "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nprint('OUT')",
    "memory in files without a name": "import os\nos.memfd_create('x')\nprint('OUT')",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('{folder}/door')\nprint('OUT')",
    "listen": "import socket\nsocket.socket().bind(('0.0.0.0', 0))\nprint('OUT')",
    "name lookup": "import socket\nsocket.getaddrinfo('example.org', 80)\nprint('OUT')",
    "read a file": "print('OUT' if open('{folder}/secret').read() else '')",
    "overwrite a file": "open('{folder}/secret', 'w').write('x')\nprint('OUT')",
    "new file": "open('{folder}/new', 'w').write('x')\nprint('OUT')",
    "delete a file": "import os\nos.unlink('{folder}/secret')\nprint('OUT')",
    "write the library": "import os\nopen(os.__file__, 'a').write('#')\nprint('OUT')",
    "write the root": "open('/x', 'w').write('x')\nprint('OUT')",
    "device": "open('/dev/shm/x', 'w').write('x')\nprint('OUT')",
    "list a folder": "import os\nos.listdir('{folder}') and print('OUT')",
    "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0: print('OUT')",
    "chroot": "import os\nos.chroot('/tmp')\nprint('OUT')",
    "signal to the worker": "import os\nos.kill({pid}, 0)\nprint('OUT')",
    "signal to the supervisor": "import os\nos.kill(os.getppid(), 9)\nprint('OUT')",
    "signal to all": "import os\nos.kill(-1, 9)\nprint('OUT')",
    "signal to the group": "import os\nos.killpg(0, 9)\nprint('OUT')",
    "signal through a pipe's owner": """
        import fcntl, os
        read_end, write_end = os.pipe()
        fcntl.fcntl(read_end, fcntl.F_SETOWN, os.getppid())
        fcntl.fcntl(read_end, 10, 9)  # F_SETSIG, SIGKILL
        fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC)
        os.write(write_end, b'x')
        print('OUT')
        """,
    "lease on a file": "import fcntl\nfcntl.fcntl(open('x', 'w'), 1024, fcntl.F_WRLCK)\nprint('OUT')",
    "going on as the supervisor": "import os, sys\nos._exit = lambda status: os.write(1, b'')\nsys.exit(0)",
    "parent's environment": "open('/proc/%d/environ' % __import__('os').getppid(), 'rb').read()\nprint('OUT')",
    "worker's environment": "open('/proc/{pid}/environ', 'rb').read()\nprint('OUT')",
    "worker's memory": "open('/proc/{pid}/mem', 'rb').read(1)\nprint('OUT')",
    "own environment": "import os\n'{name}' in os.environ and print('OUT')",
    "ptrace": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('OUT')",
    "other memory": """
        import ctypes, os
        buffer = ctypes.create_string_buffer(8)
        class Part(ctypes.Structure): _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
        mine, theirs = Part(ctypes.addressof(buffer), 8), Part(id(0), 8)
        call = ctypes.CDLL(None).process_vm_readv
        if call(os.getppid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0: print('OUT')
        """,
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('OUT')",
    "live longer": "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print('OUT')",
    "become root": "import os\nos.setuid(0)\nprint('OUT')",
    "own session": "import os\nos.setsid()\nprint('OUT')",
    "inherited pipes": """
        import os
        for number in range(4, 1024):
            try:
                os.write(number, b'x' * 64)
                print('OUT', number)
            except OSError:
                pass
        """,
    "keys": "import ctypes\nif ctypes.CDLL(None).syscall(250, 0, -3, 1) > 0: print('OUT')",
    "io_uring": "import ctypes as c\nif c.CDLL(None).syscall(425, 8, c.create_string_buffer(120)) >= 0: print('OUT')",
    "terminal input": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')\nprint('OUT')",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_way_out_is_closed(jail: Jail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(SECRET_NAME, SECRET)
    (tmp_path / "secret").write_text(SECRET)
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        fill = {"port": server.getsockname()[1], "folder": tmp_path, "pid": os.getpid(), "name": SECRET_NAME}
        code = textwrap.dedent(ESCAPES[name])
        for key, value in fill.items():
            code = code.replace("{" + key + "}", str(value))
        reply = run(jail, code)
    assert "OUT" not in reply["stdout"], reply
    assert (tmp_path / "secret").read_text() == SECRET
    assert not (tmp_path / "new").exists()
    assert alive(jail)


@pytest.mark.parametrize("name", ["read a file", "own environment", "overwrite a file", "connect", "other program"])
def test_the_escapes_do_work_outside(tmp_path: Path, name: str) -> None:
    """Otherwise the test above would prove nothing."""
    (tmp_path / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = ESCAPES[name].replace("{folder}", str(tmp_path)).replace("{name}", SECRET_NAME)
        code = code.replace("{port}", str(server.getsockname()[1]))
        environment = {SECRET_NAME: SECRET, "PATH": os.environ["PATH"]}
        done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert "OUT" in done.stdout


class TestTests:
    """Assert-style tests: the code under test cannot pass them but by right answers."""

    CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"

    def lines(self, jail: Jail, code: str, tests: str = CHECK, setup: str = "", entry: str = "f") -> list[dict]:
        settings = replace(SETTINGS, timeout=1.5)
        with Jail(settings) as fresh:  # a run that fails closes its jail
            reply = fresh.test(textwrap.dedent(code), tests, setup=setup, entry=entry)
        return [json.loads(line) for line in reply["result"].splitlines()]

    def test_right_and_wrong(self, jail: Jail) -> None:
        assert self.lines(jail, "def f(x): return x * x") == [{"passed": True}, {"passed": True}, {"done": True}]
        right, wrong, done = self.lines(jail, "def f(x): return 4")
        assert right["passed"] and done["done"]
        assert wrong == {"passed": False, "test": "candidate(3) == 9", "message": ""}

    @pytest.mark.parametrize(
        "code",
        [
            "def f(x):\n    import sys; sys.exit(0)",
            "def f(x):\n    import os; os._exit(0)",
            "import os; os._exit(0)",
            "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
            "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(7)",
            "class Yes(list):\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
            "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
            "def check(candidate): pass\ndef f(x): return 0",
            "from verl_like.plugins.code_grading.sandbox import testing\n"
            "testing.Script.run = lambda *a: None\ndef f(x): return 0",
            "import sys\nfor name, module in list(sys.modules.items()):\n"
            "    if 'json' in name: module.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 0",
            'import os\nfor i in range(3, 9):\n    try: os.write(i, b\'{"passed": true}\\n{"done": true}\\n\')\n'
            "    except OSError: pass\ndef f(x): return 0",
            "def f(x): raise AssertionError",
            "def f(x):\n    while True: pass",
            "def f(x): return f",
            "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'tests' in o:\n"
            "            return int(o['tests'].split('==')[1].split()[0])\n    return 0",
            "def f(x):\n    import sys\n    frame = sys._getframe()\n    while frame:\n"
            "        if '=' + '= 9' in str(frame.f_locals): return 4\n        frame = frame.f_back\n    return 0",
        ],
    )
    def test_no_pass_without_a_right_answer(self, jail: Jail, code: str) -> None:
        assert not any(line.get("passed") for line in self.lines(jail, code))

    def test_arguments_that_are_changed_in_place(self, jail: Jail) -> None:
        tests = "x = [3, 1, 2]\nd = {}\nassert order(x, d) is None\nassert x == [1, 2, 3]\nassert d == {'a': (1, 2.5)}"
        code = "def order(x, d):\n    x.sort(); d['a'] = (1, 2.5)"
        assert [line.get("passed") for line in self.lines(jail, code, tests, entry="")] == [True, True, True, None]

    def test_exceptions_and_objects_of_the_code(self, jail: Jail) -> None:
        tests = "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)\n"
        tests += "assert total([Pair(1, 2), Pair(3, 4)]) == 10\n"
        code = """
            class Pair:
                def __init__(self, a, b): self.a, self.b = a, b
            def total(pairs): return sum(p.a + p.b for p in pairs)
            def f(x): raise ValueError("negative")
            """
        assert [line.get("passed") for line in self.lines(jail, code, tests, entry="")] == [True, True, None]

    def test_setup_wins_over_the_code(self, jail: Jail) -> None:
        setup = "def helper(x): return x + 1\ndef f(x): ...\n"
        tests = "def check(candidate):\n    assert candidate(helper(1)) == 2\n"
        code = "def helper(x): return 100\ndef f(x): return x"
        assert self.lines(jail, code, tests, setup)[0] == {"passed": True}


def test_processes_that_a_program_may_start_end_with_its_run(jail: Jail) -> None:
    """With max_processes above 1, also those that let go of everything, and those that are ever more."""
    daemon = """
        import os
        if os.fork() == 0:
            if os.fork() == 0:
                for number in range(5):
                    try: os.close(number)
                    except OSError: pass
                while True: open("litter", "a").write("x")
            os._exit(0)
        print("started")
        """
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    with Jail(replace(SETTINGS, max_processes=8)) as several:
        several.wait_until_ready()
        assert run(several, daemon)["stdout"] == "started\n"
        assert several.run_program(bomb, "", timeout=0.3)["status"] == "timeout"
        assert run(several, "import os; print(os.listdir('.'))")["stdout"] == "[]\n"
        zygote = _descendants(several._process.pid)[0]
        assert len(_descendants(zygote)) == 1  # the supervisor


# Finds "=hunter2hunter2" in its frames, in its objects, and in all memory around them, for which it feels with a system
# call that refuses bad addresses. It knows the text as a pattern only, so it does not find itself.
SECRET_TEXT = "=hunter2hunter2"
THIEF = """
import ctypes, gc, os, re, sys
text, data = re.compile("=[h]unter2[h]unter2"), re.compile(b"=[h]unter2[h]unter2")
found, frame = [], sys._getframe()
while frame:
    found += [frame.f_code.co_name for value in frame.f_locals.values() if text.search(str(value))]
    frame = frame.f_back
found += [type(o).__name__ for o in gc.get_objects() if text.search(str(o))]
read_end, write_end = os.pipe()
write, readable = ctypes.CDLL(None).write, 0
for around in {id(o) >> 26 for o in (object, object(), found, bytearray(10**5), ctypes)}:
    for page in range((around - 1) << 26, (around + 2) << 26, 4096):
        if write(write_end, ctypes.c_void_p(page), 4096) == 4096:
            readable += 1
            found += ["page"] * len(data.findall(os.read(read_end, 4096)))
seen = "pages" if readable > 100 else "blind"
"""


class TestMemoryOfOthers:
    """A program starts as a copy of its parent: whatever that has read before is there to be found."""

    def leave_behind(self, jail: Jail, mode: str) -> dict:
        """A run whose input, output, result or tests hold the secret."""
        if mode == "program":
            return jail.run_program("print(input() * 3)", SECRET_TEXT)
        if mode == "call":
            return jail.call("def f(x): return x * 3", "f", [SECRET_TEXT])
        return jail.test("def f(x): return x", f"assert f({SECRET_TEXT!r}) == {SECRET_TEXT!r}")

    @pytest.mark.parametrize("mode", ["program", "call", "tests"])
    def test_nothing_of_earlier_runs_is_in_the_memory_of_a_program(self, jail: Jail, mode: str) -> None:
        assert self.leave_behind(jail, mode)["status"] == "ok"
        assert run(jail, THIEF + "print(seen, found)")["stdout"] == "pages []\n"
        called = jail.call(THIEF + "def f(): return seen, found", "f", [])
        assert wire.decode(json.loads(called["result"])) == ("pages", [])

    def test_the_thief_finds_what_is_there(self, jail: Jail) -> None:
        kept = "kept = '2retnuh2retnuh='[::-1]\n"
        assert "page" in run(jail, kept + THIEF + "print(seen, found)")["stdout"]

    def test_the_code_under_test_holds_nothing_of_its_tests(self, jail: Jail) -> None:
        tests = f"assert f(1) == ('pages', [])\nassert f(2) == {SECRET_TEXT!r}"
        reply = jail.test(THIEF + "def f(x): return seen, found", tests)
        assert [json.loads(line).get("passed") for line in reply["result"].splitlines()] == [True, False, None], reply


# What is hard to delete -> program that leaves it.
LITTER = {
    "4,000 nested folders": "import os\nfor i in range(4000): os.mkdir('d'); os.chdir('d')",
    "long names": "import os\nfor i in range(200): os.mkdir(chr(97 + i % 26) * 255); os.chdir(chr(97 + i % 26) * 255)",
    "unreadable folders": "import os\nos.makedirs('a/b/c'); open('a/b/c/x', 'w').close()\n"
    "for d in ('a/b/c', 'a/b', 'a', '.'): os.chmod(d, 0)",
    "pipes, links and loops": "import os\nos.symlink('/', 'root'); os.symlink('loop', 'loop')\n"
    "os.symlink('.', 'self'); open('x', 'w').close(); os.link('x', 'y'); os.mkdir('d'); os.symlink('..', 'd/up')",
    "names that are no text": "import os\nos.mkdir(b'\\xff'); open(b'\\xff/\\n\\xfe', 'w').close()",
}


@pytest.mark.parametrize("name", LITTER)
def test_whatever_is_left_behind_is_deleted(jail: Jail, name: str) -> None:
    reply = run(jail, LITTER[name] + "\nprint('left')")
    assert (reply["stdout"], reply["spent"]) == ("left\n", False), reply
    assert run(jail, "import os; print(os.listdir('.'))")["stdout"] == "[]\n"


def test_a_folder_is_emptied_from_outside_too(tmp_path: Path) -> None:
    script = LITTER["4,000 nested folders"].replace("4000", "1100") + "\nos.chmod('.', 0)"
    subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, check=True)
    (tmp_path / "outside").mkdir()
    with pytest.raises(TimeoutError):
        cleaning.empty_folder(str(tmp_path), time.monotonic() - 1)
    cleaning.empty_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class TestStartAndEnd:
    def test_killing_the_worker_leaves_nothing(self, tmp_path: Path) -> None:
        script = tmp_path / "worker.py"
        script.write_text(
            "import threading, time\n"
            "from verl_like.plugins.code_grading.sandbox.client import Jail\n"
            "from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings\n"
            "jail = Jail(SandboxSettings(timeout=60))\n"
            "print(jail._process.pid, *jail.wait_until_ready(), flush=True)\n"
            "jail.run_program('while True: pass', '')\n"
        )
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        worker = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
        assert worker.stdout is not None
        jail_pid = int(worker.stdout.readline().split()[0])
        time.sleep(0.3)  # the program runs now
        family = [jail_pid, *_descendants(jail_pid)]
        assert len(family) >= 2
        worker.kill()
        worker.communicate()
        deadline = time.monotonic() + 10
        while any(map(_running, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_running, family))

    def test_a_weaker_machine_is_refused_with_the_way_out_named(
        self, assessment: probe.Assessment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weak = replace(assessment, level="filtered", escapes=assessment.escapes | {"read files": "possible"})
        monkeypatch.setattr(probe, "assess", lambda settings: weak)
        with pytest.raises(SandboxError, match=r"min_level=isolated.*filtered.*read files.*accept less: filtered"):
            probe.require(replace(SETTINGS, min_level="isolated"))
        assert probe.require(replace(SETTINGS, min_level="filtered")) is weak

    def test_levels_follow_from_what_is_possible(self) -> None:
        closed: dict[str, str] = dict.fromkeys(
            ("memory", "network", "fork", "signals", "ptrace", "read files", "write files", "see processes"), "OSError"
        )
        assert probe._level(closed) == "isolated"
        assert probe._level(closed | {"see processes": "possible"}) == "filtered"
        assert probe._level(closed | {"network": "possible"}) == "limits"
        assert probe._level(closed | {"memory": "possible"}) == "none"

    @pytest.mark.parametrize("fallback", ["unprivileged", "no namespaces"])
    def test_without_root_or_namespaces(self, fallback: str, tmp_path: Path) -> None:
        """The weaker ways to start a jail, on this machine, by taking from it what they do without."""
        script = tmp_path / "weak.py"
        patch = "" if fallback == "unprivileged" else "kernel.unshare = refuse"
        script.write_text(
            "import sys\nfrom verl_like.plugins.code_grading.sandbox import client, jail\n"
            "from verl_like.services import kernel\n"
            "client._BOOTSTRAP = client._BOOTSTRAP.replace('import jail;', "
            "'import jail; from verl_like.services import kernel; exec(%r);' % '''"
            "def refuse(flags): raise OSError(1, 'refused')\n"
            "_real = jail._enter\n"
            f"{patch or 'jail._enter = lambda flags: flags & kernel.CLONE_NEWUSER != 0 and _real(flags)'}\n''')\n"
            "from verl_like.plugins.code_grading.sandbox import probe\n"
            "from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings\n"
            "found = probe.assess(SandboxSettings(timeout=5, memory_limit_mb=512))\n"
            "print(found.level, *found.layers, sep=';')\n"
        )
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        level, *layers = done.stdout.strip().split(";")
        if fallback == "unprivileged":
            assert (level, layers) == ("isolated", ["namespaces", "seccomp"])
        else:
            assert "namespaces" not in layers and "seccomp" in layers
            assert level in ("filtered", "isolated")

    def test_a_dead_jail_is_told(self) -> None:
        jail = Jail(SETTINGS)
        jail.wait_until_ready()
        jail._process.kill()
        with pytest.raises(SandboxError, match="died"):
            jail.run_program("print(1)", "")
        assert jail.closed


def _descendants(pid: int) -> list[int]:
    children = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _parent(path) == pid]
    return children + [deeper for child in children for deeper in _descendants(child)]


def _parent(path: Path) -> int:
    try:
        return int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
