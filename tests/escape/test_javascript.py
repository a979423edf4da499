"""What a Node.js program finds of us: it waited at a gate that ours had opened, and nothing of that is left."""

from __future__ import annotations

import pytest

from tests.escape.conftest import Confined
from tests.integration.test_javascript import only
from tests.javascript import run_js, unconfined_js
from tests.lab import Lab

FDS = """
const fs = require('fs');
const links = (pid) => { const found = {}; let names = [];
  try { names = fs.readdirSync(`/proc/${pid}/fd`) } catch { return found }
  for (const fd of names) try { found[fd] = fs.readlinkSync(`/proc/${pid}/fd/${fd}`) } catch {}
  return found };
"""


def test_the_program_has_no_descriptor_but_its_own(confined: Confined) -> None:
    """Each beyond the three streams is one that Node.js opened itself, and none is inherited by a child."""
    code = (
        FDS
        + """
const { execFileSync } = require('child_process');
const kind = (link) => link.replace(/\\d+/g, 'N');
const own = links('self');
const others = fs.readdirSync('/proc').filter((name) => /^\\d+$/.test(name) && Number(name) !== process.pid);
const beyond = Object.entries(own).filter(([fd]) => fd > 2).map(([, link]) => link);
report({streams: [own[0], own[1], own[2]].map(kind), kinds: beyond.map(kind).sort(),
        lonely: beyond.filter((link) => link.startsWith('pipe') && beyond.filter((other) => other === link).length === 1),
        child: execFileSync('/bin/ls', ['/proc/self/fd'], {stdio: ['inherit', 'pipe', 'inherit']}).toString().split('\\n').filter((fd) => fd && fd < 3),
        inherited: execFileSync('/bin/sh', ['-c', 'for fd in /proc/$$/fd/*; do echo ${fd##*/}; done']).toString().trim().split('\\n'),
        others: others.map((pid) => Object.keys(links(pid)))});
"""
    )
    seen = only(run_js(confined, code))
    assert seen["streams"] == ["/dev/null", "pipe:[N]", "pipe:[N]"]
    # A pipe of ours would have one end here. Those of libuv have both.
    assert seen["lonely"] == []
    assert set(seen["kinds"]) <= {"anon_inode:[eventpoll]", "anon_inode:[eventfd]", "pipe:[N]", "/dev/null"}
    plain = unconfined_js(code)[0]
    assert set(seen["kinds"]) <= set(plain["kinds"])
    assert len(seen["kinds"]) <= len(plain["kinds"])
    assert set(seen["inherited"]) <= set(plain["inherited"])
    assert all(fds == [] for fds in seen["others"]), "pid 1 shows none of its descriptors"


def test_nothing_of_the_gate_can_be_reached(confined: Confined) -> None:
    """No module, global, argument, variable or handler of it; a worker and a child have none either."""
    code = """
const { Worker } = require('worker_threads');
const { execFileSync } = require('child_process');
const Module = require('module');
const look = `JSON.stringify({argv: process.argv.slice(2), exec: process.execArgv, cache: Object.keys(require.cache),
  names: Object.getOwnPropertyNames(globalThis).sort(), env: Object.keys(process.env).filter((name) => /gate$|gate[^_]|CALL$|UP$/i.test(name)),
  listeners: process.eventNames().filter((name) => typeof name === 'string')})`;
const main = JSON.parse(eval(look));
new Worker(`require('worker_threads').parentPort.postMessage(eval(${JSON.stringify(look)}))`, {eval: true}).once('message', (worker) => {
  report({main, worker: JSON.parse(worker), child: execFileSync(process.execPath, ['-p', 'process.execArgv.length']).toString().trim(),
          parent: String(module.parent), children: module.children.length, mainModule: process.mainModule === module,
          paths: Object.keys(Module._pathCache).filter((path) => path.includes('gate'))});
});
"""
    seen = only(run_js(confined, code))
    plain = unconfined_js(code)[0]
    assert seen["main"]["cache"] == ["/workspace/main.js"]
    assert seen["main"]["argv"] == seen["main"]["exec"] == seen["worker"]["exec"] == seen["main"]["env"] == []
    assert seen["main"]["names"] == [
        name
        for name in plain["main"]["names"]
        if name not in ("module", "exports", "require", "__filename", "__dirname")
    ]
    assert seen["worker"]["names"] == plain["worker"]["names"]
    assert seen["main"]["listeners"] == plain["main"]["listeners"]
    assert (seen["parent"], seen["children"], seen["mainModule"]) == ("null", 0, True)
    assert seen["paths"] == []


