"""JavaScript programs run as Node.js runs a file: both module systems, its endings, its network."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from proxy.network import Reason
from sandbox.contract import Cause, Status
from tests.javascript import run_js
from tests.lab import NAMED, REGISTRY, Lab, Outside, Run, named

type Confined = Callable[..., Run]


def only(run: Run) -> dict[str, Any]:
    assert run.result.status is Status.SUCCESS, run.result.stderr
    return run.only


def test_commonjs_is_as_in_a_file_of_its_own(lab: Lab) -> None:
    """`require`, `module`, `__filename`, `require.main`, `this`, and what a required file exports."""
    seen = only(
        run_js(
            lab.run,
            """
const fs = require('fs');
fs.writeFileSync('other.js', 'exports.answer = 42; exports.main = require.main === module;');
fs.writeFileSync('data.json', '{"a": [1]}');
const other = require('./other');
exports.mine = 1;
report({file: __filename, dir: __dirname, main: require.main === module, id: module.id, self: this === module.exports,
        other, data: require('./data.json'), argv: process.argv, exec: process.execArgv, cwd: process.cwd(),
        cache: Object.keys(require.cache), children: module.children.length, strict: (function () { return !this })()});
""",
        )
    )
    assert seen == {
        "file": "/workspace/main.js", "dir": "/workspace", "main": True, "id": ".", "self": True,
        "other": {"answer": 42, "main": False}, "data": {"a": [1]}, "argv": ["/opt/node/bin/node", "/workspace/main.js"],
        "exec": [], "cwd": "/workspace", "children": 2, "strict": False,
        "cache": ["/workspace/main.js", "/workspace/other.js", "/workspace/data.json"],
    }  # fmt: skip


def test_an_es_module_is_as_in_a_file_of_its_own(lab: Lab) -> None:
    """`import`, top-level await, dynamic import, JSON import and `import.meta`."""
    seen = only(
        run_js(
            lab.run,
            """
import fs, { writeFileSync } from 'node:fs';
import * as path from 'path';
writeFileSync('other.mjs', 'export default 42; export const main = import.meta.main;');
writeFileSync('old.cjs', 'module.exports = {old: true, main: require.main === module};');
writeFileSync('data.json', '{"a": [1]}');
const other = await import('./other.mjs');
const { default: data } = await import('./data.json', { with: { type: 'json' } });
const late = await new Promise((done) => setTimeout(done, 1, 'late'));
report({url: import.meta.url, file: import.meta.filename, dir: import.meta.dirname, main: import.meta.main,
        resolved: import.meta.resolve('./other.mjs'), other: [other.default, other.main], data, late, sep: path.sep,
        same: fs.writeFileSync === writeFileSync, self: typeof this, strict: (function () { return !this })(),
        old: (await import('./old.cjs')).default});
