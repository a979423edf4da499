"""What works when it is allowed, with the clients as they come: no proxy setting, no certificate setting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from proxy.network import Reason
from tests.lab import NAMED, OPEN, REGISTRY, Call, Lab, Outside, descriptors, named, unconfined
from tests.servers import content_sha256

MIB = 1024 * 1024

CLIENTS = {
    "urllib": "import urllib.request\nbody = urllib.request.urlopen(URL).read()",
    "http.client": """
import http.client
kind = http.client.HTTPSConnection if URL.startswith("https") else http.client.HTTPConnection
c = kind(URL.split("/")[2])
c.request("GET", "/echo")
body = c.getresponse().read()
""",
    "requests": "import requests\nbody = requests.get(URL).content",
    "requests-without-environment": """
import requests
s = requests.Session()
s.trust_env = False
s.verify = os.environ["SSL_CERT_FILE"]
body = s.get(URL).content
""",
    "urllib3": "import urllib3, ssl\nbody = urllib3.PoolManager(ssl_context=ssl.create_default_context()).request('GET', URL).data",
    "httpx": "import httpx\nbody = httpx.get(URL).content",
    "httpx-http2": "import httpx\nwith httpx.Client(http2=True) as c:\n    body = c.get(URL).content",
    "httpx-async": """
import asyncio, httpx
async def main():
    async with httpx.AsyncClient() as c:
        return (await c.get(URL)).content
body = asyncio.run(main())
""",
    "httpx-without-environment": """
import httpx, ssl
body = httpx.get(URL, trust_env=False, verify=ssl.create_default_context()).content
""",
    "aiohttp": """
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession() as session, session.get(URL) as answer:
        return await answer.read()
body = asyncio.run(main())
""",
    "aiohttp-with-environment": """
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(URL) as answer:
        return await answer.read()
body = asyncio.run(main())
""",
    "curl": "import subprocess\nbody = subprocess.run(['curl', '-sSf', URL], check=True, capture_output=True).stdout",
    "curl-without-proxy": """
import subprocess
body = subprocess.run(["curl", "-sSf", "--noproxy", "*", URL], check=True, capture_output=True).stdout
""",
    "curl-without-environment": """
import subprocess
bundle = os.environ["SSL_CERT_FILE"]
body = subprocess.run(["/usr/bin/curl", "-sSf", "--cacert", bundle, URL], check=True, capture_output=True, env={}).stdout
""",
    "curl-http2": """
import subprocess
body = subprocess.run(["curl", "-sSf", "--http2", "--noproxy", "*", URL], check=True, capture_output=True).stdout
""",
    "curl-socks5-hostname": """
import subprocess
proxy = "%s:%s" % proxy_address()
body = subprocess.run(["curl", "-sSf", "--socks5-hostname", proxy, URL], check=True, capture_output=True).stdout
""",
    "curl-tunnel": "import subprocess\nbody = subprocess.run(['curl', '-sSf', '-p', URL], check=True, capture_output=True).stdout",
}


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_as_it_comes(lab: Lab, outside: Outside, client: str, scheme: str) -> None:
    """Each client fetches and, over TLS, verifies through our authority, with no setting of the user's."""
    if client == "curl-socks5-hostname" and scheme == "http":
        outside.forget()
    run = lab.run(f'URL = "{scheme}://allowed.test/echo"\n{CLIENTS[client]}\nreport(seen=as_json(body))', NAMED)
    peer = outside.allowed if scheme == "http" else outside.allowed_tls
    assert run.only["seen"]["nonce"] == peer.nonce, run.result.stderr
    assert run.denials == []
    assert run.result.network.denied == 0
    assert run.result.network.allowed > 0
    allowed = [event for event in run.events if event.get("layer") == "http" and event.get("decision") == "allow"]
    assert {(event["host"], event["method"], event["path"]) for event in allowed} == {("allowed.test", "GET", "/echo")}