def test_no_signal_opens_a_debugger(confined: Confined) -> None:
    """SIGUSR1 does in a plain Node.js. One that the program opens itself listens in its own network alone."""
    code = """
const net = require('net');
const listens = (port) => new Promise((done) => { const socket = net.connect(port, '127.0.0.1', () => { socket.destroy(); done(true) });
  socket.on('error', () => done(false)) });
const until = async (port) => { for (let i = 0; i < 100; i++) { if (await listens(port)) return true; await new Promise((done) => setTimeout(done, 5)) } return false };
(async () => {
  process.kill(process.pid, 'SIGUSR1');
  const bySignal = await until(9229);
  if (!bySignal) require('inspector').open(9230, '127.0.0.1');
  report({bySignal, own: await until(9230)});
  process.exit(0);
})();
"""
    run = run_js(confined, code)
    assert only(run) == {"bySignal": False, "own": True}
    assert "127.0.0.1:9229" not in run.result.stderr
    assert unconfined_js(code)[0]["bySignal"] is True


@pytest.mark.parametrize("name", ["NODE_OPTIONS", "NODE_EXTRA_CA_CERTS", "NODE_USE_ENV_PROXY", "LD_PRELOAD", "PATH"])
def test_what_node_is_started_with_is_not_the_calls_to_say(lab: Lab, name: str) -> None:
    """It is refused before any attempt."""
    with pytest.raises(ValueError, match=rf"(?s){name}.*is set by sluicegate"):
        run_js(lab.run, "1", env={name: "--inspect"})


def test_what_lies_under_node_gives_no_more_than_the_sandbox_has(confined: Confined) -> None:
    """Internal bindings, native addons and processes are those of a confined user without capabilities."""
    code = """
const fs = require('fs'); const os = require('os'); const { spawnSync } = require('child_process');
const tried = (probe) => { try { return probe() } catch (error) { return error.code ?? String(error) } };
const binding = (name) => tried(() => typeof process.binding(name));
report({
  bindings: ['spawn_sync', 'process_wrap', 'fs', 'natives', 'os'].map(binding),
  internal: tried(() => require('internal/bootstrap/realm')),
  setuid: tried(() => process.setuid(0)), groups: tried(() => process.setgroups([0])), ids: [process.getuid(), process.getgid()],
  pid1: ['mem', 'environ', 'fd/3', 'maps'].map((name) => tried(() => fs.openSync(`/proc/1/${name}`, 'r'))),
  kill: tried(() => process.kill(1, 'SIGKILL')),
  unshare: spawnSync('/usr/bin/unshare', ['-Ur', 'true']).status,
  shadow: tried(() => fs.readFileSync('/etc/shadow')), write: tried(() => fs.writeFileSync('/opt/node/bin/x', '')),
  gate: tried(() => fs.writeFileSync('/run/gate.cjs', '')), sys: tried(() => fs.writeFileSync('/proc/sys/kernel/core_pattern', 'x')),
  interfaces: Object.keys(os.networkInterfaces()), processes: fs.readdirSync('/proc').filter((name) => /^\\d+$/.test(name)).length,
  status: fs.readFileSync('/proc/self/status', 'utf8').match(/^(CapEff|CapBnd|NoNewPrivs|Seccomp):\\s+\\S+/gm).map((line) => line.replace(/\\s+/, ' ')),
});
"""
    seen = only(run_js(confined, code))
    assert seen["internal"] == "MODULE_NOT_FOUND"
    assert {seen["setuid"], seen["groups"]} <= {"EPERM", "EINVAL"}
    assert seen["ids"] == [1000, 1000]
    assert all(answer in ("EACCES", "EPERM", "ENOENT") for answer in seen["pid1"]), seen["pid1"]
    assert seen["kill"] in (True, "EPERM"), "the kernel takes no signal for a first process that has no handler"
    assert seen["unshare"] != 0
    assert seen["shadow"] == "ENOENT"
    assert seen["write"] == seen["gate"] == "EROFS"
    assert seen["sys"] in ("EROFS", "EACCES")
    assert seen["interfaces"] == ["lo"]
    assert seen["processes"] <= 3
    zero = "0" * 16
    assert seen["status"] == [f"CapEff: {zero}", f"CapBnd: {zero}", "NoNewPrivs: 1", "Seccomp: 2"]


def test_a_program_cannot_pass_for_another_ending(confined: Confined) -> None:
    """It writes to every descriptor of another process that it can open: what is reported is its own exit."""
    code = (
        FDS
        + """
for (const pid of fs.readdirSync('/proc').filter((name) => Number(name) !== process.pid && name !== 'self' && name !== 'thread-self'))
  for (let fd = 0; fd < 256; fd++) try { fs.writeFileSync(`/proc/${pid}/fd/${fd}`, 'E0 0.000000 0\\n') } catch {}
process.reallyExit(23);
"""
    )
    result = run_js(confined, code).result
    assert result.exit_code == 23
