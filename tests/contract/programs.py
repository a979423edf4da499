"""Programs that do the same in both languages, and say what they saw as one JSON value on standard output.

Owns: the pairs. Must not: run them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

LANGUAGES = ("python", "javascript")

type Pair = Mapping[str, str]


def pair(python: str, javascript: str) -> Pair:
    return {"python": python, "javascript": javascript}


HELLO = pair("print('hello')", "console.log('hello')")
EXIT_7 = pair("import sys\nprint('before', flush=True)\nsys.exit(7)", "console.log('before'); process.exitCode = 7;")
RAISE = pair(
    "print('before', flush=True)\nraise ValueError('mine')", "console.log('before'); throw new TypeError('mine');"
)
ABORT = pair("print('before', flush=True)\nimport os\nos.abort()", "console.log('before'); process.abort();")
HANG = pair(
    "print('before', flush=True)\nimport time\nwhile True: time.sleep(1)",
    "console.log('before'); setInterval(() => {}, 1000);",
)
SPIN = pair("print('before', flush=True)\nwhile True: pass", "console.log('before'); for (;;);")
DEVOUR = pair(
    "print('before', flush=True)\nimport os\nx = [os.urandom(1 << 20) for _ in range(8192)]",
    "require('fs').writeSync(1, 'before\\n'); const x = [];"
    "for (let i = 0; i < 8192; i++) x.push(require('crypto').randomBytes(1 << 20));",
)
FLOOD = pair(
    "print('before', flush=True)\nimport os\nwhile True: os.write(1, b'x' * 65536)",
    "const fs = require('fs'); console.log('before'); const part = Buffer.alloc(65536, 'x');"
    "for (;;) { try { fs.writeSync(1, part); } catch (error) { if (error.code !== 'EAGAIN') throw error; } }",
)
READ_INPUT = pair(
    "import json, sys\nprint(json.dumps(sys.stdin.read()))",
    "let text = ''; for await (const part of process.stdin) text += part; console.log(JSON.stringify(text));",
)
ENVIRONMENT = pair(
    "import json, os\nprint(json.dumps(dict(os.environ)))",
    "console.log(JSON.stringify(process.env));",
)


def write(characters: str, stdout: int, stderr: int) -> Pair:
    """Writes `characters` over and over, as many characters (code points) as are asked for to each stream."""
    text = json.dumps(characters, ensure_ascii=True)
    python = f"""