""",
        )
    )
    assert seen == {
        "url": "file:///workspace/main.js", "file": "/workspace/main.js", "dir": "/workspace", "main": True,
        "resolved": "file:///workspace/other.mjs", "other": [42, False], "data": {"a": [1]}, "late": "late", "sep": "/",
        "same": True, "self": "undefined", "strict": True, "old": {"old": True, "main": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "const os = require('os'); report({eol: os.EOL}); await 1;",
        "import fs from 'fs'; const os = require('os'); report({eol: os.EOL});",
        "import fs from 'fs'; if (require.main === module) report({eol: require('os').EOL});",
        "import { createRequire } from 'module'; const require = createRequire(import.meta.url); report({eol: require('os').EOL});",
        "import * as path from 'path'; const __dirname = path.dirname(import.meta.filename); report({eol: require(__dirname + '/../usr/../proc/../opt/node/lib/node_modules/npm/package.json') && '\\n'});",
        "import os from 'os'; export const eol = os.EOL; module.exports = {}; if (__filename === '/workspace/main.js') report({eol});",
    ],
    ids=["await", "import", "main", "own require", "own dirname", "exports"],
)
def test_a_program_may_mix_the_two_systems(lab: Lab, code: str) -> None:
    """People do; and one that defines `require` or `__dirname` itself has its own."""
    assert only(run_js(lab.run, code)) == {"eol": "\n"}


def test_what_is_lent_to_an_es_module_is_not_there_in_commonjs_and_is_listed_nowhere(lab: Lab) -> None:
    """A CommonJS program finds the globals of plain Node.js."""
    look = "report({global: ['require', 'module', 'exports', '__filename', '__dirname'].filter((name) => name in globalThis), keys: Object.keys(globalThis)});"
    plain = only(run_js(lab.run, look))
    mixed = only(run_js(lab.run, "import 'fs'; " + look))
    assert plain["global"] == []
    assert len(mixed["global"]) == 5
    assert plain["keys"] == mixed["keys"]


def test_a_stack_trace_names_the_line_of_the_program_and_no_file_of_ours(lab: Lab) -> None:
    """In both module systems, thrown at once or late; the line itself is shown."""
    for head in ("const fs = require('fs');", "import fs from 'fs';"):
        result = run_js(lab.run, f"{head}\nfunction inner() {{\n  throw new TypeError('boom');\n}}\ninner();\n").result
        assert (result.status, result.cause, result.exit_code) == (Status.ERROR, Cause.EXIT, 1)
        assert "main.js:3\n  throw new TypeError('boom');" in result.stderr
        assert "TypeError: boom\n    at inner (" in result.stderr
        assert "/workspace/main.js:5:1" in result.stderr
        assert "/run/" not in result.stderr
        result = run_js(lab.run, f"{head}\nsetTimeout(() => {{\n  null.x;\n}}, 1);\n").result
        assert result.exit_code == 1
        assert "/workspace/main.js:3:" in result.stderr


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("Promise.reject(new Error('nobody waits'))", 1, "nobody waits"),
        ("(async () => { throw new Error('nobody waits') })()", 1, "nobody waits"),
        ("await Promise.reject(new Error('nobody waits'))", 1, "nobody waits"),
        ("let a = 1;\nlet a = 2;", 1, "main.js:2\nlet a = 2;"),
        ("function (", 1, "SyntaxError"),
        ("import x from 'fs'\nfoo(", 1, "SyntaxError"),
        ("import x from 'no-such-package'", 1, "Cannot find package 'no-such-package'"),
        ("import { nope } from 'fs'", 1, "does not provide an export named 'nope'"),
        ("require('no-such-package')", 1, "Cannot find module 'no-such-package'"),
        ("undefinedName", 1, "undefinedName is not defined"),
        ("await new Promise(() => {})", 13, "unsettled top-level await"),
        ("process.exit(7)", 7, ""),
        ("process.exitCode = 9", 9, ""),
        ("process.exit(137)", 137, ""),
    ],
)
def test_what_goes_wrong_is_an_error_with_the_exit_code_of_node(lab: Lab, code: str, exit_code: int, said: str) -> None:
    """An unhandled rejection and a syntax error are no success."""
    result = lab.run(code, prelude=False, language="javascript").result
    assert (result.status, result.cause, result.exit_code) == (Status.ERROR, Cause.EXIT, exit_code)
    assert said in result.stderr
    assert "/run/" not in result.stderr


def test_a_signal_is_reported_as_one(lab: Lab) -> None:
    """The attempt names it."""
    for name, number in (("SIGKILL", 9), ("SIGABRT", 6), ("SIGUSR2", 12)):
        result = run_js(lab.run, f"process.kill(process.pid, '{name}'); setTimeout(() => {{}}, 60_000)").result
        assert (result.status, result.cause) == (Status.ERROR, Cause.SIGNAL)
        assert result.attempts[0].signal == number


def test_output_is_whole_and_the_streams_are_apart(lab: Lab) -> None:
    """Also what is written right before `process.exit`, and characters of every length."""
    result = run_js(
        lab.run,
        "console.log('é😀'); console.error('err'); process.stdout.write('x'.repeat(500_000)); process.exit(0)",
    ).result
    assert result.status is Status.SUCCESS
    assert result.stdout == "é😀\n" + "x" * 500_000
    assert result.stderr == "err\n"


def test_standard_input_is_empty(confined: Confined) -> None:
    """At its end at once."""
    seen = only(run_js(confined, "let n = 0; for await (const part of process.stdin) n += part.length; report({n})"))
    assert seen == {"n": 0}


def test_the_environment_is_made_from_nothing_and_the_calls_own_is_added(lab: Lab) -> None:
    """`NODE_OPTIONS` holds for children too; time and text do not depend on the host."""
    seen = only(
        run_js(
            lab.run,
            """