@pytest.mark.parametrize(
    "client", ["aiohttp", "curl-without-proxy", "curl-without-environment", "requests", "http.client"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_client_without_proxy_settings_does_not_get_out_either(
    lab: Lab, outside: Outside, client: str, scheme: str
) -> None:
    """The same clients reach nothing that is not allowed, and fail at once."""
    code = f"""
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
URL = "{scheme}://other.test/echo"
try:
    exec({CLIENTS[client]!r})
    report(seen=body.decode("latin-1"))
except Exception as error:
    report(seen=repr(error))
"""
    with outside.silence():
        run = lab.run(code, NAMED)
    assert outside.other.nonce not in run.only["seen"]
    assert run.reasons == {Reason.HOST_NOT_ALLOWED}
    assert run.result.usage.wall_seconds < 10
    allowed = lab.run(code, named("other.test"))
    assert (outside.other if scheme == "http" else outside.other_tls).nonce in allowed.only["seen"]


def test_subdomains_of_a_named_host_are_allowed(lab: Lab, outside: Outside) -> None:
    """A named host covers what lies below it."""
    run = lab.run('report(seen=fetch("https://sub.allowed.test/echo"))', NAMED)
    assert run.only["seen"]["json"]["nonce"] == outside.allowed_tls.nonce


def test_a_host_with_only_an_ipv6_address_is_reached(lab: Lab, outside: Outside) -> None:
    """The inside speaks IPv4 to a name; the dial outside takes what the name has."""
    run = lab.run('report(seen=[fetch("http://six.test/echo"), fetch("https://six.test/echo")])', named("six.test"))
    assert [one["json"]["nonce"] for one in run.only["seen"]] == [outside.six.nonce, outside.six_tls.nonce]


def test_unrestricted_reaches_a_public_address(lab: Lab, outside: Outside) -> None:
    """Under unrestricted an address literal works, captured and by proxy, over both families."""
    four, six = outside.allowed.address, outside.six.address
    run = lab.run(
        f'report(seen=[fetch("http://{four}/echo"), fetch("http://[{six}]/echo")])\n'
        f"""
for host in ("{four}", "{six}"):
    name = f"[{{host}}]" if ":" in host else host
    with socket.create_connection((host, 80), PATIENCE) as sock:
        report(seen=ask(sock, f"GET /echo HTTP/1.1\\r\\nHost: {{name}}\\r\\n\\r\\n"))
""",
        OPEN,
    )
    proxied, *captured = (one["seen"] for one in run.seen)
    assert [one["json"]["nonce"] for one in proxied] == [outside.allowed.nonce, outside.six.nonce]
    assert [one["json"]["nonce"] for one in captured] == [outside.allowed.nonce, outside.six.nonce]


def test_an_address_literal_over_tls_works_where_its_certificate_has_it(lab: Lab, outside: Outside) -> None:
    """An address has no server name: both sides verify the address itself."""
    run = lab.run(f'report(seen=fetch("https://{outside.allowed.address}/echo"))', OPEN)
    assert run.only["seen"]["status"] == 200, (run.only, run.events)
    assert run.only["seen"]["json"]["nonce"] == outside.allowed_tls.nonce
    run = lab.run(f'report(seen=fetch("https://{outside.other.address}/echo"))', OPEN)
    assert run.only["seen"]["status"] in (502, None), "a certificate without the address is not taken"


def test_registry_default_reads_the_index_and_nothing_else(lab: Lab, outside: Outside) -> None:
    """The configured index is read, everything else is denied. The proxy keeps its page for who asks again."""
    outside.forget()
    run = lab.run(
        """
report(get=fetch("https://index.test/simple/six/"), head=fetch("https://index.test/simple/six/", "HEAD"))
report(post=fetch("https://index.test/simple/six/", "POST", b"CANARY"), other=fetch("https://other.test/simple/"))
""",
        REGISTRY,
    )
    assert outside.index.nonce in run.seen[0]["get"]["body"]
    assert run.seen[0]["head"]["status"] == 200
    assert run.seen[1]["post"]["status"] == 403
    assert run.seen[1]["other"]["status"] != 200
    assert [seen.method for seen in outside.index.journal.requests] == ["GET"]
    assert b"CANARY" not in outside.index.journal.received
    assert run.reasons == {Reason.METHOD_NOT_ALLOWED, Reason.HOST_NOT_ALLOWED}
    assert run.result.network.mode == "registry-default"


MAIL = {
    "captured": 'sock = socket.create_connection(("mail.test", 2525), PATIENCE)',
    "socks5": 'code, sock = socks5("mail.test", 2525)',
    "connect": 'answer, sock = connect("mail.test:2525")',
}


@pytest.mark.parametrize("way", MAIL)
def test_a_protocol_in_which_the_server_speaks_first_works_at_a_listed_port(
    lab: Lab, outside: Outside, way: str
) -> None:
    """Raw TCP is carried where a rule says `protocol: tcp`, whoever speaks first."""
    outside.forget()
    run = lab.run(
        f"""
{MAIL[way]}
sock.settimeout(PATIENCE)
file = sock.makefile("rwb")
banner = file.readline()
file.write(b"HELO \\x00\\xff inside\\r\\n")
file.flush()
report(banner=text(banner), answer=text(file.readline()))
""",
        named("mail.test"),
    )
    assert run.only == {"banner": f"220 {outside.mail.nonce} ready\r\n", "answer": "250 HELO \0\xff inside\r\n"}
    assert outside.mail.journal.connections == 1
    assert [e for e in run.events if e.get("layer") == "dial" and e["decision"] == "allow" and e["port"] == 2525]
    with outside.silence():
        denied = lab.run(
            MAIL[way]
            .replace("sock =", "sock =", 1)
            .join(
                [
                    "try:\n    ",
                    "\n    sock.shutdown(socket.SHUT_WR)\n    report(seen=text(read_all(sock)))\nexcept OSError as e:\n    report(seen='')",
                ]
            ),
            NAMED,
        )
    assert outside.mail.nonce not in denied.only["seen"]
    assert denied.denials


def test_tls_of_a_raw_tcp_host_is_the_peers_own(lab: Lab, outside: Outside) -> None:
    """TLS at a raw TCP port is not opened: the certificate is the server's, and it carries any protocol."""
    authority = outside.authority.cert_pem.bytes().decode()
    run = lab.run(
        f"""
context = ssl.create_default_context(cadata={authority!r})
with context.wrap_socket(socket.create_connection(("mail.test", 4650), PATIENCE), server_hostname="mail.test") as sock:
    report(banner=text(sock.recv(100)))
""",
        named("mail.test"),
    )
    assert outside.mail_tls.nonce in run.only["banner"], run.result.stderr


def test_a_websocket_works(lab: Lab, outside: Outside) -> None:
    """Messages go both ways, over plain HTTP and TLS, with the library's own defaults."""
    run = lab.run(
        """
from websockets.sync.client import connect as ws
for url in ("ws://allowed.test/ws", "wss://allowed.test/ws"):
    for options in ({}, {"proxy": None}):
        with ws(url, **options) as socket_:
            answers = []
            for text_ in ("one", "two", "x" * 200_000):
                socket_.send(text_)
                answers.append(socket_.recv())
            report(answers=[answer[:40] for answer in answers], sizes=[len(answer) for answer in answers])
""",
        NAMED,
    )
    assert len(run.seen) == 4, run.result.stderr
    for one, peer in zip(run.seen, [outside.allowed] * 2 + [outside.allowed_tls] * 2, strict=True):
        assert one["answers"][:2] == [f"{peer.nonce} one", f"{peer.nonce} two"]
        assert one["sizes"][2] == 200_017


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_server_sent_events_arrive_as_they_come(lab: Lab, outside: Outside, scheme: str) -> None:
    """Each event is sent only when the one before it has been acknowledged from inside: a buffer would stop the stream."""
    run = lab.run(
        f"""
import urllib.request
ids = []
with urllib.request.urlopen("{scheme}://allowed.test/sse/5", timeout=PATIENCE) as stream:
    for line in stream:
        if line.startswith(b"id: "):
            ids.append(int(line[4:]))
            urllib.request.urlopen(f"{scheme}://allowed.test/ack/{{ids[-1]}}", timeout=PATIENCE).read()
report(ids=ids)
""",
        NAMED,
    )
    assert run.only["ids"] == [0, 1, 2, 3, 4], run.result.stderr


def test_a_chunked_answer_keeps_its_end(lab: Lab, outside: Outside) -> None:
    """Chunks arrive whole and the end is seen: a strict reader is content."""
    run = lab.run('import httpx\nreport(lines=httpx.get("https://allowed.test/chunked/50").text.splitlines())', NAMED)
    assert run.only["lines"] == [f"{place} {outside.allowed_tls.nonce}" for place in range(50)]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_body_arrives_whole(lab: Lab, outside: Outside, method: str) -> None:
    """An upload with a length arrives unchanged."""
    run = lab.run(f'report(seen=fetch("https://allowed.test/echo", "{method}", bytes(range(256)) * 4096))', NAMED)
    seen = run.only["seen"]["json"]
    assert (seen["method"], seen["body_bytes"]) == (method, MIB)
    assert seen["body_sha256"] == hashlib.sha256(bytes(range(256)) * 4096).hexdigest()


def download(lab: Lab, url: str, size: int) -> None:
    proxy = psutil.Process(lab.proxy_pid)
    before = proxy.memory_info().rss
    run = lab.run(
        f"""
import hashlib, urllib.request
digest = hashlib.sha256()
with urllib.request.urlopen("{url}/bytes/{size}", timeout=60) as answer:
    while part := answer.read(1 << 20):
        digest.update(part)
report(sha256=digest.hexdigest())
""",
        NAMED,
        timeout=300,
    )
    assert run.only["sha256"] == content_sha256(size), run.result.stderr
    status = Path(f"/proc/{lab.proxy_pid}/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    assert peak - before < 64 * MIB, f"the proxy grew by {(peak - before) // MIB} MiB"
    (ended,) = [event for event in run.events if event.get("event") == "connection" and event.get("path")]
    assert ended["bytes_in"] >= size


@pytest.mark.parametrize(("scheme", "size"), [("http", 200_000_000), ("https", 1_000_000_000)])
def test_a_large_download_leaves_the_proxys_memory_flat(lab: Lab, scheme: str, size: int) -> None:
    """A gigabyte goes through without being kept."""
    download(lab, f"{scheme}://allowed.test", size)


def test_a_large_upload_leaves_the_proxys_memory_flat(lab: Lab, outside: Outside) -> None:
    """100 MB go up without being kept, with a length and chunked."""
    proxy = psutil.Process(lab.proxy_pid)
    before = proxy.memory_info().rss
    run = lab.run(
        """
import httpx
def parts():
    for _ in range(1600):
        yield bytes(65536)
for headers in ({"Content-Length": str(1600 * 65536)}, {}):
    report(seen=httpx.post("https://allowed.test/echo", content=parts(), headers=headers, timeout=120).json())
""",
        NAMED,
        timeout=300,
    )
    assert [one["seen"]["body_bytes"] for one in run.seen] == [1600 * 65536] * 2, run.result.stderr
    status = Path(f"/proc/{lab.proxy_pid}/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    assert peak - before < 64 * MIB


def test_a_denied_upload_is_answered_before_its_body(lab: Lab, outside: Outside) -> None:
    """A large upload to a denied host is refused at once and none of it leaves."""
    with outside.silence():
        run = lab.run(
            """
import httpx
try:
    report(status=httpx.post("https://other.test/", content=b"CANARY" * 4_000_000, timeout=60).status_code)
except httpx.HTTPError as error:
    report(status=repr(error))
""",
            NAMED,
        )
    assert run.only["status"] != 200
    assert run.reasons == {Reason.HOST_NOT_ALLOWED}


HTTP2_CLIENT = """
import h2.connection, h2.config, h2.events, hashlib
def get(paths):
    # A client that offers "h2" and nothing else, as gRPC libraries do.
    with socket.create_connection(("h2.test", 443), PATIENCE) as raw, tls(raw, "h2.test", "h2") as sock:
        assert sock.selected_alpn_protocol() == "h2", sock.selected_alpn_protocol()
        c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        c.initiate_connection()
        streams = {}
        for path in paths:
            stream = c.get_next_available_stream_id()
            streams[stream] = b""
            c.send_headers(stream, [(":method", "GET"), (":scheme", "https"), (":authority", "h2.test"), (":path", path)], True)
        sock.sendall(c.data_to_send())
        left = len(paths)
        while left and (data := sock.recv(65536)):
            for event in c.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    streams[event.stream_id] += event.data
                    c.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                    left -= 1
            sock.sendall(c.data_to_send())
        return list(streams.values())
"""


@pytest.mark.parametrize("size", [1000, 5_000_000])
def test_a_client_that_speaks_only_http2_works(lab: Lab, outside: Outside, size: int) -> None:
    """A client that offers nothing but HTTP/2 is served, by a server that speaks nothing else."""
    run = lab.run(
        f"""
{HTTP2_CLIENT}
echo, = get(["/echo"])
body, = get(["/bytes/{size}"])
report(seen=as_json(echo), sha256=hashlib.sha256(body).hexdigest())
""",
        named("h2.test"),
    )
    assert run.only["seen"]["nonce"] == outside.h2.nonce, run.result.stderr
    assert run.only["sha256"] == content_sha256(size)


def test_http2_streams_are_judged_apart(lab: Lab) -> None:
    """Many requests at once on one HTTP/2 connection are each answered, and each is in the log."""
    run = lab.run(
        HTTP2_CLIENT + 'report(targets=[as_json(body)["target"] for body in get([f"/echo/{n}" for n in range(40)])])',
        named("h2.test"),
    )
    assert run.only["targets"] == [f"/echo/{n}" for n in range(40)], run.result.stderr
    judged = [e["path"] for e in run.events if e.get("layer") == "http" and e["decision"] == "allow"]
    assert sorted(judged) == sorted(f"/echo/{n}" for n in range(40))


@pytest.mark.parametrize("way", ["proxied", "captured", "proxied-tls", "captured-tls"])
def test_an_upstream_connection_is_kept(lab: Lab, outside: Outside, way: str) -> None:
    """Many requests on one connection inside use one connection outside."""
    scheme = "https" if way.endswith("tls") else "http"
    peer = outside.allowed_tls if scheme == "https" else outside.allowed
    outside.forget()
    run = lab.run(
        f"""
import requests
with requests.Session() as session:
    if "{way}".startswith("captured"):
        session.trust_env, session.verify = False, os.environ["SSL_CERT_FILE"]
    report(seen=[session.get("{scheme}://allowed.test/echo").json()["connection"] for _ in range(20)])
""",
        NAMED,
    )
    assert run.only["seen"] == [1] * 20, run.result.stderr
    assert peer.journal.connections == 1
    assert len(peer.journal.requests) == 20


def test_a_passthrough_host_shows_its_own_certificate(lab: Lab, outside: Outside) -> None:
    """A host that the policy does not open is verified by its real authority, and would not be by ours."""
    authority = outside.authority.cert_pem.bytes().decode()
    probe = f"""
context = ssl.create_default_context()
context_own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context_own.load_verify_locations(cadata={authority!r})
for name in NAMES:
    for kind, chosen in (("real", context_own), ("inspected", ssl.create_default_context())):
        try:
            with chosen.wrap_socket(socket.create_connection((name, 443), PATIENCE), server_hostname=name) as sock:
                seen = ask(sock, f"GET /echo HTTP/1.1\\r\\nHost: {{name}}\\r\\n\\r\\n")["json"]["nonce"]
        except ssl.SSLCertVerificationError:
            seen = "unverified"
        report(name=name, kind=kind, seen=seen)
"""
    run = lab.run('NAMES = ["pinned.test", "allowed.test"]\n' + probe, named("pinned.test", "allowed.test"))
    seen = {(one["name"], one["kind"]): one["seen"] for one in run.seen}
    assert seen["pinned.test", "real"] == outside.pinned.nonce, run.result.stderr
    assert seen["allowed.test", "inspected"] == outside.allowed_tls.nonce
    assert seen["allowed.test", "real"] == "unverified"
    paths = [e for e in run.events if e.get("host") == "pinned.test" and e.get("path")]
    assert paths == [], "a passthrough host's requests cannot be seen"


def test_the_sandboxes_trust_keeps_the_public_roots(lab: Lab) -> None:
    """The bundle has our authority and the host's public ones."""
    run = lab.run("report(count=len(ssl.create_default_context().get_ca_certs()))", NAMED)
    ours = unconfined("report(count=len(ssl.create_default_context().get_ca_certs()))")
    assert run.only["count"] > ours[0]["count"] * 0.9 + 0


def test_a_server_inside_the_sandbox_works(lab: Lab, outside: Outside) -> None:
    """A server on 127.0.0.1 or ::1 inside is reached by the same code, is not proxied, and is not the host's.

    urllib takes `[::1]` for a host to be proxied: the form of NO_PROXY that it understands is one that httpx rejects.
    """
    with outside.silence():
        run = lab.run(
            f"""
import threading, http.server, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"inside")
    def log_message(self, *_): pass
class Six(http.server.HTTPServer):
    address_family = socket.AF_INET6
for kind, address, url in ((http.server.HTTPServer, "127.0.0.1", "127.0.0.1"), (http.server.HTTPServer, "127.0.0.1", "localhost"), (Six, "::1", "[::1]")):
    with kind((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{{url}}:{{server.server_port}}/"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
        report(seen=direct.open(url).read().decode() if kind is Six else fetch(url)["body"])
        server.shutdown()
report(seen=exchange("127.0.0.1", {outside.local.port})["error"])
""",
            NAMED,
        )
    assert [one["seen"] for one in run.seen[:3]] == ["inside"] * 3, run.result.stderr
    assert "ConnectionRefused" in run.seen[3]["seen"]
    assert not [e for e in run.events if e.get("event") in ("decision", "connection")]


def test_many_connections_at_once_are_served(lab: Lab, outside: Outside) -> None:
    """200 requests in parallel from one attempt all get their answer."""
    run = lab.run(
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(40) as pool:
    answers = list(pool.map(lambda n: fetch(f"https://allowed.test/echo/{n}")["json"]["target"], range(200)))
report(targets=answers)
""",
        NAMED,
        timeout=120,
    )
    assert run.only["targets"] == [f"/echo/{n}" for n in range(200)], run.result.stderr


def test_pip_uses_the_sandboxes_trust(lab: Lab, outside: Outside) -> None:
    """pip asks the configured index through the proxy and verifies it: it fails for what the page lacks, not for TLS."""
    outside.forget()
    run = lab.run(
        """
import subprocess, sys
done = subprocess.run(
    [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "-i", "https://index.test/simple/", "canary-package"],
    capture_output=True, text=True)
report(output=done.stdout + done.stderr)
""",
        REGISTRY,
        timeout=120,
    )
    assert "No module named pip" not in run.only["output"]
    assert any("canary-package" in seen.target for seen in outside.index.journal.requests), run.only["output"]
    assert "CERTIFICATE" not in run.only["output"].upper()


RULES = """
version: 1
name: loopback
network:
  modes: [named]
  allow:
    - host: first.test
      ports: [{port}]
  hosts:
    first.test: 127.0.0.1
    second.test: [127.0.0.1]
  private_addresses:
    - {{host: first.test, cidr: 127.0.0.1/32, ports: [{port}]}}
"""


def test_a_policy_as_the_documentation_writes_it_works(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """Static answers and private addresses in YAML lead to a loopback server, and to nothing else."""
    with open_lab(RULES.format(port=outside.local.port)) as lab:
        call: Call = named("first.test")
        run = lab.run(f'report(seen=fetch("http://first.test:{outside.local.port}/echo"))', call)
        assert run.only["seen"]["json"]["nonce"] == outside.local.nonce
        with outside.silence():
            run = lab.run(
                f'report(seen=[fetch("http://second.test:{outside.local.port}/"), fetch("http://first.test/")])', call
            )
        assert run.reasons == {Reason.HOST_NOT_ALLOWED, Reason.PORT_NOT_ALLOWED}


def test_without_an_allow_list_a_call_may_name_any_public_host(
    open_lab: Callable[[str], AbstractContextManager[Lab]], outside: Outside
) -> None:
    """`allow` omitted is any public host; `allow: []` is none."""
    text = "version: 1\nname: any\nnetwork:\n  modes: [named]\n"
    with open_lab(text) as lab:
        run = lab.run('report(seen=fetch("http://other.test/echo"))', named("other.test"))
        assert run.only["seen"]["json"]["nonce"] == outside.other.nonce
        with outside.silence(lookups=True):
            run = lab.run('report(seen=fetch("http://loop.test/echo"))', named("loop.test"))
        assert run.reasons == {Reason.ADDRESS_NOT_PUBLIC}
    with open_lab(text + "  allow: []\n") as lab, outside.silence():
        run = lab.run('report(seen=fetch("http://other.test/echo"))', named("other.test"))
    assert run.result.error is not None
    assert run.result.error.code == "policy_refused"
    assert run.seen == []


def test_attempts_leave_no_descriptor_in_the_proxy(lab: Lab) -> None:
    """Ten attempts with traffic leave the proxy's descriptors where they were."""
    lab.run('fetch("https://allowed.test/echo")', NAMED)
    before = descriptors(lab.proxy_pid)
    for _ in range(10):
        lab.run('fetch("https://allowed.test/echo")', NAMED)
    assert descriptors(lab.proxy_pid) <= before + 4