import sys
text = {characters!a}
def some(count): return (text * (count // len(text) + 1))[:count]
sys.stdout.write(some({stdout}))
sys.stderr.write(some({stderr}))
"""
    javascript = f"""
const text = Array.from({text});
const some = (count) => Array.from({{length: count}}, (_, place) => text[place % text.length]).join('');
process.stdout.write(some({stdout}));
process.stderr.write(some({stderr}));
"""
    return pair(python, javascript)


def write_bytes(data: bytes) -> Pair:
    """Writes bytes to standard output, as they are."""
    return pair(
        f"import os\nos.write(1, {data!r})",
        f"require('fs').writeSync(1, Buffer.from('{data.hex()}', 'hex'));",
    )


# What an attempt may leave behind, and what the next one may find. Each place is a directory that programs can write.

PLACES = ("/workspace", "/tmp", "/dev/shm")
_TRACE = "left-by-an-attempt"
_PYTHON_LOOK = f"""
import json, os
places = [os.path.join(place, "{_TRACE}") for place in {list(PLACES)!r} + [os.environ["HOME"]]]
def commands():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(open(f"/proc/{{pid}}/cmdline").read())
        except OSError:
            pass
    return found
def look():
    return {{"files": [place for place in places if os.path.exists(place)],
             "processes": sum("98765" in command for command in commands()),
             "variable": os.environ.get("LEFT"), "call": os.environ["SLUICEGATE_CALL_ID"],
             "attempt": os.environ["SLUICEGATE_ATTEMPT"]}}
"""
_JAVASCRIPT_LOOK = f"""
const fs = require('fs');
const {{ spawn }} = require('child_process');
const places = [...{list(PLACES)!r}, process.env.HOME].map((place) => `${{place}}/{_TRACE}`);
const commands = () => fs.readdirSync('/proc').filter((name) => /^\\d+$/.test(name)).map((pid) => {{
  try {{ return fs.readFileSync(`/proc/${{pid}}/cmdline`, 'latin1'); }} catch {{ return ''; }}
}});
const look = () => ({{files: places.filter((place) => fs.existsSync(place)),
  processes: commands().filter((command) => command.includes('98765')).length, variable: process.env.LEFT ?? null,
  call: process.env.SLUICEGATE_CALL_ID, attempt: process.env.SLUICEGATE_ATTEMPT}});
"""
_PYTHON_LEAVE = """
import subprocess
for place in places:
    open(place, "w").write("x")
os.environ["LEFT"] = "x"
subprocess.Popen(["sleep", "98765"], start_new_session=True)
while look()["processes"] == 0:
    pass
"""
_JAVASCRIPT_LEAVE = """
for (const place of places) fs.writeFileSync(place, 'x');
process.env.LEFT = 'x';
spawn('sleep', ['98765'], {detached: true, stdio: 'ignore'}).unref();
while (look().processes === 0);
"""
LOOK = pair(
    _PYTHON_LOOK + "print(json.dumps(look()))",
    _JAVASCRIPT_LOOK + "console.log(JSON.stringify(look()));",
)
LEAVE = pair(
    _PYTHON_LOOK + _PYTHON_LEAVE + "print(json.dumps(look()))",
    _JAVASCRIPT_LOOK + _JAVASCRIPT_LEAVE + "console.log(JSON.stringify(look()));",
)


def leave_and_tell(url: str) -> Pair:
    """Tells `url` which attempt it is. The first leaves its traces before that; each looks around as it begins."""
    return pair(
        _PYTHON_LOOK
        + f"""
import urllib.request
seen = look()
if seen["attempt"] == "1":
{_indented(_PYTHON_LEAVE)}
    urllib.request.urlopen("{url}/hold?" + seen["call"] + "." + seen["attempt"]).read()
else:
    urllib.request.urlopen("{url}/echo?" + seen["call"] + "." + seen["attempt"]).read()
print(json.dumps(seen))
""",
        _JAVASCRIPT_LOOK
        + f"""
const seen = look();
if (seen.attempt === '1') {{
{_JAVASCRIPT_LEAVE}
  await fetch(`{url}/hold?${{seen.call}}.${{seen.attempt}}`);
}} else {{
  await fetch(`{url}/echo?${{seen.call}}.${{seen.attempt}}`);
}}
console.log(JSON.stringify(seen));
""",
    )


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


# The network


def ask(*requests: str) -> Pair:
    """Makes each request (`GET http://…`, or `DIAL address:port` for plain TCP). Says the nonce of who answered, or null."""
    asked = json.dumps([request.split(" ", 1) for request in requests])
    return pair(
        f"""
import json, re, socket, urllib.request
def ask(method, target):
    try:
        if method == "DIAL":
            address, port = target.split(":")
            with socket.create_connection((address, int(port)), 20) as sock:
                sock.sendall(b"hello\\r\\n")
                answer = sock.recv(1000).decode()
                return answer.split()[1] if answer.startswith("recorded ") else None
        request = urllib.request.Request(target, method=method, data=b"x" if method == "POST" else None)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return re.search(r"nonce\\W*([0-9a-f]{{16}})", answer.read().decode())[1]
    except (OSError, ValueError):
        return None
print(json.dumps([ask(method, target) for method, target in {asked}]))
""",
        f"""
import net from 'node:net';
const dial = (host, port) => new Promise((done) => {{
  const socket = net.connect(Number(port), host, () => socket.write('hello\\r\\n'));
  socket.once('data', (data) => {{ done(/^recorded (\\w+)/.exec(data)?.[1] ?? null); socket.destroy(); }});
  socket.once('error', () => done(null));
  socket.once('close', () => done(null));
}});
async function ask(method, target) {{
  try {{
    if (method === 'DIAL') return await dial(...target.split(':'));
    const answer = await fetch(target, {{method, body: method === 'POST' ? 'x' : undefined}});
    return answer.ok ? /nonce\\W*([0-9a-f]{{16}})/.exec(await answer.text())[1] : null;
  }} catch {{
    return null;
  }}
}}
const seen = [];
for (const [method, target] of {asked}) seen.push(await ask(method, target));
console.log(JSON.stringify(seen));
""",
    )