const { execFileSync } = require('child_process');
const child = (code) => execFileSync(process.execPath, ['-p', code]).toString().trim();
report({mine: process.env.MINE, child: child('process.env.MINE'), tz: new Date(0).getTimezoneOffset(), home: require('os').homedir(),
        temporary: require('os').tmpdir(), heap: [process.execPath, child("require('v8').getHeapStatistics().heap_size_limit >> 20")],
        names: Object.keys(process.env)});
""",
            env={"MINE": "a=b\nc 😀"},
            memory_mib=256,
        )
    )
    assert (seen["mine"], seen["child"], seen["tz"]) == ("a=b\nc 😀", "a=b\nc 😀", 0)
    assert (seen["home"], seen["temporary"]) == ("/workspace", "/tmp")
    assert 256 <= int(seen["heap"][1]) < 300
    assert {"PATH", "LANG", "NODE_OPTIONS", "UV_THREADPOOL_SIZE", "SLUICEGATE_CALL_ID", "MINE"} <= set(seen["names"])
    assert not {name for name in seen["names"] if name.startswith("LD_")}


def test_threads_processes_and_files_work(confined: Confined) -> None:
    """Workers, children, `fork`, and a server of the program's own."""
    seen = only(
        run_js(
            confined,
            """
const { Worker } = require('worker_threads');
const { fork, execFileSync } = require('child_process');
const fs = require('fs');
const http = require('http');
const message = (from) => new Promise((done, fail) => { from.once('message', done); from.once('error', fail); });
(async () => {
  const worked = message(new Worker("require('worker_threads').parentPort.postMessage([6 * 7, typeof require, process.argv.length])", {eval: true}));
  fs.writeFileSync('child.js', 'process.send({pid: process.pid, argv: process.execArgv})');
  const child = await message(fork('./child.js'));
  const server = http.createServer((request, response) => response.end('own ' + request.url)).listen(0, '127.0.0.1');
  await new Promise((done) => server.once('listening', done));
  const own = await (await fetch(`http://127.0.0.1:${server.address().port}/x`)).text();
  server.close();
  report({worker: await worked, child: child.pid !== process.pid && child.argv, own,
          shell: execFileSync('/bin/sh', ['-c', 'echo $HOME']).toString()});
})();
""",
        )
    )
    assert seen == {"worker": [42, "function", 2], "child": [], "own": "own /x", "shell": "/workspace\n"}


# Memory


WASM = "Buffer.from('0061736d0100000001070160027f7f017f030201000707010361646400000a09010700200020016a0b', 'hex')"


@pytest.mark.parametrize("memory_mib", [128, 512])
def test_webassembly_and_fetch_work_within_the_smallest_memory(
    confined: Confined, outside: Outside, memory_mib: int
) -> None:
    """No limit on address space is in the way."""
    outside.forget()
    seen = only(
        run_js(
            confined,
            f"""
const {{ instance }} = await WebAssembly.instantiate({WASM});
const memory = new WebAssembly.Memory({{ initial: 16, maximum: 65536 }});
const answer = await fetch('https://allowed.test/echo');
report({{sum: instance.exports.add(40, 2), bytes: memory.buffer.byteLength, nonce: (await answer.json()).nonce}});
""",
            NAMED,
            memory_mib=memory_mib,
        )
    )
    assert seen == {"sum": 42, "bytes": 1 << 20, "nonce": outside.allowed_tls.nonce}


def test_garbage_is_collected_before_it_is_too_much(lab: Lab) -> None:
    """Short-lived objects beside what lives, in the smallest attempt; and gigabytes of buffers in a usual one."""
    objects = """
const kept = []; while (kept.length < 300) kept.push(new Array(10_000).fill(kept.length));
let made = 0; for (let i = 0; i < 2e6; i++) made += [i, {i}, `${i}`].length;
report({made, kept: kept.length});
"""
    assert only(run_js(lab.run, objects, memory_mib=128)) == {"made": 6_000_000, "kept": 300}
    buffers = "let made = 0; for (let i = 0; i < 1000; i++) made += Buffer.alloc(4 << 20, 1).length; report({made});"
    assert only(run_js(lab.run, buffers, memory_mib=512)) == {"made": 1000 * (4 << 20)}


@pytest.mark.parametrize(
    "code",
    [
        "const kept = []; for (;;) kept.push(new Array(1000).fill(Math.random()))",
        "const kept = []; for (;;) kept.push(Buffer.alloc(1 << 20, 1))",
        "const kept = {}; for (let i = 0; ; i++) kept['key' + i] = 'value '.repeat(100) + i",
        "const { Worker } = require('worker_threads'); new Worker('const kept = []; for (;;) kept.push(new Array(1000).fill(1.5))', {eval: true, resourceLimits: {maxOldGenerationSizeMb: 4096}})",
    ],
    ids=["arrays", "buffers", "strings", "worker"],
)
def test_a_program_that_is_too_large_is_ended_by_the_limit_on_memory(lab: Lab, code: str) -> None:
    """The cause is memory, whatever it is filled with; not an abort of V8's."""
    result = run_js(lab.run, code, memory_mib=128, timeout=60).result
    assert (result.status, result.cause) == (Status.KILLED, Cause.MEMORY), result.stderr


def test_a_timeout_ends_a_program_that_never_yields(lab: Lab) -> None:
    """With what it wrote before."""
    result = run_js(lab.run, "console.log('started'); for (;;);", timeout=1).result
    assert (result.status, result.cause, result.stdout) == (Status.TIMEOUT, Cause.WALL_CLOCK, "started\n")


# Network


REQUEST = """
const one = (module, url, options = {}) => new Promise((done, fail) => {
  const request = module.request(url, options, (response) => {
    let text = ''; response.on('data', (part) => text += part); response.on('end', () => done([response.statusCode, text]));
  }); request.on('error', fail); request.end();
});
"""

WAYS = {
    "fetch": "(async (url) => { const answer = await fetch(url); return [answer.status, await answer.text()] })",
    "http": "((url) => one(url.startsWith('https') ? require('https') : require('http'), url))",
    "own agent": """((url) => { const module = url.startsWith('https') ? require('https') : require('http');
                     return one(module, url, {agent: new module.Agent({keepAlive: false})}) })""",
    "http2": """((url) => new Promise((done, fail) => {
                  const session = require('http2').connect(url); session.on('error', fail);
                  const stream = session.request({':path': new URL(url).pathname}); let status, text = '';
                  stream.on('response', (headers) => status = headers[':status']);
                  stream.on('data', (part) => text += part); stream.on('end', () => { session.close(); done([status, text]) });
                  stream.on('error', fail); }))""",
}
BY_ENVIRONMENT = {"fetch", "http"}


@pytest.mark.parametrize("url", ["http://allowed.test/echo", "https://allowed.test/echo"])
@pytest.mark.parametrize("way", ["fetch", "http", "own agent"])
def test_each_client_reaches_what_is_allowed_and_nothing_else(
    confined: Confined, outside: Outside, way: str, url: str
) -> None:
    """By the proxy of the environment, or captured: a client that looked the name up itself did not use the former."""
    outside.forget()
    denied = url.replace("allowed.test", "other.test")
    run = run_js(
        confined,
        f"{REQUEST} const get = {WAYS[way]}; (async () => report({{allowed: await get('{url}'), denied: await get('{denied}').catch((e) => [String(e.cause ?? e)])}}))();",
        NAMED,
    )
    seen = only(run)
    peer = outside.allowed_tls if url.startswith("https") else outside.allowed
    assert seen["allowed"][0] == 200
    assert peer.nonce in seen["allowed"][1]
    assert seen["denied"][0] != 200
    assert outside.other.untouched
    assert outside.other_tls.untouched
    assert Reason.HOST_NOT_ALLOWED in run.reasons
    looked_up = any(event.get("layer") == "dns" for event in run.events)
    assert looked_up is (way not in BY_ENVIRONMENT)


def test_http2_is_captured(lab: Lab, outside: Outside) -> None:
    """Node's own client knows no proxy."""
    outside.forget()
    call = {"allow_network": True, "domains": ["h2.test"]}
    seen = only(
        run_js(
            lab.run, f"const get = {WAYS['http2']}; get('https://h2.test/echo').then((seen) => report({{seen}}))", call
        )
    )
    assert seen["seen"][0] == 200
    assert outside.h2.nonce in seen["seen"][1]


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_a_websocket_is_carried(confined: Confined, outside: Outside, scheme: str) -> None:
    """The one that is built in, by the proxy of the environment."""
    outside.forget()
    run = run_js(
        confined,
        f"""
const socket = new WebSocket('{scheme}://allowed.test/ws');
socket.onopen = () => socket.send('hello');
socket.onmessage = (event) => {{ report({{said: event.data}}); socket.close() }};
socket.onerror = (event) => {{ report({{failed: String(event.error?.stack), cause: String(event.error?.cause)}}) }};
""",
        NAMED,
    )
    peer = outside.allowed_tls if scheme == "wss" else outside.allowed
    assert only(run) == {"said": f"{peer.nonce} hello"}
    assert not any(event.get("layer") == "dns" for event in run.events)


def test_without_a_network_each_client_is_told_why(confined: Confined, outside: Outside) -> None:
    """A refusal can be read; a name does not exist; a socket is reset."""
    with outside.silence():
        run = run_js(
            confined,
            REQUEST
            + """
const dns = require('dns').promises; const net = require('net');
const failed = (promise) => promise.then(() => 'reached', (error) => error.code ?? error.cause?.code ?? String(error));
(async () => report({
  plain: await one(require('http'), 'http://allowed.test/').then(([status, text]) => [status, JSON.parse(text).code]),
  fetch: await fetch('https://allowed.test/').then(async (answer) => [answer.status, (await answer.json()).code]),
  lookup: await failed(dns.lookup('allowed.test')),
  resolve: await failed(dns.resolve4('allowed.test')),
  raw: await failed(new Promise((done, fail) => { const socket = net.connect(5432, '93.184.216.34');
         socket.on('data', done); socket.on('error', fail); socket.on('close', () => fail(new Error('closed'))) })),
}))();
""",
        )
    seen = only(run)
    assert seen["plain"] == [403, "network_off"]
    assert seen["fetch"] == [403, "network_off"]
    assert seen["lookup"] == "ENOTFOUND"
    assert seen["resolve"] == "ENOTFOUND"
    assert seen["raw"] != "reached"
    assert run.reasons == {Reason.NETWORK_OFF}


def test_registry_default_is_the_registry_of_the_language(lab: Lab, outside: Outside) -> None:
    """npm's for JavaScript, read-only; Python's index is a stranger to it, and the other way round."""
    outside.forget()
    own = f"project-{secrets.token_hex(6)}"  # the proxy keeps pages for a minute
    run = run_js(
        lab.run,
        """
const get = async (url, method = 'GET') => (await fetch(url, {method}).catch(() => ({}))).status;
report({get: await get('https://modules.test/OWN'), put: await get('https://modules.test/OWN', 'PUT'), python: await get('https://index.test/simple/six/')});
""".replace("OWN", own),
        REGISTRY,
    )
    seen = only(run)
    assert seen["get"] == 200
    assert seen["put"] == 403
    assert seen.get("python") != 200
    assert [request.method for request in outside.npm.journal.requests] == ["GET"]
    assert outside.index.untouched
    other = lab.run(f"report(seen=fetch('https://modules.test/{own}'))", REGISTRY)
    assert other.only["seen"]["status"] != 200


def test_npm_reads_the_registry(lab: Lab, outside: Outside) -> None:
    """The npm in the sandbox trusts our authority, and is told of a denial."""
    outside.forget()
    own = f"project-{secrets.token_hex(6)}"
    code = """
const { spawnSync } = require('child_process');
const npm = (...words) => spawnSync('npm', words, {encoding: 'utf8'});
const view = npm('view', 'OWN', '--registry=https://modules.test/', '--fetch-retries=0');
report({status: view.status, err: view.stderr.slice(0, 2000)});
"""
    only(run_js(lab.run, code.replace("OWN", own), REGISTRY, timeout=60))
    assert ("GET", f"/{own}") in [(request.method, request.target) for request in outside.npm.journal.requests]


@pytest.mark.parametrize(
    "url", ["http://other.test/", "https://other.test/", "http://broken.test/", "https://broken.test/"]
)
def test_a_program_that_does_not_read_what_it_is_refused_with_ends(lab: Lab, url: str) -> None:
    """A response that nobody reads keeps Node.js up for as long as its connection lasts. The reason phrase says why."""
    module = "https" if url.startswith("https") else "http"
    code = f"require('{module}').get('{url}', (response) => report({{status: response.statusCode, why: response.statusMessage}}))"
    run = run_js(lab.run, code, named("other.test", "broken.test") if "broken" in url else NAMED, timeout=20)
    seen = only(run)
    if "broken" in url:
        assert seen["status"] == 502
        assert seen["why"].startswith("Allowed by sluicegate, but failed: dns_failed: ")
    else:
        assert seen["status"] == 403
        assert seen["why"].startswith("Blocked by sluicegate: host_not_allowed: ")
